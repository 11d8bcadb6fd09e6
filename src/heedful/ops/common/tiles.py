"""Blocks of query rows with the key columns they can reach: what the tiled operators loop over."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from heedful.ops.visibility import see, see_placed

ROWS = 64
ROWS_COMPOSED = 256  # where launches cost more than what a tile larger than a cache does
TILE_COMPOSED = 2**27  # entries of one sequence; in fp32 512 MiB, of which a few are alive at once
STEP = 128  # columns
STEP_COMPOSED = 16  # Triton loads rows of whole 16 entries many at a time, and products want 8
_LOG2_E = math.log2(math.e)
TILE = 2**20  # entries; in fp32 4 MiB, so that the few tiles alive at once stay near a cache's size
_MASKS = 4


class Sight(NamedTuple):
    """A visibility as plain values, the form that crosses a custom operator's boundary.

    `segments` is the document number per token, -1 for padding; `documents` says whether it holds
    documents at all (then a convolution must not cross their borders). `mutual` is that of a
    `Visibility`. `places`, if given, stands for segments and mutual: of queries, then of keys.
    """

    segments: Int[Tensor, "B Tk"] | None
    documents: bool
    causal: bool
    window: int | None
    mutual: Int[Tensor, "B Tk"] | None = None
    places: Int[Tensor, "B 2 Tq+Tk"] | None = None


class Scope:
    """A visibility laid over `queries` last tokens of `keys`: what each block of rows can reach.

    Blocks are small and stay in a CPU's cache, and memory is used again; or, if `composed`, few
    launches are made on large blocks, as a GPU wants them.

    On a CPU it looks at the documents, and leaves out columns that no row of a block can see. On
    other devices such a look would stall the stream, so that columns are left out for causal order
    and a window alone, and the others are masked.
    """

    def __init__(
        self, sight: Sight, queries: int, keys: int, device: torch.device, *, composed: bool
    ) -> None:
        self.sight, self.keys, self.offset, self.device = sight, keys, keys - queries, device
        self._queries, self.composed = queries, composed
        self._masks: dict[tuple[int, int, int], Bool[Tensor, "1 1 R C"]] = {}
        if sight.places is not None:
            self.offset = 0  # queries are counted by themselves
        looks = device.type == "cpu"
        self._bounds = _bounds(sight.segments) if looks and sight.segments is not None else None
        self._ends = _ends(sight.mutual) if looks and sight.mutual is not None else None

    def columns(self, rows: range, aside: int = 0) -> range:
        """The key columns that any of these tokens can see, with `aside` more on both sides.

        Nothing is added beyond the tokens' documents: a convolution takes nothing from there. The
        end is rounded up, further in the CPU's shape, as torch keeps a compiled convolution for
        every width that it met there.
        """
        if self.sight.places is not None:
            return range(self.keys)
        window = self.sight.window
        start = 0 if window is None else rows.start - window + 1 - aside
        stop = rows.stop + aside if self.sight.causal else self.keys
        if window is not None and not self.sight.causal:
            stop = min(stop, rows.stop + window - 1 + aside)
        if self._ends is not None:
            stop = max(self._ends[rows.start : rows.stop]) + aside
        elif self.sight.mutual is not None:
            stop = self.keys
        if self._bounds is not None:
            tokens = slice(rows.start, rows.stop)
            start = max(start, min(self._bounds.first[tokens]))
            stop = min(stop, max(self._bounds.stop[tokens]))
        step = STEP_COMPOSED if self.composed else STEP
        start, stop = min(max(0, start), self.keys - 1), min(self.keys, -(-stop // step) * step)
        return range(start, max(start + 1, stop))  # one column is kept where nothing is visible

    def rows_per_block(self, heads: int) -> int:
        """64 rows, or 32 where tiles of this many heads would outgrow a cache; see `most_rows`.

        The number does not depend on the batch, or results would. With still fewer rows most of the
        work would go into the rows around them that a convolution reads.
        """
        if self.composed:
            return self.most_rows(heads, ROWS_COMPOSED)
        columns = min(self.keys, (self.sight.window or self.keys) * (1 if self.sight.causal else 2))
        return ROWS if ROWS * heads * columns <= TILE else ROWS // 2

    def most_rows(self, heads: int, most: int) -> int:
        """So many rows, or fewer where tiles of this many heads would take too much memory."""
        columns = min(self.keys, (self.sight.window or self.keys) * (1 if self.sight.causal else 2))
        while most > ROWS and most * heads * columns > TILE_COMPOSED:
            most //= 2
        return most

    def masked(self, rows: range, columns: range) -> "Masked":
        """Masked part of the tile `rows x columns`."""
        sight = self.sight
        if sight.places is not None:
            visible = see_placed(sight.places, self._queries, sight.causal, sight.window, rows)
            return Masked(0, ~visible[:, None])
        if self._bounds is not None and self._bounds.one_document(rows, columns, sight.causal):
            sight = sight._replace(segments=None)
        # Columns up to the first row are seen by every row, if causal order is all there is.
        clear = 0
        if sight.segments is None and sight.window is None:
            edge = rows.start + 1 if sight.causal else columns.stop
            clear = max(0, min(edge - columns.start, len(columns)))
        rest = range(columns.start + clear, columns.stop)
        if sight.segments is None and sight.mutual is None:
            # Distances decide alone, and many blocks have the same.
            key = (len(rows), rest.start - rows.start, len(rest))
            if key not in self._masks:
                if len(self._masks) == _MASKS:  # without an end, they would become the whole map
                    self._masks.clear()
                self._masks[key] = ~self._visible(sight, rows, rest)[:, None]
            return Masked(clear, self._masks[key])
        return Masked(clear, ~self._visible(sight, rows, rest)[:, None])

    def _visible(self, sight: Sight, rows: range, columns: range) -> Bool[Tensor, "B R C"]:
        causal, window = sight.causal, sight.window
        return see(sight.segments, causal, window, rows, columns, self.device, sight.mutual)

    def earlier(self, rows: range, columns: range) -> Bool[Tensor, "B 1 R C"]:
        """Mark the key columns before these tokens; for tokens with places."""
        positions = self.sight.places[:, 1]
        of_keys = positions[:, self._queries :][:, columns.start : columns.stop]
        return (of_keys[:, None] < positions[:, rows.start : rows.stop, None])[:, None]

    def row_documents(self, first: int, last: int) -> Int[Tensor, "B N"] | None:
        """Document of the tokens `first .. last-1`, -2 where there is none; None: all the same."""
        if not self.sight.documents:
            return None
        rows = range(max(first, 0), last)
        if self._bounds is not None and self._bounds.one_document(rows, rows, causal=False):
            return None  # rows above the first token hold zeros, of whatever document
        own, tokens = self.sight.segments, self.keys
        if self.sight.places is not None:
            own, tokens = self.sight.places[:, 0], self._queries
        inside = own[:, rows.start : min(last, tokens)]
        above = inside.new_full((len(inside), rows.start - first), -2)
        below = inside.new_full((len(inside), last - rows.start - inside.shape[1]), -2)
        return torch.cat([above, inside, below], dim=1)


class _Bounds(NamedTuple):
    """Over the rows of the batch, per token, bounds of what its segment number reaches.

    `first`, `stop`: around every token of the same number. `begin`, `end`: of the run that is the
    same in all rows, `keys` and 0 for padding, so that no block is taken for free of it.
    """

    first: list[int]
    stop: list[int]
    begin: list[int]
    end: list[int]

    def one_document(self, rows: range, columns: range, causal: bool) -> bool:
        """In every row of the batch, these tokens are real and of one document."""
        if columns.start < max(self.begin[rows.start : rows.stop]):
            return False
        last = min(columns.stop, rows.stop) if causal else columns.stop
        return last <= min(self.end[rows.start : rows.stop])


def _bounds(segments: Int[Tensor, "B Tk"]) -> _Bounds:
    keys = segments.shape[1]
    token = torch.arange(keys, device=segments.device).expand(segments.shape)
    real = segments >= 0
    first, stop = segment_bounds(segments)
    edge = segments.diff(dim=1) != 0
    begin = torch.nn.functional.pad(token[:, 1:] * edge, (1, 0)).cummax(1).values
    end = torch.nn.functional.pad(token[:, 1:].where(edge, keys), (0, 1), value=keys)
    end = end.flip(1).cummin(1).values.flip(1)
    return _Bounds(
        first.where(real, keys).amin(0).tolist(),
        stop.where(real, 0).amax(0).tolist(),
        begin.where(real, keys).amax(0).tolist(),
        end.where(real, 0).amin(0).tolist(),
    )


def _ends(mutual: Int[Tensor, "B Tk"]) -> list[int]:
    """Per token the key after the last that it sees in any row of the batch: itself, or its run."""
    token = torch.arange(mutual.shape[1], device=mutual.device).expand(mutual.shape)
    stop = segment_bounds(mutual)[1].where(mutual >= 0, token + 1)
    return stop.amax(0).tolist()


def segment_bounds(segments: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Per token the first and one-past-last token with the same segment number.

    Sorted by number, and then by place, the tokens of a segment are one run, from the first to the
    last. Nothing here waits for a device.
    """
    number, token = segments.sort(dim=1, stable=True)
    place = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    changes = torch.nn.functional.pad(number.diff(dim=1) != 0, (1, 1), value=True)
    begin = (place * changes[:, :-1]).cummax(1).values
    end = place.where(changes[:, 1:], segments.shape[1]).flip(1).cummin(1).values.flip(1)
    back = token.argsort(dim=1)
    first, last = (token.gather(1, x).gather(1, back) for x in (begin, end))
    return first, last + 1


