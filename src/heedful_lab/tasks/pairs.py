"""Tasks with a source and a target for encoder-decoders: sequences, texts, their vocabulary.

The texts come from files or data sets of the user, or from a generator of the task.
"""

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from heedful.checks import UserError, check_choice, check_whole
from heedful.data import TextPair, text_pairs
from heedful_lab.tasks.samples import IGNORE, Task, check_draw
from heedful_lab.tasks.vocabulary import BYTES, byte_pairs, bytes_alone

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_HELD_OUT = 10  # one pair in so many is for evaluation
_VOCABULARY = 2048  # ids of a byte-pair vocabulary by default
_SPECIAL = ("<pad>", "</s>")  # the last two ids of a pair task, as a saved tokenizer spells them


class Pairs(NamedTuple):
    """Sequences of a pair task, named as the forward of a transformers encoder-decoder names them.

    Arguments:
        input_ids: `[N, S]` the sources, each with an end, then padding.
        attention_mask: `[N, S]`, 1 for a real token of the source, 0 for padding.
        labels: `[N, T]` the targets, each with an end, then -100. The logits at t answer
            `labels[t]`: the model itself shifts them by one to make the decoder's inputs.
        decoder_attention_mask: `[N, T]`, 1 where a decoder's input answers a label.
    """

    input_ids: Int[Tensor, "N S"]
    attention_mask: Int[Tensor, "N S"]
    labels: Int[Tensor, "N T"]
    decoder_attention_mask: Int[Tensor, "N T"]

    def inputs(self) -> dict[str, Tensor]:
        """Arguments of a call of the model."""
        return self._asdict()


