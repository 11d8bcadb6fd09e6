"""Sums over queries, of which F and its gradient are made: between row blocks, and inside one."""

import torch
from jaxtyping import Float
from torch import Tensor


class RunningTotal:
    """A running total per key as the sum of two numbers, the second what rounding took so far.

    So sums and differences are as if in twice the precision: taking away what was added leaves what
    was there before, however small beside what was added later.
    """

    def __init__(self, pair: Float[Tensor, "2 B Hs Tk"]) -> None:
        self.pair = pair

    def add(self, x: Float[Tensor, "B Hs C"], cut: slice) -> None:
        """Adds to the keys in `cut`; `error` is exactly what rounding takes (Knuth's two-sum)."""
        total, rest = self.pair[..., cut]
        more = total + x
        increment = more - total
        error = (total - (more - increment)) + (x - increment)
        rest += error
        total.copy_(more)

    def rounded(self, cut: slice = slice(None)) -> Float[Tensor, "B Hs C"]:
        return self.pair[0, ..., cut] + self.pair[1, ..., cut]


def above(s: Float[Tensor, "B Hs R C"]) -> Float[Tensor, "B Hs R C"]:
    """For each row the sum of those above it; by a product, which is fast on a CPU."""
    return _earlier(s) @ s


def below(
    s: Float[Tensor, "B Hs R C"], later: Float[Tensor, "B Hs C"]
) -> Float[Tensor, "B Hs R C"]:
    """For each row the sum of those below it and of `later`, to which all rows are added."""
    sums = (_earlier(s).mT @ s).add_(later[:, :, None])
    later.add_(s.sum(2))
    return sums


def _earlier(like: Float[Tensor, "B Hs R C"]) -> Float[Tensor, "R R"]:
    """Strictly lower triangle of ones: row i sums what stands above it."""
    rows = like.shape[2]
    return torch.ones(rows, rows, dtype=like.dtype, device=like.device).tril(-1)
