"""Data of a run: texts, conversations and generated facts, each with its share."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from heedful.checks import UserError
from heedful.training.sequences import (
    EncodedDocument,
    TokenFile,
    encode,
    encode_documents,
    leading_bos,
)
from heedful_lab.commands.options import RECALL
from heedful_lab.commands.train.options import Part
from heedful_lab.tasks.background import Background, prose, sentences
from heedful_lab.tasks.facts import fact_texts

_HAYSTACK = 1 << 24  # bytes of text that facts lie in
_MOST_FACTS = 1 << 14  # texts with facts; a longer run reads them again


class Mixture(NamedTuple):
    """Data that a run trains and is evaluated on.

    files: to train on.
    weights: how many sequences of each come in a row.
    held_out: the evaluation set.
    """

    files: list[TokenFile]
    weights: list[int]
    held_out: TokenFile


class TextPlan(NamedTuple):
    """Texts to read.

    parts: of `Training.parts`.
    held_out: the evaluation set; by default a twentieth of the first text.
    length: tokens of a sequence.
    tokens: of the whole run.
    seed: of generated facts.
    """

    parts: list[Part]
    held_out: tuple[str, ...]
    length: int
    tokens: int
    seed: int


def read_mixture(plan: TextPlan, tokenizer, folder: Path, show: bool = False) -> Mixture:
    """Encode each part into a folder of its own; parts that are there already are read back.

    Arguments:
        plan: what is read.
        tokenizer: of the model.
        folder: for the encoded parts.
        show: a bar with what has been read.

    Raises:
        ValueError: a part cannot be read or is too short, or there is no text among them.
    """
    parts, held_out, length, tokens, seed = plan
    files: list[TokenFile] = []
    evaluation: TokenFile | None = None
    bos, whole = leading_bos(tokenizer), sum(part.weight for part in parts)
    texts = tuple(x for part in parts if _is_text(part) for x in part.data)
    if not any(map(_is_text, parts)):
        raise UserError("data must name a text beside recall and conversations, to evaluate on")
    for number, part in enumerate(parts):
        most = -(-tokens * part.weight // whole) + 1
        place = folder / str(number)
        if part.data == (RECALL,):
            documents = fact_documents(texts, tokenizer, length, seed)
            most = max(min(most, _MOST_FACTS * (length - 1)), length)
            files.append(encode_documents(documents, place, most_tokens=most, bos=bos))
        elif _is_chat(part):
            documents = _conversations(Path(part.data[0]), tokenizer)
            most = max(most, length)
            files.append(encode_documents(documents, place, most_tokens=most, bos=bos))
        else:
            text = encode(
                part.data,
                held_out if evaluation is None else (),
                tokenizer,
                place,
                length=length,
                most_tokens=most,
                show=show,
            )
            files.append(text.train)
            evaluation = evaluation or text.held_out
        if files[-1].tokens < length:
            raise UserError(
                f"data: {part.data[0]!r} has {files[-1].tokens} tokens, too few for a sequence of "
                f"{length}; give more, or a shorter length"
            )
    return Mixture(files, [part.weight for part in parts], evaluation)


def _is_text(part: Part) -> bool:
    return part.data != (RECALL,) and not _is_chat(part)


def _is_chat(part: Part) -> bool:
    """Test whether a part is a file of conversations: its first line has "messages"."""
    path = Path(part.data[0]) if part.data else Path()
    if len(part.data) != 1 or not path.is_file():
        return False
    if not path.name.removesuffix(".gz").endswith(".jsonl"):
        return False
    return next((True for messages in _messages(path) if messages is not None), False)


def _messages(path: Path) -> Iterator[list[dict[str, str]] | None]:
    """The conversations of a file; `None` once, where its first line is none."""
    opening = gzip.open if path.suffix == ".gz" else open
    with opening(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                messages = fields["messages"]
                if not all(isinstance(x["role"] + x["content"], str) for x in messages):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                if number == 1:
                    yield None
                    return
                raise UserError(
                    f'data: line {number} of {path} must hold "messages", each with "role" and '
                    '"content"; fix it or leave it out'
                ) from None
            yield messages


def _conversations(path: Path, tokenizer) -> Iterator[EncodedDocument]:
    spell = _chat_of(tokenizer)
    if spell is None:
        raise UserError(
            f"data: {path} holds conversations, and this tokenizer has no chat template; name "
            "another with --tokenizer"
        )
    for messages in _messages(path):
        text = spell(messages)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield EncodedDocument(ids, text_bytes=len(text.encode()))


def fact_documents(
    texts: tuple[str, ...], tokenizer, length: int, seed: int
) -> Iterator[EncodedDocument]:
    """Texts with facts of one token less than a sequence, so that each is read whole.

    Raises:
        ValueError: the tokenizer does not tell where its tokens stand in a text.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "data: recall needs a tokenizer that tells where tokens stand in a text (a fast one of "
            "transformers); name another with --tokenizer"
        )

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    lines = [line for text in prose(texts, _HAYSTACK) for line in sentences(text)]
    background = Background(lines, count)
    bos = [] if (first := leading_bos(tokenizer)) is None else [first]
    room = length - 1
    for sample in fact_texts(background, room - len(bos), seed, count, _chat_of(tokenizer)):
        encoding = tokenizer(sample.text, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans = list(encoding["input_ids"]), encoding["offset_mapping"]
        learned = [any(a < stop and start < b for start, stop in sample.answers) for a, b in spans]
        if ids[:1] != bos:  # else the chat template spells it
            ids, learned = bos + ids, [False] * len(bos) + learned
        filler = room - len(ids)
        ids += [tokenizer.eos_token_id or 0] * filler
        yield EncodedDocument(ids, learned + [False] * filler, len(sample.text.encode()))


def _chat_of(tokenizer):
    """Function that formats a conversation, where the tokenizer has a template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return lambda messages: tokenizer.apply_chat_template(messages, tokenize=False)
