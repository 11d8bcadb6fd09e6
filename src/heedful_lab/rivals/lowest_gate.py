"""Eviction by retention gates."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.eviction import CachedTokens, Eviction


@dataclass(frozen=True)
class LowestGate(Eviction):
    """Evicts the token with the lowest retention gate; of equal ones the oldest.

    It needs `RetentionGate`. A gate is set when its token comes and never changes, so a
    token that is evicted under one budget would be under every smaller one.

    Source: see `RetentionGate`.
    """

    needs = ("gate",)

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The gate."""
        return cached.kept