class PairTask(Task):
    """A task for encoder-decoders: `sample` returns `Pairs`.

    target_length: the most tokens of a target, its end included.
    """

    paired: ClassVar[bool] = True
    target_length: int

    @property
    def pad(self) -> int:
        """The id of padding, with which a decoder also begins."""
        return self.vocab_size - 2

    @property
    def eos(self) -> int:
        """The id that ends sources and targets."""
        return self.vocab_size - 1

    @cached_property
    def row_tokens(self) -> float:
        """Tokens of a source and its target, ends included, mean of some hundred sequences."""
        rows = self.sample(256, 1)
        real = rows.attention_mask.sum() + rows.decoder_attention_mask.sum()
        return real.item() / len(rows.labels)

    def padded(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Pairs:
        """Ids without their ends, padded to the longest source and target among these."""
        inputs, mask = self._filled(sources, self.pad)
        labels, target_mask = self._filled(targets, IGNORE)
        return Pairs(inputs, mask, labels, target_mask)

    def _filled(self, rows: Sequence[Sequence[int]], filler: int) -> tuple[Tensor, Tensor]:
        width = max(map(len, rows)) + 1
        ids = np.full((len(rows), width), filler, dtype=np.int64)
        real = np.zeros((len(rows), width), dtype=np.int64)
        for i, row in enumerate(rows):
            ids[i, : len(row)], ids[i, len(row)] = row, self.eos
            real[i, : len(row) + 1] = 1
        return torch.from_numpy(ids), torch.from_numpy(real)

    def written(self, ids: Int[Tensor, " T"] | Sequence[int]) -> list[int]:
        """The ids of a sequence before its end, without padding."""
        ids = [int(i) for i in ids if int(i) not in (IGNORE, self.pad)]
        return ids[: ids.index(self.eos)] if self.eos in ids else ids

    def references(self, labels: Int[Tensor, "N T"]) -> list[str]:
        """The target texts."""
        return [self.decode(row) for row in labels.tolist()]

    def with_end(self, tokenizer: "Tokenizer", more: Sequence[str] = ()) -> "Tokenizer":
        """A copy to be saved: with `more` tokens, padding and an end, which comes behind a text."""
        from tokenizers import Tokenizer, processors

        copy = Tokenizer.from_str(tokenizer.to_str())
        copy.add_special_tokens([*more, *_SPECIAL])
        if copy.token_to_id(_SPECIAL[1]) != self.eos:
            return copy  # a vocabulary that a small corpus left unfilled: the end is elsewhere
        copy.post_processor = processors.TemplateProcessing(
            single=f"$A {_SPECIAL[1]}", special_tokens=[(_SPECIAL[1], self.eos)]
        )
        return copy

    def special_tokens(self) -> dict[str, int]:
        """Padding and end."""
        return {"pad_token": self.pad, "eos_token": self.eos}

    def shown(self) -> None:
        """Pictures of attention are those of decoder-only models."""
        return


@dataclass(frozen=True)
class TextPairTask(PairTask):
    """Texts and what is to be made of them: generated ones, or pairs that the user gives.

    A tenth of the given pairs is for evaluation; pairs of one source are all in the same part. Of
    what is generated a sentence's checksum says in which part it is, so that no source is in both.

    Arguments:
        paths: what `heedful.data.text_pairs` takes; empty for generated pairs.
        length: the most tokens of a source, its end included; a longer one raises.
        target_length: likewise of a target.
        tokenizer: of given pairs: `"byte"`, or `"bpe"` for byte-pair encoding over bytes, trained
            on the sources and targets of the training part. Generated pairs bring their words.
        vocab_size: number of ids with `"bpe"`, padding and end (the last two) included.
        part: which part `sample` draws from: `"train"` or `"held-out"`.
    """

    paths: tuple[str, ...] = ()
    length: int | None = None
    target_length: int | None = None
    tokenizer: Literal["byte", "bpe"] = "byte"
    vocab_size: int | None = None
    part: Literal["train", "held-out"] = "train"

    scored_by: ClassVar[str] = "texts"

    def __post_init__(self) -> None:
        if isinstance(self.paths, str) or not isinstance(self.paths, Sequence):
            raise UserError(
                f"paths must be a tuple of paths, got {self.paths!r}; write paths=({self.paths!r},)"
            )
        object.__setattr__(self, "paths", tuple(str(path) for path in self.paths))
        check_choice("tokenizer", self.tokenizer, ("byte", "bpe"))
        check_choice("part", self.part, ("train", "held-out"))
        if not self.paths and self.tokenizer != "byte":
            raise UserError(
                f"tokenizer={self.tokenizer!r} is for pairs of files: generated ones have their "
                "own words; leave it out, or give paths"
            )
        for name, value in zip(("length", "target_length"), self._lengths(), strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
            check_whole(name, getattr(self, name), 2, way_out="a sequence is a token and its end")
        if not self.paths:
            size = self._words.get_vocab_size() + 2
        elif self.tokenizer == "byte":
            size = BYTES + 2
        else:
            size = _VOCABULARY if self.vocab_size is None else self.vocab_size
            check_whole("vocab_size", size, BYTES + 3, 1 << 16)
        if self.vocab_size not in (None, size):
            raise UserError(f"vocab_size must be {size} here, got {self.vocab_size!r}")
        object.__setattr__(self, "vocab_size", size)

    @abstractmethod
    def _lengths(self) -> tuple[int, int]:
        """Lengths of sources and targets unless they are given."""

    @property
    @abstractmethod
    def _words(self) -> "Tokenizer":
        """The tokenizer of the generated pairs."""

    @abstractmethod
    def _invented(self, rng: np.random.Generator) -> tuple[str, str]:
        """One generated pair."""

    @cached_property
    def _parts(self) -> dict[str, list[TextPair]]:
        """The pairs of both parts."""
        pairs = text_pairs(self.paths)
        sources = list(dict.fromkeys(pair.source for pair in pairs))
        if len(sources) < 2:
            raise UserError(
                f"{', '.join(self.paths)}: there must be at least 2 different sources, one to "
                f"train on and one to evaluate on, got {len(sources)}"
            )
        order = np.random.default_rng(0).permutation(len(sources))
        apart = {sources[i] for i in order[: max(1, len(sources) // _HELD_OUT)]}
        return {
            "train": [pair for pair in pairs if pair.source not in apart],
            "held-out": [pair for pair in pairs if pair.source in apart],
        }

    @cached_property
    def _tokens(self) -> "Tokenizer":
        if not self.paths:
            return self._words
        if self.tokenizer == "byte":
            return bytes_alone()
        texts = (text for pair in self._parts["train"] for text in (pair.source, pair.target))
        return byte_pairs(texts, self.vocab_size - len(_SPECIAL))

    @cached_property
    def _checked(self) -> dict[str, list[tuple[list[int], list[int]]]]:
        """The ids of all given pairs, none of them too long."""
        parts = {}
        for part, pairs in self._parts.items():
            sources = self._encoded([pair.source for pair in pairs])
            targets = self._encoded([pair.target for pair in pairs])
            for pair, source, target in zip(pairs, sources, targets, strict=True):
                self._check_fits(pair.name, source, target)
            parts[part] = list(zip(sources, targets, strict=True))
        return parts

    def _check_fits(self, name: str, source: list[int], target: list[int]) -> None:
        for side, ids, most in (
            ("source", source, self.length),
            ("target", target, self.target_length),
        ):
            if len(ids) >= most:
                raise UserError(
                    f"{name}: its {side} has {len(ids) + 1} tokens with the end, and sequences "
                    f"have room for {most}; shorten it, take longer sequences (length), or "
                    'tokenizer="bpe", which makes fewer tokens'
                )

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._tokens.encode_batch(texts)]

    def texts(self, count: int, seed: int) -> list[tuple[str, str]]:
        """`count` generated pairs of this part, as texts."""
        check_draw(count, seed)
        if self.paths:
            raise UserError("texts are generated pairs, and these are given by paths")
        rng, pairs = np.random.default_rng(seed), []
        while len(pairs) < count:
            pair = self._invented(rng)
            if (zlib.crc32(pair[0].encode()) % _HELD_OUT == 0) == (self.part == "held-out"):
                pairs.append(pair)
        return pairs

    def sample(self, count: int, seed: int) -> Pairs:
        """`count` sequences, the same for the same configuration, count and seed."""
        check_draw(count, seed)
        if self.paths:
            there = self._checked[self.part]
            indices = np.random.default_rng(seed).integers(len(there), size=count)
            return self.padded(*zip(*(there[i] for i in indices), strict=True))
        sources, targets = map(list, zip(*self.texts(count, seed), strict=True))
        sources, targets = self._encoded(sources), self._encoded(targets)
        for source, target in zip(sources, targets, strict=True):
            self._check_fits("a generated pair", source, target)
        return self.padded(sources, targets)

    def held_out(self, count: int | None = None) -> Pairs:
        """Sequences that are never trained on, the same at every call.

        Of given pairs all, or `count` evenly spread ones; where fewer are there, these few.
        """
        if not self.paths:
            return replace(self, part="held-out").sample(256 if count is None else count, 0)
        if count is not None:
            check_whole("count", count, 1)
        there = self._checked["held-out"]
        if count is not None and count < len(there):
            there = [there[i * len(there) // count] for i in range(count)]
        return self.padded(*zip(*there, strict=True))

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence before its end."""
        vocabulary_size = self._tokens.get_vocab_size()
        return self._tokens.decode([i for i in self.written(ids) if i < vocabulary_size]).strip()

    def evaluations(self) -> "dict[str, TextPairTask]":
        """The evaluation part; of given pairs it shares what was read."""
        held_out = replace(self, part="held-out")
        if self.paths:
            held_out.__dict__.update(_parts=self._parts, _tokens=self._tokens)
            held_out.__dict__.update(_checked=self._checked)
        return {"held-out": held_out}

    def saved_tokenizer(self) -> "Tokenizer":
        """The tokens of a sequence: the text's, and an end behind them."""
        return self.with_end(self._tokens)

    @classmethod
    def default(cls, data: Sequence[str] = ()) -> "TextPairTask":
        """Of the pairs that are given."""
        return cls(paths=tuple(data))


def check_texts(texts: Sequence[str], references: Sequence[str]) -> None:
    """Raise unless there is a text for each reference, and at least one."""
    if len(texts) != len(references) or not references:
        raise UserError(
            f"texts must be one for each of the references, at least one, got {len(texts)} texts "
            f"and {len(references)} references"
        )
