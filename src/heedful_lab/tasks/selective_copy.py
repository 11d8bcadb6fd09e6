"""Copy some letters out of noise: relevant tokens must be distinguished from noise."""

import string
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from heedful.checks import check_whole
from heedful_lab.tasks.samples import BOS, EOS, Recipe, Samples, SymbolTask, rows

_HASH, _NOISE = 2, 3
_DOTS = (".", ",", "-", "_")


@dataclass(frozen=True)
class SelectiveCopy(SymbolTask):
    """Selective copy: letters at random places among noise, a separator, and the letters again.

    A sequence reads `BOS ..,b-_.a,.c--_,a #baca EOS` (without the spaces): `context` tokens, of
    which `symbols` are letters at places drawn uniformly, and the others are drawn from four kinds
    of noise. Letters are drawn uniformly and independently. Loss lies on the second string and EOS.
    Unlike in `Copy`, the distance from a letter to its copy varies, so that a fixed shift does not
    answer; what is copied must be chosen by what it is.

    Arguments:
        symbols: letters of a sequence.
        context: tokens before the separator, BOS not counted.
        alphabet: number of different letters, 2 to 26.

    Raises:
        ValueError: if a field is out of range.

    Source: Gu and Dao, Mamba, arXiv 2312.00752, §3.1 and figure 2; the sizes here are ours.
    """

    symbols: int = 12
    context: int = 96
    alphabet: int = 16

    recipe: ClassVar[Recipe] = Recipe(64, 2, 2, 800, 32, 2e-3, ("standard", "selective"))

    def __post_init__(self) -> None:
        check_whole("symbols", self.symbols, 1)
        check_whole("context", self.context, self.symbols, way_out="it holds the letters")
        check_whole("alphabet", self.alphabet, 2, 26, way_out="symbols are lowercase letters")

    @property
    def symbol_names(self) -> tuple[str, ...]:
        """BOS, EOS, "#", four kinds of noise and one for each letter."""
        return ("", "", "#", *_DOTS, *string.ascii_lowercase[: self.alphabet])

    @property
    def length(self) -> int:
        """Tokens of a sequence, BOS and EOS included."""
        return self.context + self.symbols + 3

    def draw(self, rng: np.random.Generator, count: int) -> Samples:
        """`count` sequences, from these random numbers."""
        letters = rng.integers(self.alphabet, size=(count, self.symbols)) + _NOISE + len(_DOTS)
        ids = rng.integers(len(_DOTS), size=(count, self.length)) + _NOISE
        order = rng.random((count, self.context)).argsort(axis=1)[:, : self.symbols]
        np.put_along_axis(ids, np.sort(order, axis=1) + 1, letters, axis=1)
        ids[:, 0], ids[:, self.context + 1], ids[:, -1] = BOS, _HASH, EOS
        ids[:, self.context + 2 : -1] = letters
        return rows(torch.from_numpy(ids), slice(self.context + 2, None))

    def cut(self, length: int | None, tokenizer: str) -> "SelectiveCopy":
        """Sequences of so many tokens; longer ones have more noise."""
        if length is None:
            return self
        least = 2 * self.symbols + 3
        check_whole("length", length, least, way_out=f"a sequence copies {self.symbols} letters")
        return replace(self, context=length - self.symbols - 3)

    def evaluations(self) -> "dict[str, SelectiveCopy]":
        """The task itself, and as many letters among twice the noise."""
        return {"in-distribution": self, "2x-context": replace(self, context=2 * self.context)}
