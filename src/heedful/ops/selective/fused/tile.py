"""Helpers of selective attention's fused kernels: one tile of S and F.

A tile is `[queries, keys]`, or `[keys, queries]` in the kernels that own keys (`TRANSPOSED`): there
the weights leave one dot in the layout in which the next one takes them.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # the hardware's exponential has base two
UPPER_HALF = tl.constexpr(-65536)  # the bits of an fp32 number that bfloat16 keeps


@triton.jit
def load_rows(x, rows, limit, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """`[len(rows), WIDTH]` from a contiguous `[limit, DIM]`, zero beyond either."""
    d = tl.arange(0, WIDTH)
    inside = (rows < limit)[:, None]
    if DIM != WIDTH:
        inside = inside & (d < DIM)[None, :]
    return tl.load(x + rows[:, None] * DIM + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(x, rows, limit, values, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """The reverse of `load_rows`, in the type of `x`."""
    d = tl.arange(0, WIDTH)
    inside = (rows < limit)[:, None] & (d < DIM)[None, :]
    tl.store(x + rows[:, None] * DIM + d[None, :], values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def matmul(a, b, added=None):
    """`a @ b + added`, added up in fp32; fp32 operands are not rounded."""
    return tl.dot(a, b, added, input_precision="ieee")


@triton.jit
def visit(order, n):
    """The n-th block to visit, and whether nothing of its tile is masked; see `visits`."""
    entry = tl.load(order + n)
    return entry // 2, entry % 2 == 1


@triton.jit
def tile_visible(
    i, j, segments, row_stride, batch, keys, WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Test whether the query tokens i see the key tokens j, both counted among the keys.

    `segments`: int32 `[B or 1, keys]`, -1 for padding; `row_stride` 0 if one row serves all.
    `WINDOW` 0: no limit. Tokens outside `0 .. keys-1` are never visible.
    """
    inside_i, inside_j = (i >= 0) & (i < keys), (j >= 0) & (j < keys)
    visible = inside_i[:, None] & inside_j[None, :] & (j[None, :] <= i[:, None])
    if WINDOW > 0:
        visible &= i[:, None] - j[None, :] < WINDOW
    if segments is not None:
        of_query = tl.load(segments + batch * row_stride + i, mask=inside_i, other=-1)
        of_key = tl.load(segments + batch * row_stride + j, mask=inside_j, other=-2)
        visible &= (of_query[:, None] == of_key[None, :]) & (of_query >= 0)[:, None]
    return tl.trans(visible) if TRANSPOSED else visible


@triton.jit
def can_mask(visible, i, j, first, row_stride, batch, keys, TRANSPOSED: tl.constexpr):
    """Test whether i may mask j: it sees j, j is not itself, j is not a protected first token."""
    if TRANSPOSED:
        i, j = i[None, :], j[:, None]
    else:
        i, j = i[:, None], j[None, :]
    allowed = visible & (i != j)
    if first is not None:
        allowed &= tl.load(first + batch * row_stride + j, mask=j < keys, other=1) == 0
    return allowed


