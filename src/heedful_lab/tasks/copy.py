"""Copy a random string: the task for which nothing may be forgotten."""

import string
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from heedful.checks import check_whole
from heedful_lab.tasks.samples import BOS, EOS, Recipe, Samples, SymbolTask, rows

_HASH, _LETTER = 2, 3


@dataclass(frozen=True)
class Copy(SymbolTask):
    """Copy: a random string, a separator, and the string once more.

    A sequence reads `BOS bacab # bacab EOS` (without the spaces); letters are drawn uniformly and
    independently. Loss lies on the second string and EOS. Every letter has to be kept until it has
    been written, so this is one extreme of the memory a task needs; `Parity` is the other.

    The paper gives no lengths; those here are ours.

    Arguments:
        symbols: length of the string.
        alphabet: number of different letters, 2 to 26.

    Raises:
        ValueError: if a field is out of range.

    Source: Selective Attention Improves Transformer, arXiv 2410.02703, appendix A.2.
    """

    symbols: int = 32
    alphabet: int = 26

    recipe: ClassVar[Recipe] = Recipe(64, 2, 2, 400, 32, 3e-3, ("standard", "selective"))

    def __post_init__(self) -> None:
        check_whole("symbols", self.symbols, 1)
        check_whole("alphabet", self.alphabet, 2, 26, way_out="symbols are lowercase letters")

    @property
    def symbol_names(self) -> tuple[str, ...]:
        """BOS, EOS, "#" and one for each letter."""
        return ("", "", "#", *string.ascii_lowercase[: self.alphabet])

    @property
    def length(self) -> int:
        """Tokens of a sequence, BOS and EOS included."""
        return 2 * self.symbols + 3

    def draw(self, rng: np.random.Generator, count: int) -> Samples:
        """`count` sequences, from these random numbers."""
        text = rng.integers(self.alphabet, size=(count, self.symbols)) + _LETTER
        ids = np.empty((count, self.length), dtype=np.int64)
        ids[:, 0], ids[:, self.symbols + 1], ids[:, -1] = BOS, _HASH, EOS
        ids[:, 1 : self.symbols + 1] = ids[:, self.symbols + 2 : -1] = text
        return rows(torch.from_numpy(ids), slice(self.symbols + 2, None))

    def evaluations(self) -> "dict[str, Copy]":
        """The task itself, and strings two and four times as long."""
        return {
            "in-distribution": self,
            "2x-symbols": replace(self, symbols=2 * self.symbols),
            "4x-symbols": replace(self, symbols=4 * self.symbols),
        }
