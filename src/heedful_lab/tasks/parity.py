"""Running parity of random bits: the task for which almost everything may be forgotten."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from heedful.checks import check_whole
from heedful_lab.tasks.samples import BOS, IGNORE, Recipe, Samples, SymbolTask

_BIT, _PARITY = 2, 4


@dataclass(frozen=True)
class Parity(SymbolTask):
    """Running parity: after each random bit, whether the ones so far are even or odd.

    A sequence reads `1o0o1e0e` after BOS: a bit, then "e" (even) or "o" (odd) for all bits up to
    it, and so on. Loss lies on every parity token and on no bit. With the last parity in view a bit
    and its predecessor are all one needs to keep, so this is one extreme of the memory a task
    needs; `Copy` is the other. (With a target only at the end, parity would mean counting the whole
    sequence, which is another, much harder question to a transformer of fixed depth.)

    The paper gives neither form nor lengths; those here are ours.

    Arguments:
        bits: number of bits.

    Raises:
        ValueError: if `bits` is below 1.

    Source: Selective Attention Improves Transformer, arXiv 2410.02703, appendix A.2.
    """

    bits: int = 32

    symbol_names = ("", "", "0", "1", "e", "o")  # BOS, EOS (unused), two bits, two parities
    recipe: ClassVar[Recipe] = Recipe(64, 2, 2, 400, 32, 3e-3, ("standard", "selective"))

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, 1)

    @property
    def length(self) -> int:
        """Tokens of a sequence: BOS, and two for each bit."""
        return 2 * self.bits + 1

    def draw(self, rng: np.random.Generator, count: int) -> Samples:
        """`count` sequences, from these random numbers."""
        bits = rng.integers(2, size=(count, self.bits))
        ids = torch.full((count, self.length), BOS)
        ids[:, 1::2] = torch.from_numpy(bits + _BIT)
        ids[:, 2::2] = torch.from_numpy(bits.cumsum(axis=1) % 2 + _PARITY)
        labels = torch.full_like(ids, IGNORE)
        labels[:, 2::2] = ids[:, 2::2]
        return Samples(ids, labels, torch.ones_like(ids))

    def evaluations(self) -> "dict[str, Parity]":
        """The task itself, and sequences with two and four times as many bits."""
        return {
            "in-distribution": self,
            "2x-bits": replace(self, bits=2 * self.bits),
            "4x-bits": replace(self, bits=4 * self.bits),
        }