@triton.jit
def masking_logits(
    sel_q, sel_k, i, j, clear, segments, first, row_stride, batch, keys,
    WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The selector's logits before the scale, -1 where i may not mask j.

    S is `scale` times their positive part, and has a slope where they are not negative: at zero it
    is taken as one, as in reference.py.
    """
    logits = matmul(sel_k, tl.trans(sel_q)) if TRANSPOSED else matmul(sel_q, tl.trans(sel_k))
    if not clear:
        visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, TRANSPOSED)
        allowed = can_mask(visible, i, j, first, row_stride, batch, keys, TRANSPOSED)
        logits = tl.where(allowed, logits, -1.0)
    return logits


@triton.jit
def own_selector():
    """Batch and selector (among all rows' selectors) of a program (block, selector, batch)."""
    batch = tl.program_id(2)
    return batch, (batch * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)


@triton.jit
def of_head(batch, head, heads, PER_SELECTOR: tl.constexpr, GROUP: tl.constexpr):
    """Selector, query head and key head of a head, each among those of all rows."""
    selector = (batch * (heads // PER_SELECTOR) + head // PER_SELECTOR).to(tl.int64)
    head_q = (batch * heads + head).to(tl.int64)
    head_k = (batch * (heads // GROUP) + head // GROUP).to(tl.int64)
    return selector, head_q, head_k


@triton.jit
def own_queries(
    selector_q, selector, block, queries, keys, DS: tl.constexpr, WDS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Of a program's block of queries the rows, their tokens, and the selector's queries."""
    row = block * ROWS + tl.arange(0, ROWS)
    sel_q = load_rows(selector_q + selector * queries * DS, row, queries, DS, WDS)
    return row, keys - queries + row, sel_q


@triton.jit
def next_keys(
    order, n, selector_k, sel_q, i, segments, first, row_stride, batch, keys, DS: tl.constexpr,
    WDS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The n-th block of keys to visit: its tokens, whether it is clear, and what masks there."""
    block, clear = visit(order, n)
    j = block * COLUMNS + tl.arange(0, COLUMNS)
    sel_k = load_rows(selector_k, j, keys, DS, WDS)
    masking = masking_logits(
        sel_q, sel_k, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, False,
    )  # fmt: skip
    return j, clear, sel_k, masking


@triton.jit
def next_queries(
    order, n, selector_q, sel_k, j, segments, first, row_stride, batch, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The n-th block of queries to visit: number, rows, tokens, and as `next_keys`, transposed."""
    block, clear = visit(order, n)
    row = block * ROWS + tl.arange(0, ROWS)
    i = keys - queries + row
    sel_q = load_rows(selector_q, row, queries, DS, WDS)
    masking = masking_logits(
        sel_q, sel_k, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, True,
    )  # fmt: skip
    return block, row, i, clear, sel_q, masking


@triton.jit
def tile_f(masking, base, scale, like, TRANSPOSED: tl.constexpr):
    """F of a tile from its masking logits and F at its first query: `base`, one number per key.

    F[i, j] = base[j] + sum of S[p, j] over the queries p < i of the tile.
    """
    earlier = _sum_queries(tl.maximum(masking, 0.0), like, TRANSPOSED, not TRANSPOSED)
    return earlier * scale + (base[:, None] if TRANSPOSED else base[None, :])


@triton.jit
def tile_penalty(
    masking, base, scale, like, i, j, clear, segments, row_stride, batch, keys,
    WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Penalty on the logits, in base two: F, or infinity where nothing is visible."""
    penalty = tile_f(masking, base * LOG2E, scale * LOG2E, like, TRANSPOSED)
    if not clear:
        visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, TRANSPOSED)
        penalty = tl.where(visible, penalty, float("inf"))
    return penalty


@triton.jit
def sum_later(x, like, TRANSPOSED: tl.constexpr):
    """Per entry the sum of the tile over strictly later queries: what takes dF to dS."""
    return _sum_queries(x, like, TRANSPOSED, TRANSPOSED)


@triton.jit
def _sum_queries(x, like, TRANSPOSED: tl.constexpr, BELOW: tl.constexpr):
    """Product with a strict triangle of ones.

    Tensor cores take half precision, or fp32 rounded to ten bits: too coarse for a running sum. But
    ones are exact, so it is enough to split x into two terms of bfloat16, which has the range of
    fp32. The first is x cut off after 16 bits, the second rounds what is left: 2^-15 |x| is lost at
    most. S is never negative, so that bounds the relative error of F too, and no sum falls below 0.
    """
    QUERIES: tl.constexpr = x.shape[1] if TRANSPOSED else x.shape[0]
    row, column = tl.arange(0, QUERIES)[:, None], tl.arange(0, QUERIES)[None, :]
    ones = tl.where(row > column if BELOW else row < column, 1.0, 0.0)
    if like.dtype == tl.float32:
        total = matmul(x, ones) if TRANSPOSED else matmul(ones, x)
    else:
        ones = ones.to(tl.bfloat16)
        high = (x.to(tl.int32, bitcast=True) & UPPER_HALF).to(tl.float32, bitcast=True)
        if TRANSPOSED:
            total = tl.dot((x - high).to(tl.bfloat16), ones)
            total = tl.dot(high.to(tl.bfloat16), ones, total)
        else:
            total = tl.dot(ones, (x - high).to(tl.bfloat16))
            total = tl.dot(ones, high.to(tl.bfloat16), total)
    return total
