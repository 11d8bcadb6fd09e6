"""Sums over queries, of which F and its gradient are made: between row blocks, and inside one."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64  # rows


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
    """For each row the sum of those above it."""
    inside, sums = _in_chunks(s, turned=False)
    # Without a chunk's own sum, not less it: its rounding would tell rows of later ones.
    before = pad(sums[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
    return inside.add_(before[:, :, :, None]).flatten(2, 3)


def below(
    s: Float[Tensor, "B Hs R C"], later: Float[Tensor, "B Hs C"]
) -> Float[Tensor, "B Hs R C"]:
    """For each row the sum of those below it and of `later`, to which all rows are added."""
    inside, sums = _in_chunks(s, turned=True)
    after = pad(sums[:, :, 1:].flip(2), (0, 0, 1, 0)).cumsum(2).flip(2) + later[:, :, None]
    later.copy_(after[:, :, 0] + sums[:, :, 0])
    return inside.add_(after[:, :, :, None]).flatten(2, 3)


def _in_chunks(
    s: Float[Tensor, "B Hs R C"], *, turned: bool
) -> tuple[Float[Tensor, "B Hs chunks rows C"], Float[Tensor, "B Hs chunks C"]]:
    """Inside each chunk, for each row the sum of those above it, or below if `turned`; and of all.

    By a product, which is faster than a running sum; of few rows, as its cost is their square.
    """
    rows = CHUNK if s.shape[2] % CHUNK == 0 else s.shape[2]
    chunks = s.unflatten(2, (-1, rows))
    earlier = torch.ones(rows, rows, dtype=s.dtype, device=s.device).tril(-1)
    return (earlier.mT if turned else earlier) @ chunks, chunks.sum(3)
