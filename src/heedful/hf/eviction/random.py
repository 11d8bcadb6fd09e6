"""Chance: the control that every other policy must beat."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held

_PRIME = 2_147_483_647  # 2**31 - 1: products of two numbers below it fit an int64


@dataclass(frozen=True)
class Random(Eviction):
    """Keeps tokens by lot; each draws its number once, so what is kept is a uniform sample.

    Arguments:
        seed: another seed draws other numbers.
    """

    seed: int = 0

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """A number from 0 to 1 that only the position and the seed decide."""
        x = (held.positions * 48_271 + 1 + self.seed * 69_621) % _PRIME
        for _ in range(3):
            x = (x * 48_271 + (x >> 7) * 16_807) % _PRIME
        return x / _PRIME
