"""What a model is asked in an evaluation: texts that are the same for all, as tokens of its own."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from heedful.commands.compare.setups import setups
from heedful.commands.evaluate.answers import Likelihood
from heedful.commands.evaluate.options import READ, ROWS, WRITTEN, Evaluation
from heedful.data import ByteTokenizer
from heedful.tasks import Task, babilong, needles
from heedful.tasks.babilong import BabiLong, only_label
from heedful.tasks.background import Background, Count, Question, background_sentences
from heedful.tasks.last_words import (
    Passage,
    detokenised,
    last_words,
    passages_of,
    read_passages,
)
from heedful.tasks.needles import Needles, all_found
from heedful.tasks.stories import read_stories
from heedful.tasks.windows import Window, domain_windows, domains

_REPLY = 20  # tokens that a reply may have, at least: as the authors of BABILong allow
_MORE = 4  # tokens beyond the longest answer


class Graded(NamedTuple):
    """What an answer is worth: numbers by name, and what was said in place of what."""

    values: dict[str, float]
    reply: str | None = None
    expected: str | None = None
    curve: dict[str, list[float]] = {}  # noqa: RUF012 (a NamedTuple's default is never changed)


class Item(NamedTuple):
    """One sample as tokens.

    Arguments:
        task, key, cell: as in `heedful.records.samples.Sample`.
        asked: a digest of what is asked.
        ids: what the model reads.
        room: tokens that it may write; 0 where it is asked how likely `ids` are.
        grade: what an answer is worth: a text, or a `Likelihood`.
    """

    task: str
    key: str
    cell: dict
    asked: str
    ids: list[int]
    room: int
    grade: Callable[[str | Likelihood], Graded]


Texts = dict[str, list[Question] | list[Passage]]


def texts(asked: Evaluation, count: Count) -> Texts:
    """Questions and passages by task, which are the same for all models.

    Arguments:
        asked: the evaluation.
        count: by which lengths are counted.

    Raises:
        ValueError: a text cannot be read, or a question does not fit into its length.
    """
    found: Texts = {}
    backgrounds = _backgrounds(asked, count)
    for name in asked.tasks:
        if name == "needles":
            found[name] = [
                question
                for task in _needles(asked)
                for question in task.sample(
                    asked.samples, asked.seed, backgrounds[name, task.length], count
                )
            ]
        elif name == "babilong":
            found[name] = _stories(asked, backgrounds, count)
        elif name in ("lambada", "lambada-detokenised"):
            given = (
                read_passages(asked.lambada)
                if asked.lambada is not None
                else passages_of(asked.data, asked.samples, asked.seed)
            )
            if name != "lambada":
                given = [detokenised(text) for text in given[: asked.samples]]
            found[name] = last_words(given, asked.samples)
    return found


def _needles(asked: Evaluation) -> list[Needles]:
    return [
        Needles(length, n, depth, min(asked.asked, n))
        for length in asked.lengths if length
        for n in asked.needles
        for depth in asked.depths
    ]  # fmt: skip


_Backgrounds = dict[tuple[str, int], Background]


def _stories(asked: Evaluation, backgrounds: _Backgrounds, count: Count) -> list[Question]:
    found = []
    for kind in asked.kinds:
        given = () if asked.babi is None else read_stories(asked.babi, kind)
        for length in asked.lengths:
            task = BabiLong(kind, length)
            background = backgrounds.get(("babilong", length))
            found += task.sample(asked.samples, asked.seed, background, count, given)
    return found


def _backgrounds(asked: Evaluation, count: Count) -> _Backgrounds:
    """Text without what the questions are about; of each length its own, so that another length
    changes none of its prompts."""
    unwanted = {"needles": needles.UNWANTED, "babilong": babilong.UNWANTED}
    return {
        (name, length): Background(
            background_sentences(asked.haystack, length, unwanted[name]), count
        )
        for name in WRITTEN
        for length in asked.lengths
        if name in asked.tasks and length
    }


def items(asked: Evaluation, given: Texts, tokenizer, vocabulary: int, model: str) -> list[Item]:
    """All that one model is asked, task by task.

    Arguments:
        asked: the evaluation.
        given: what `texts` made.
        tokenizer: the model's; not needed for tasks of rows.
        vocabulary: how many tokens the model has.
        model: its name, for messages.

    Raises:
        ValueError: a text cannot be read, or a task has another vocabulary.
    """
    found: list[Item] = []
    for name in asked.tasks:
        if name in WRITTEN:
            found += [_written(name, question, tokenizer) for question in given[name]]
        elif name == "perplexity":
            found += _windows(asked, tokenizer)
        elif name in READ:
            found += [_passage(name, passage, tokenizer) for passage in given[name]]
        elif name in ROWS:
            found += _rows(asked, name, setups()[name].task, vocabulary, model)
    return found


def _written(task: str, question: Question, tokenizer) -> Item:
    def grade(reply: str | Likelihood) -> Graded:
        if task == "needles":
            right = all_found(reply, question.answers)
        else:
            right = only_label(reply, question.answers[0], question.question, question.labels)
        return Graded({"right": float(right)}, reply, ", ".join(question.answers))

    ids = tokenizer.encode(question.prompt)
    asked = _digest(question.prompt, question.answers, question.labels)
    return Item(
        task, question.key, question.cell, asked, list(ids), reply_room(tokenizer, question), grade
    )


def reply_room(tokenizer, question: Question) -> int:
    """Tokens that a reply may have: what the longest answer takes, and some more."""
    answers = [", and ".join(question.answers), *question.labels]
    sizes = [len(tokenizer.encode(f" {x}.", add_special_tokens=False)) for x in answers]
    return max(_REPLY, max(sizes) + _MORE)


def _passage(task: str, passage: Passage, tokenizer) -> Item:
    """Tokens of the word are what the whole has beyond the context, as in lm-evaluation-harness."""
    context = tokenizer.encode(passage.context)
    ids = list(tokenizer.encode(passage.context + passage.word))
    first = max(1, min(len(context), len(ids) - 1))

    def grade(found: str | Likelihood) -> Graded:
        nats, likeliest = found.nats[first - 1 :], found.likeliest[first - 1 :]
        right = likeliest.tolist() == ids[first:]
        values = {
            "right": float(right),
            "nats": nats.double().sum().item(),
            "tokens": len(ids) - first,
            "bytes": len(passage.word.encode()),
        }
        return Graded(values, tokenizer.decode(likeliest.tolist()), passage.word)

    asked = _digest(passage.context, passage.word)
    return Item(task, passage.key, {}, asked, ids, 0, grade)


def _windows(asked: Evaluation, tokenizer) -> list[Item]:
    stride = asked.stride or max(1, asked.length // 2)
    return [
        _window(name, window)
        for name, paths in domains(asked.data).items()
        for window in domain_windows(
            paths, lambda text: encoded(tokenizer, text), asked.samples, asked.length, stride
        )
    ]


def encoded(tokenizer, text: str) -> tuple[list[int], list[int]]:
    """A text's tokens, and where the text of each ends, in bytes.

    Raises:
        ValueError: the tokenizer does not tell where its tokens stand.
    """
    if isinstance(tokenizer, ByteTokenizer):
        ids = tokenizer.encode(text)
        return ids, list(range(1, len(ids) + 1))
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer {type(tokenizer).__name__} does not say where its tokens stand in the "
            "text, which bits per byte need; take a fast one, or leave perplexity out"
        )
    found = tokenizer(text, return_offsets_mapping=True)
    before = [0]  # bytes before each character
    for character in text:
        before.append(before[-1] + len(character.encode()))
    ends, last = [], 0
    for _, end in found["offset_mapping"]:
        last = max(last, before[end])  # special tokens stand at 0
        ends.append(last)
    return list(found["input_ids"]), ends


def _window(domain: str, window: Window) -> Item:
    def grade(found: str | Likelihood) -> Graded:
        nats = found.nats.double()
        counted = nats[window.first - 1 :]
        values = {"nats": counted.sum().item(), "tokens": len(counted), "bytes": window.nbytes}
        return Graded(values, curve=by_position(nats.tolist()))

    asked = _digest(window.ids, window.first)
    key = f"{domain} {window.key}"
    return Item("perplexity", key, {"domain": domain}, asked, list(window.ids), 0, grade)


def by_position(nats: Sequence[float]) -> dict[str, list[float]]:
    """Sums over tokens with 1, 2 to 3, 4 to 7, 8 to 15, ... tokens before them in the window."""
    sums = [0.0] * (len(nats).bit_length())
    counts = [0] * len(sums)
    for before, value in enumerate(nats, start=1):
        sums[before.bit_length() - 1] += value
        counts[before.bit_length() - 1] += 1
    return {"nats": sums, "tokens": counts}


def _rows(asked: Evaluation, name: str, task: Task, vocabulary: int, model: str) -> list[Item]:
    if task.vocab_size != vocabulary:
        raise ValueError(
            f"task {name!r} has {task.vocab_size} tokens and model {model!r} has {vocabulary}; it "
            f"is for models that `heedful compare --tasks {name}` trained"
        )
    found = []
    for split, other in task.evaluations().items():
        rows = other.held_out(asked.samples)
        for number, (ids, labels) in enumerate(zip(rows.input_ids, rows.labels, strict=True)):
            # Rows are drawn together: with other counts they are others.
            key = f"{split} {number + 1} of {len(rows.input_ids)}"
            found.append(_row(name, split, other, key, ids, labels))
    return found


def _row(name, split: str, task: Task, key: str, ids, labels) -> Item:
    def grade(found: str | Likelihood) -> Graded:
        predictions = torch.nn.functional.pad(found.likeliest, (0, 1))[None]
        return Graded({"error": task.score(predictions, labels[None])[task.metric]})

    asked = _digest(ids.tolist(), labels.tolist())
    return Item(name, key, {"split": split}, asked, ids.tolist(), 0, grade)


def check_fits(found: Sequence[Item], most: int | None, model: str) -> None:
    """Raise unless the model has positions for everything that it is asked."""
    way_out = {"perplexity": "--length", "needles": "--lengths", "babilong": "--lengths"}
    longest = max(found, key=lambda item: len(item.ids) + item.room, default=None)
    if longest is None or most is None or len(longest.ids) + longest.room <= most:
        return
    hint = f"give a smaller {way_out[longest.task]}" if longest.task in way_out else "leave it out"
    written = f" and up to {longest.room} written" if longest.room else ""
    raise ValueError(
        f"model {model!r} has positions for {most} tokens, and {longest.task} asks for "
        f"{len(longest.ids)}{written} ({longest.key}); {hint}, nothing is cut off"
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def finite(values: dict[str, float]) -> dict[str, float]:
    """Numbers that JSON can hold; a model that gives none of these is broken.

    Raises:
        ValueError: one is not finite.
    """
    for name, value in values.items():
        if not math.isfinite(value):
            raise ValueError(f"the model gives {name} = {value}; its weights or its dtype are off")
    return values
