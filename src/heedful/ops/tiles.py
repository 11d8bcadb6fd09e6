"""Blocks of query rows with the key columns they can reach: what the tiled operators loop over."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from heedful.ops.visibility import see

ROWS = 64  # A tile of 64 rows x 8 heads x 4096 keys in fp32 is 8 MiB: near the size of a cache.


class Sight(NamedTuple):
    """A visibility as plain values, the form that crosses a custom operator's boundary.

    `segments` is the document number per token, -1 for padding; `documents` says whether it holds
    documents at all (then a convolution must not cross their borders).
    """

    segments: Int[Tensor, "B Tk"] | None
    documents: bool
    causal: bool
    window: int | None

    def columns(self, rows: range, keys: int, left: int = 0, right: int = 0) -> range:
        """The key columns that any of these query tokens can see, widened on both sides."""
        stop = rows.stop if self.causal else keys
        start = 0 if self.window is None else rows.start - self.window + 1
        return range(max(0, start - left), min(keys, stop + right))

    def hidden(self, rows: range, columns: range, device: torch.device) -> "Hidden":
        """What of the tile `rows x columns` cannot be seen."""
        # Columns up to the first row are seen by every row, if causal order is all there is.
        clear = 0
        if self.segments is None and self.window is None:
            edge = rows.start + 1 if self.causal else columns.stop
            clear = max(0, min(edge - columns.start, len(columns)))
        rest = range(columns.start + clear, columns.stop)
        visible = see(self.segments, self.causal, self.window, rows, rest, device)
        return Hidden(clear, ~visible[:, None])

    def row_documents(self, first: int, last: int) -> Int[Tensor, "B N"] | None:
        """Document of the tokens `first .. last-1`, -2 where there is none; None: no documents."""
        if not self.documents:
            return None
        inside = self.segments[:, max(first, 0) : last]
        above = inside.new_full((len(inside), max(-first, 0)), -2)
        below = inside.new_full((len(inside), last - max(first, 0) - inside.shape[1]), -2)
        return torch.cat([above, inside, below], dim=1)


class Hidden(NamedTuple):
    """Invisible entries of a tile: none in the first `clear` columns, `mask` in the others."""

    clear: int
    mask: Bool[Tensor, "B 1 R C"]

    def fill(self, x: Shaped[Tensor, "B H R columns"], value: float | bool) -> Tensor:
        """Write `value` to the invisible entries of `x`, in place."""
        x[..., self.clear :].masked_fill_(self.mask, value)
        return x


def row_blocks(queries: int, descending: bool = False) -> Iterator[tuple[int, int]]:
    """First and one-past-last query row of each block."""
    starts = range(0, queries, ROWS)
    for start in reversed(starts) if descending else starts:
        yield start, min(start + ROWS, queries)


def softmax_(logits: Float[Tensor, "B H R C"], hidden: Hidden) -> Float[Tensor, "B H R C"]:
    """Softmax over the visible entries, in place; rows that see nothing become zero."""
    hidden.fill(logits, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    logits.sub_(top.masked_fill_(top == float("-inf"), 0))
    # Weights below e^-80 are dropped: they are lost beside a weight of one even in fp64, and as
    # subnormal numbers they would slow a CPU down tenfold.
    torch.threshold_(logits, -80.0, float("-inf"))
    logits.exp_()
    total = logits.sum(-1, keepdim=True)
    return logits.div_(total.masked_fill_(total == 0, 1))


def widen(x: Tensor) -> Tensor:
    """fp32 for half precision; fp32 and fp64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def spread_heads(x: Float[Tensor, "B Hk T D"], heads: int) -> Float[Tensor, "B H T D"]:
    """Repeat key heads for their group of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def gather_heads(x: Float[Tensor, "B H T D"], heads: int) -> Float[Tensor, "B Hk T D"]:
    """Sum over each group of query heads: the transpose of `spread_heads`."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
