"""Pieces that the flash kernels of multi-token attention share, inside a Triton program.

A head is wide: WIDTH = PARTS x DIM columns, as many parts as its kernel has rows. The wide row of
query n is the run of rows n-PARTS+1 .. n of q, which overlap in memory; that of key j is its
filtered keys, one after the other (wide.py). A program takes TILE columns of them at a time.

`n` counts queries, `i` and `j` count tokens (keys); query n is token n + keys - queries. What
depends on segments (`spans`, `parts`) the host works out; without segments it is plain arithmetic.
Capital names are compile-time constants.
"""

import triton
import triton.language as tl

# Compiled once, whatever the numbers that change from launch to launch of one call.
gpu_kernel = triton.jit(do_not_specialize=["first_head", "first_block", "last_block"])
LOG2E = tl.constexpr(1.4426950408889634)  # logits are kept in units of log 2, for exp2


@triton.jit
def load_columns(base, rows, valid, WIDTH: tl.constexpr, first, TILE: tl.constexpr):
    """Columns `first .. first+TILE-1` of a matrix of `WIDTH` columns, 0 where not `valid`."""
    column = first + tl.arange(0, TILE)
    mask = valid[:, None]
    if WIDTH % TILE != 0:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_segments(segments, tokens, valid, SEGMENTS: tl.constexpr):
    """Segment number per token, -1 for padding and where not `valid`; 0 if there are none."""
    if SEGMENTS:
        number = tl.load(segments + tokens, mask=valid, other=-1)
    else:
        number = tl.where(valid, 0, -1)
    return number


@triton.jit
def load_parts(parts, n, queries, PARTS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Per query n a number with bit r set where its part r exists: a row of n's own segment."""
    inside = n < queries
    if SEGMENTS:
        bits = tl.load(parts + n, mask=inside, other=0)
    else:
        bits = tl.where(inside, -1, 0) << tl.maximum(PARTS - 1 - n, 0)
    return bits


@triton.jit
def load_wide_queries(
    q, n, bits, PARTS: tl.constexpr, DIM: tl.constexpr, first, TILE: tl.constexpr
):
    """As `load_columns`, for the wide rows of queries n with `load_parts` bits."""
    column = first + tl.arange(0, TILE)
    exists = ((bits[:, None] >> (column // DIM)[None, :]) & 1) != 0
    if PARTS * DIM % TILE != 0:
        exists = exists & (column < PARTS * DIM)[None, :]
    at = q + (n - PARTS + 1)[:, None] * DIM + column[None, :]
    return tl.load(at, mask=exists, other=0.0)


@triton.jit
def wide_product(
    q, n, bits, k, j, keys,
    PARTS: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Wide rows of `BM` queries times those of `BN` keys, `[BM, BN]` in fp32."""
    total = tl.zeros([BM, BN], tl.float32)
    for t in range(TILES):
        a = load_wide_queries(q, n, bits, PARTS, DIM, t * TILE, TILE)
        b = load_columns(k, j, j < keys, PARTS * DIM, t * TILE, TILE)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def mask_logits(
    x, i, j, segment_i, segment_j, keys,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Mask_-inf of a tile; if it is not at an `EDGE` of visibility, only segments hide anything."""
    if EDGE or SEGMENTS:
        visible = (i < keys)[:, None] & (j < keys)[None, :]
        if SEGMENTS:
            visible &= (segment_i[:, None] == segment_j[None, :]) & (segment_i >= 0)[:, None]
        if EDGE and CAUSAL:
            visible &= j[None, :] <= i[:, None]
        if EDGE and WINDOW > 0:
            visible &= i[:, None] - j[None, :] < WINDOW
        x = tl.where(visible, x, float("-inf"))
    return x


@triton.jit
def band_place(
    i, j, offset, keys, NEAR: tl.constexpr, FAR: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    """Where a tile is on the band, and the place of its entries in a band `[queries, BAND]`.

    The band's distances are those below `NEAR`, then those from `FAR` on.
    """
    distance = i[:, None] - j[None, :]
    column = tl.where(distance < NEAR, distance, distance - FAR + NEAR)
    on = (column >= 0) & (column < BAND) & ((distance < NEAR) | (distance >= FAR))
    return on & (i < keys)[:, None], (i - offset)[:, None] * BAND + column


@triton.jit
def key_span(
    spans, block, first, keys,
    BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """First and one-past-last key that any of the `BM` query tokens from `first` on can see."""
    if SEGMENTS:
        low, high = tl.load(spans + block * 2), tl.load(spans + block * 2 + 1)
    else:
        low, high = tl.maximum(first - WINDOW + 1, 0) if WINDOW > 0 else first * 0, keys
        if CAUSAL:
            high = tl.minimum(keys, first + BM)
    return low, high


@triton.jit
def query_span(
    spans, block, first, queries, offset,
    BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """First and one-past-last query that can see any of the `BN` key tokens from `first` on."""
    if SEGMENTS:
        low, high = tl.load(spans + block * 2), tl.load(spans + block * 2 + 1)
    else:
        low, high = tl.maximum(first - offset, 0) if CAUSAL else first * 0, queries
        if WINDOW > 0:
            high = tl.minimum(queries, tl.maximum(first + BN - 1 + WINDOW - offset, 0))
    return low, high


@triton.jit
def inner_keys(
    low, high, first, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Within keys `low .. high`, the whole tiles that no edge of `BM` tokens from `first` on cuts.

    Returns their bounds: before and after them are tiles at an edge.
    """
    start = low
    if WINDOW > 0:  # distances from the last query stay below FAR
        start += tl.cdiv(tl.maximum(first + BM - FAR - low, 0), BN) * BN
    start = tl.minimum(start, high)
    stop = high
    if CAUSAL:  # distances from the first query are at least NEAR
        stop = tl.minimum(stop, first - NEAR + 1)
    return start, start + tl.maximum(stop - start, 0) // BN * BN
