"""Language modelling of real text, in bytes or in a byte-pair vocabulary trained on it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import UserError, check_choice, check_whole
from heedful.data import corpus
from heedful_lab.tasks.samples import IGNORE, Recipe, Samples, Task, check_aligned, check_draw
from heedful_lab.tasks.vocabulary import BYTES, byte_pairs, bytes_alone

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_VOCABULARY = 2048  # ids of a byte-pair vocabulary that a small model can learn
_BOS = "<bos>"  # of a saved tokenizer; text that spells it becomes this token there
_HELD_OUT = 0.1
_SHOWN = 48  # tokens


class _Corpus(NamedTuple):
    """The token streams of both parts, documents joined by BOS, and the vocabulary."""

    train: np.ndarray
    held_out: np.ndarray
    tokenizer: "Tokenizer | None"
    token_bytes: np.ndarray


@dataclass(frozen=True)
class Text(Task):
    """Language modelling: predict every next token of real text.

    A sequence is BOS and `length - 1` consecutive tokens of a part of the corpus, whose documents
    are joined by BOS. Every token of text has loss; BOS has none. The corpus is read, split and
    encoded at the first use and kept in the object.

    About a tenth of the text is for evaluation: whole documents, drawn with a fixed seed, or the
    end of the one document there is. A byte-pair vocabulary is trained on the training part alone.

    Arguments:
        paths: what `heedful.data.corpus` takes; empty for the Python standard library's sources.
        length: tokens of a sequence, BOS included.
        tokenizer: `"byte"`, or `"bpe"` for byte-pair encoding over bytes.
        vocab_size: number of ids, BOS (the last id) included; 257 with bytes. With `"bpe"` it must
            be larger (4096 unless given); a small corpus may leave some ids unused.
        part: which part `sample` draws from: `"train"` or `"held-out"`.
        limit_bytes: read only so much of the corpus.

    Raises:
        ValueError: if a field is out of range; at the first use, if the corpus cannot be read or a
            part of it is shorter than a sequence.
    """

    paths: tuple[str, ...] = ()
    length: int = 256
    tokenizer: Literal["byte", "bpe"] = "byte"
    vocab_size: int | None = None
    part: Literal["train", "held-out"] = "train"
    limit_bytes: int | None = None

    recipe: ClassVar[Recipe] = Recipe(
        128, 4, 4, 400, 8, 3e-3, ("standard", "mta", "selective"), held_out=64,
        changes={"grouped": {"size": 8, "window": 16}},
    )  # fmt: skip
    metric: ClassVar[str] = "perplexity"
    also: ClassVar[tuple[str, ...]] = ("bits_per_byte",)
    scored_by: ClassVar[str] = "losses"
    end: ClassVar[str] = "BOS"  # which parts documents: text has no other end

    def __post_init__(self) -> None:
        if isinstance(self.paths, str) or not isinstance(self.paths, Sequence):
            raise UserError(
                f"paths must be a tuple of paths, got {self.paths!r}; write paths=({self.paths!r},)"
            )
        # Strings in a tuple keep the configuration hashable and easy to write to a record.
        object.__setattr__(self, "paths", tuple(str(path) for path in self.paths))
        check_whole("length", self.length, 2, way_out="a sequence is BOS and at least one token")
        check_choice("tokenizer", self.tokenizer, ("byte", "bpe"))
        check_choice("part", self.part, ("train", "held-out"))
        if self.limit_bytes is not None:
            check_whole("limit_bytes", self.limit_bytes, 1, way_out="use None for everything")
        if self.vocab_size is None:
            size = BYTES + 1 if self.tokenizer == "byte" else 4096
            object.__setattr__(self, "vocab_size", size)
        if self.tokenizer == "byte" and self.vocab_size != BYTES + 1:
            raise UserError(
                f'vocab_size must be 257 (bytes and BOS) with tokenizer="byte", got '
                f'{self.vocab_size!r}; leave it out, or use tokenizer="bpe"'
            )
        if self.tokenizer == "bpe":
            check_whole(
                "vocab_size",
                self.vocab_size,
                BYTES + 2,
                1 << 16,
                way_out='257 ids are bytes and BOS: use tokenizer="byte" for these alone',
            )

    @property
    def bos(self) -> int:
        """The id that begins a sequence and separates documents."""
        return self.vocab_size - 1

    @cached_property
    def _corpus(self) -> _Corpus:
        texts = [document.text for document in corpus(self.paths, self.limit_bytes)]
        train, held_out = _split(texts)
        sizes = np.zeros(self.vocab_size, dtype=np.int64)  # BOS stands for no byte
        if self.tokenizer == "byte":
            vocabulary = None
            sizes[:BYTES] = 1
        else:
            # BOS is no token of the tokenizer: text that spells it cannot become one.
            vocabulary = byte_pairs(train, self.vocab_size - 1)
            # In a byte-level vocabulary one character of a token's name stands for one byte.
            for name, index in vocabulary.get_vocab().items():
                sizes[index] = len(name)
        streams = (_stream(part, vocabulary, self.bos) for part in (train, held_out))
        return _Corpus(*streams, vocabulary, sizes)

    def sample(self, count: int, seed: int) -> Samples:
        """`count` sequences from random places of the part, the same for the same count and seed.

        The sequences may overlap; for figures that count each token once, see `held_out`.
        """
        check_draw(count, seed)
        stream = self._corpus.train if self.part == "train" else self._corpus.held_out
        places = self._places(stream, self.part)
        return self._rows(stream, np.random.default_rng(seed).integers(places, size=count))

    def held_out(self, count: int | None = None) -> Samples:
        """Sequences that cover the evaluation part without overlap: all, or `count` spread evenly.

        Where fewer than `count` fit, these few are returned. A rest shorter than a sequence is left
        out.
        """
        if count is not None:
            check_whole("count", count, 1)
        stream = self._corpus.held_out
        self._places(stream, "held-out")
        fit = len(stream) // (self.length - 1)
        indices = np.arange(fit)
        if count is not None and count < fit:
            indices = np.arange(count) * fit // count
        return self._rows(stream, indices * (self.length - 1))

    def _places(self, stream: np.ndarray, part: str) -> int:
        """Number of starts that a sequence has in the stream."""
        places = len(stream) - (self.length - 1) + 1
        if places < 1:
            texts = ", ".join(self.paths) or "the standard library's sources"
            raise UserError(
                f"{texts}: too short for sequences of length={self.length}, as the {part} part has "
                f"{len(stream)} tokens; give more text, or sequences of at most {len(stream) + 1}"
            )
        return places

    def _rows(self, stream: np.ndarray, starts: np.ndarray) -> Samples:
        window = stream[starts[:, None] + np.arange(self.length - 1)].astype(np.int64)
        ids = torch.from_numpy(np.insert(window, 0, self.bos, axis=1))
        labels = ids.masked_fill(ids == self.bos, IGNORE)
        return Samples(ids, labels, torch.ones_like(ids))

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence, without BOS; bytes cut off at its ends appear as U+FFFD."""
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise UserError(
                    f"ids must lie in 0..{self.vocab_size - 1}, got {i}; -100 marks a label "
                    "without loss: decode input_ids, or leave such positions out"
                )
        ids = [i for i in ids if i != self.bos]
        if self.tokenizer == "byte":
            return bytes(ids).decode(errors="replace")
        return self._corpus.tokenizer.decode(ids)

    @classmethod
    def default(cls, data: Sequence[str] = ()) -> "Text":
        """Of the text that is given."""
        return cls(paths=tuple(data))

    def cut(self, length: int | None, tokenizer: str) -> "Text":
        """Sequences of so many tokens, of bytes or of byte pairs."""
        size = _VOCABULARY if tokenizer == "bpe" else None
        length = self.length if length is None else length
        return replace(self, length=length, tokenizer=tokenizer, vocab_size=size)

    def shown(self) -> Int[Tensor, " T"]:
        """The beginning of an evaluation sequence."""
        return self.evaluations()["held-out"].sample(1, 0).input_ids[0, :_SHOWN]

    def evaluations(self) -> "dict[str, Text]":
        """The evaluation part as a task of its own that shares this one's corpus."""
        held_out = replace(self, part="held-out")
        # Without this the copy would read the corpus and train the vocabulary once more.
        held_out.__dict__["_corpus"] = self._corpus
        return {"held-out": held_out}

    def saved_tokenizer(self) -> "Tokenizer":
        """The tokens of a sequence: BOS, then bytes or byte pairs."""
        from tokenizers import Tokenizer, processors

        tokenizer = bytes_alone() if self.tokenizer == "byte" else self._corpus.tokenizer
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.add_special_tokens([_BOS])
        if tokenizer.token_to_id(_BOS) != self.bos:
            return (
                tokenizer  # a vocabulary that a small corpus left unfilled: BOS has another number
            )
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_BOS} $A", special_tokens=[(_BOS, self.bos)]
        )
        return tokenizer

    def special_tokens(self) -> dict[str, int]:
        """BOS."""
        return {"bos_token": self.bos}

    def under_budgets(self) -> "dict[str, Text]":
        """The evaluation part."""
        return self.evaluations()

    def score(self, losses: Float[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> dict[str, float]:
        """`perplexity` per token and `bits_per_byte`, which also compares across vocabularies.

        Both come from sums over all sequences: exp(nats / tokens) and nats / (ln 2 · bytes), with
        the bytes of the very tokens that were predicted.

        Arguments:
            losses: negative log-likelihoods in nats as from `token_losses`: position t holds that
                of `labels[t+1]`.
            labels: -100 where there is no target.

        Raises:
            ValueError: if the shapes differ, no position has a label or losses are not floats.
        """
        check_aligned("losses", losses, labels)
        if not losses.is_floating_point():
            raise UserError(
                f"losses must be floats in nats, got {losses.dtype}; pass token_losses(logits, "
                "labels), not predictions"
            )
        targets = labels[:, 1:]
        mask = targets != IGNORE
        nats = losses[:, :-1][mask].double().sum().item()
        tokens = int(mask.sum())
        # With bytes the corpus is not needed, so a saved run can be scored without its text.
        byte = self.tokenizer == "byte"
        size = tokens if byte else int(self._corpus.token_bytes[targets[mask].cpu().numpy()].sum())
        with np.errstate(over="ignore"):  # a diverged model: infinity is the answer
            perplexity = float(np.exp(np.float64(nats / tokens)))
        return {"perplexity": perplexity, "bits_per_byte": nats / (math.log(2) * size)}


def _split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Training and evaluation documents; the latter are about a tenth of the characters."""
    if len(texts) == 1:
        cut = len(texts[0]) - max(1, int(len(texts[0]) * _HELD_OUT))
        return [texts[0][:cut]], [texts[0][cut:]]
    room = int(sum(map(len, texts)) * _HELD_OUT)
    held_out = set()
    for index in np.random.default_rng(0).permutation(len(texts)).tolist():
        if len(texts[index]) <= room:
            held_out.add(index)
            room -= len(texts[index])
    # Few documents of like size: none fits into a tenth, so the shortest is for evaluation.
    held_out = held_out or {min(range(len(texts)), key=lambda index: len(texts[index]))}
    train = [text for index, text in enumerate(texts) if index not in held_out]
    return train, [texts[index] for index in sorted(held_out)]


def _stream(texts: list[str], tokenizer: "Tokenizer | None", bos: int) -> np.ndarray:
    """All documents as one array of ids, with BOS between them."""
    parts: list[np.ndarray] = []
    for text in texts:
        if tokenizer is None:
            ids = np.frombuffer(text.encode(), dtype=np.uint8)
        else:
            ids = np.array(tokenizer.encode(text).ids)
        parts += [np.array([bos]), ids]
    # Sequences bring a BOS of their own, so the first is left out.
    return np.concatenate(parts[1:]).astype(np.uint16)
