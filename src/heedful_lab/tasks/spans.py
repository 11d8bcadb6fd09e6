"""Span corruption of real text: what T5 is pretrained on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError, check_whole
from heedful_lab.tasks.pairs import Pairs, PairTask
from heedful_lab.tasks.samples import IGNORE, Recipe, check_draw
from heedful_lab.tasks.text import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Spans(PairTask):
    """Spans: of a piece of real text some spans are taken out, and are to be written.

    The source is the text with a sentinel in place of each span, the target each sentinel with its
    span behind it, both with an end. With `<0>`, `<1>` for sentinels:

        thank you <0> me to your party <1> week   ->   <0> for inviting <1> last

    A piece of `length` tokens loses `round(length · noise)` of them in `round(lost / mean_span)`
    spans; lengths of spans, and of what is left before each, are drawn uniformly among all ways to
    divide, as T5's `random_spans_noise_mask` does. A piece begins with what is left and ends with a
    span. All tokens of the target have loss.

    The texts, their parts and their tokens are those of `Text`; documents are joined by its BOS.

    Arguments:
        paths, tokenizer, limit_bytes: of `Text`.
        length: tokens of the piece, before any is taken out.
        noise: the fraction that is taken out.
        mean_span: mean tokens of a span.
        text_vocab_size: ids of the text, its BOS included; that of `Text` unless given.
        part: which part `sample` draws from: `"train"` or `"held-out"`.

    Raises:
        ValueError: if a field is out of range; at the first use, if the corpus cannot be read or a
            part of it is too short.

    Source: Raffel et al., Exploring the Limits of Transfer Learning, arXiv 1910.10683, §3.1.4.
    """

    paths: tuple[str, ...] = ()
    length: int = 128
    noise: float = 0.15
    mean_span: float = 3.0
    tokenizer: Literal["byte", "bpe"] = "byte"
    text_vocab_size: int | None = None
    part: Literal["train", "held-out"] = "train"
    limit_bytes: int | None = None

    metric: ClassVar[str] = "perplexity"
    also: ClassVar[tuple[str, ...]] = ("loss",)
    scored_by: ClassVar[str] = "losses"
    recipe: ClassVar[Recipe] = Recipe(
        96, 2, 4, 800, 16, 2e-3, ("standard", "selective"), held_out=128,
        changes={"grouped": {"size": 8, "window": 16}},
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_whole("length", self.length, 2, way_out="one token is left and one taken out")
        for name, most in (("noise", 1.0), ("mean_span", math.inf)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < most:
                raise UserError(f"{name} must lie between 0 and {most}, got {value!r}")
        object.__setattr__(self, "paths", self._text.paths)  # checked, and as a tuple
        object.__setattr__(self, "text_vocab_size", self._text.vocab_size)

    @cached_property
    def _text(self) -> Text:
        """Sequences of BOS and one piece."""
        return Text(
            self.paths,
            self.length + 1,
            self.tokenizer,
            self.text_vocab_size,
            self.part,
            self.limit_bytes,
        )

    @property
    def lost(self) -> int:
        """Number of tokens removed from a piece; one is at least, and one is left."""
        return min(max(round(self.length * self.noise), 1), self.length - 1)

    @property
    def spans(self) -> int:
        """In how many spans they lie."""
        return min(max(round(self.lost / self.mean_span), 1), self.length - self.lost)

    @property
    def target_length(self) -> int:
        """Tokens of a target, its end included."""
        return self.lost + self.spans + 1

    @property
    def vocab_size(self) -> int:
        """The text's ids, one sentinel for each span, padding and end."""
        return self._text.vocab_size + self.spans + 2

    def sentinel(self, span: int) -> int:
        """The id that stands for a span."""
        return self._text.vocab_size + span

    def sample(self, count: int, seed: int) -> Pairs:
        """`count` sequences, the same for the same configuration, count and seed."""
        check_draw(count, seed)
        # A seed of its own for the spans: otherwise they would hang together with the pieces.
        return self._corrupted(self._text.sample(count, seed).input_ids, (seed, 1))

    def held_out(self, count: int | None = None) -> Pairs:
        """Pieces that cover the evaluation part without overlap, all or `count` evenly spread."""
        return self._corrupted(self._text.held_out(count).input_ids, (0, 2))

    def _corrupted(self, rows: Int[Tensor, "N T"], seed: tuple[int, int]) -> Pairs:
        rng = np.random.default_rng(seed)
        pairs = [self.corrupt(row[1:], self.mask(rng)) for row in rows.numpy()]
        return self.padded(*zip(*pairs, strict=True))

    def mask(self, rng: np.random.Generator) -> Bool[np.ndarray, " length"]:
        """Mark the tokens removed from a piece."""
        rest = _divided(rng, self.length - self.lost, self.spans)
        lengths = _divided(rng, self.lost, self.spans)
        sizes = np.stack([rest, lengths], axis=1).ravel()
        return np.repeat(np.arange(2 * self.spans) % 2 == 1, sizes)

    def corrupt(
        self, piece: Int[np.ndarray, " length"], mask: Bool[np.ndarray, " length"]
    ) -> tuple[list[int], list[int]]:
        """Source and target of a piece whose tokens under `mask` are taken out."""
        begins = mask & ~np.insert(mask[:-1], 0, False)
        source: list[int] = []
        target: list[int] = []
        span = -1
        for token, masked, begin in zip(piece.tolist(), mask, begins, strict=True):
            if begin:
                span += 1
                source.append(self.sentinel(span))
                target.append(self.sentinel(span))
            (target if masked else source).append(token)
        return source, target

    def restored(self, source: Sequence[int], target: Sequence[int]) -> list[int]:
        """The piece again, from ids of both."""
        first, spans, whole = self.sentinel(0), {}, []
        for token in self.written(target):
            if token >= first:
                spans[token] = []
                last = spans[token]
            else:
                last.append(token)
        for token in self.written(source):
            whole += spans[token] if token >= first else [token]
        return whole

    def saved_tokenizer(self) -> "Tokenizer":
        """The text's tokens, and sentinels as `<0>`, `<1>`; an end behind a text."""
        sentinels = [f"<{span}>" for span in range(self.spans)]
        return self.with_end(self._text.saved_tokenizer(), sentinels)

    @classmethod
    def default(cls, data: Sequence[str] = ()) -> "Spans":
        """Of the text that is given."""
        return cls(paths=tuple(data))

    def cut(self, length: int | None, tokenizer: str) -> "Spans":
        """Pieces of so many tokens, of bytes or of byte pairs."""
        size = Text().cut(None, tokenizer).vocab_size
        length = self.length if length is None else length
        return replace(self, length=length, tokenizer=tokenizer, text_vocab_size=size)

    def evaluations(self) -> "dict[str, Spans]":
        """The evaluation part as a task of its own that shares this one's corpus."""
        held_out = replace(self, part="held-out")
        held_out.__dict__["_text"] = self._text.evaluations()["held-out"]
        return {"held-out": held_out}

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence before its end, with sentinels as `<0>`, `<1>`."""
        first, parts, run = self.sentinel(0), [], []
        for token in self.written(ids):
            if token >= first:
                parts += [self._text.decode(run), f"<{token - first}>"]
                run = []
            else:
                run.append(token)
        return "".join([*parts, self._text.decode(run)])

    def score(self, losses: Float[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> dict[str, float]:
        """`perplexity` per token of the targets, sentinels and ends included.

        Arguments:
            losses: negative log-likelihoods in nats: position t holds that of `labels[t]`.
            labels: -100 where there is no target.
        """
        mask = labels != IGNORE
        if losses.shape != labels.shape or not bool(mask.any()):
            raise UserError(
                f"losses must have labels' shape {list(labels.shape)}, with at least one "
                f"target, got {list(losses.shape)}"
            )
        with np.errstate(over="ignore"):  # a diverged model: infinity is the answer
            return {"perplexity": float(np.exp(np.float64(losses[mask].double().mean().item())))}


def _divided(rng: np.random.Generator, items: int, parts: int) -> np.ndarray:
    """Sizes of so many parts of at least one item, drawn uniformly among all ways to divide."""
    ends = np.sort(rng.permutation(items - 1)[: parts - 1]) + 1
    return np.diff(ends, prepend=0, append=items)