class Masked(NamedTuple):
    """Invisible entries of a tile: none in the first `clear` columns, `mask` in the others."""

    clear: int
    mask: Bool[Tensor, "B 1 R C"]

    def fill(self, x: Shaped[Tensor, "B H R columns"], value: float | bool) -> Tensor:
        """Write `value` to the invisible entries of `x`, in place."""
        x[..., self.clear :].masked_fill_(self.mask, value)
        return x

    def last(self, rows: int) -> "Masked":
        """Those of the last rows."""
        return self._replace(mask=self.mask[:, :, -rows:])


def row_blocks(
    queries: int, rows: int = ROWS, *, ascending: bool = False
) -> Iterator[tuple[int, int]]:
    """First and one-past-last query row of each block, from the last block to the first.

    The last block of a causal map has the most columns. When it comes first, the allocator can
    serve every later block from what it left; the other way round the heap grows with each block.
    """
    starts = range(0, queries, rows)
    for start in starts if ascending else reversed(starts):
        yield start, min(start + rows, queries)


def cap_(logits: Float[Tensor, "*lead C"], softcap: float | None) -> Float[Tensor, "*lead C"]:
    """`softcap tanh(logits / softcap)`, in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def cap_slope(
    capped: Float[Tensor, "*lead C"], softcap: float | None
) -> Float[Tensor, "*lead C"] | None:
    """The derivative of `cap_` at what it gave, `1 - tanh^2`; `None` where nothing is capped."""
    return None if softcap is None else (capped / softcap).square_().neg_().add_(1)


def sunk_softmax_(
    logits: Float[Tensor, "B H R C"], masked: Masked, sinks: Float[Tensor, "H 1 1"] | None
) -> tuple[Float[Tensor, "B H R C"], Float[Tensor, "B H R 1"] | None]:
    """Softmax over the visible entries, in place; rows that see nothing become zero.

    With a sink in every row's sum, if given; also the weight that goes there.
    """
    masked.fill(logits, float("-inf"))
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top.masked_fill_(top == float("-inf"), 0)
    logits.sub_(top)
    # Weights below e^-80 are dropped: they are lost beside a weight of one even in fp64, and as
    # subnormal numbers they would slow a CPU down tenfold.
    torch.threshold_(logits, -80.0, float("-inf"))
    # exp() of -inf, and on some processors of any number, is three to ten times slower than exp2().
    logits.mul_(_LOG2_E).exp2_()
    total = logits.sum(-1, keepdim=True)
    if sinks is None:
        return logits.div_(total.masked_fill_(total == 0, 1)), None
    sunk = (sinks - top).mul_(_LOG2_E).exp2_()
    total += sunk  # never zero: the largest of a row is one
    return logits.div_(total), sunk.div_(total)


def sink_gradient(
    dp: Float[Tensor, "B H R C"], p: Float[Tensor, "B H R C"], sunk: Float[Tensor, "B H R 1"]
) -> Float[Tensor, " H"]:
    """That of the sinks in these rows: a sink has no value, so that all it does is take weight."""
    return -((p * dp).sum(-1, keepdim=True) * sunk).sum((0, 2, 3))


def in_blocks(
    x: Shaped[Tensor, "*lead T"], size: int, fill: int | float
) -> Shaped[Tensor, "*lead blocks {size}"]:
    """Tokens in blocks of `size`, the last one filled up with `fill`."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=fill).unflatten(
        -1, (-1, size)
    )


def spread_heads(x: Float[Tensor, "B Hk T D"], heads: int) -> Float[Tensor, "B H T D"]:
    """Repeat key heads for their group of query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def finished(grads: list[Tensor], like: Tensor) -> Tensor:
    """The first of these gradients, taken off the list, as that of an input: its heads and dtype.

    A list, so that nothing holds a gradient any more when the next one is copied.
    """
    grad = gather_heads(grads.pop(0), like.shape[1])
    return grad.to(like.dtype, memory_format=torch.contiguous_format).contiguous()


def gather_heads(x: Float[Tensor, "B H T D"], heads: int) -> Float[Tensor, "B Hk T D"]:
    """Sum over each group of query heads: the transpose of `spread_heads`."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)
