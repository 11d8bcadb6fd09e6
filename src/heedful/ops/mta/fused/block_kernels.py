"""Mask, convolution, its gradients and the softmax on a tile in memory, in Triton.

A tile of one head is `[rows, columns]`, in the inputs' precision; sums are fp32. Token numbers
count keys: output row n of a convolution is token `first + n`, and row m of its input stands
`above` rows further up in them.

A row of the convolution's kernel, written as a band matrix, makes its part of the convolution a
matrix product: 16 outputs of a row of the tile come from the 32 inputs that start 8 columns before
them, as C // 2 <= 8. So a load starts at a multiple of 8 columns and can take 16 bytes at a time.
A tensor core is faster at the zeros of the band matrix than anything else is at the rest.
"""

import triton
import triton.language as tl

from heedful.ops.common.triton_tiles import visible_tile

WIDTH = tl.constexpr(16)  # columns of an output block
REACH = tl.constexpr(32)  # columns of the input that it comes from,
ASIDE = tl.constexpr(8)  # and how many of them stand before its own


@triton.jit
def segment_numbers(segments, token, tokens, SEGMENTS: tl.constexpr):
    """Segment numbers of tokens, -2 where there is no such token."""
    if SEGMENTS:
        return tl.load(segments + token, mask=(token >= 0) & (token < tokens), other=-2)
    return token * 0


@triton.jit
def tile_columns(x, row, valid, first_column, columns, COUNT: tl.constexpr):
    """`[len(row), COUNT]` of the tile from `first_column`, zero outside of it."""
    column = first_column + tl.arange(0, COUNT)
    inside = valid[:, None] & ((column >= 0) & (column < columns))[None, :]
    return tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def blank_kernel(
    x, segments, heads, rows, columns, first_row, first_column, tokens, row_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Zero where a row cannot see a column, in place.

    Programs (block of columns, block of rows, batch x head); a block that sees all is left alone.
    """
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(2).to(tl.int64)
    x += tile * rows * columns
    visible = visible_tile(
        segments, row_stride, tile // heads, first_row + n, first_column + j, tokens, CAUSAL,
        WINDOW, SEGMENTS,
    )  # fmt: skip
    inside = (n < rows)[:, None] & (j < columns)[None, :]
    at = x + n[:, None] * columns + j[None, :]
    tl.store(at, tl.zeros((BM, BN), x.dtype.element_ty), mask=inside & ~visible)


@triton.jit
def convolve_kernel(
    x, y, kernel, segments, heads, inputs, outputs, columns, above, first, tokens, row_stride,
    TRANSPOSED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    SEGMENTS: tl.constexpr,
):  # fmt: skip
    """y[n, j] = sum_{r, c} kernel[r, c] x[n + r - above, j + c - C//2], or the transpose of it.

    Programs (block of columns, block of rows, batch x head). Rows and columns outside `x` are zero.
    With segments, row n takes only from rows of its own segment (of token first + n). Transposed,
    `x` is a gradient of the outputs and `y` one of the inputs:
    y[m, j] = sum_{r, c} kernel[r, c] x[m - r + above, j - c + C//2].
    """
    start = tl.program_id(0) * WIDTH
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(2).to(tl.int64)
    x += tile * inputs * columns
    y += tile * outputs * columns
    kernel += (tile % heads) * R * C
    if SEGMENTS:
        segments += (tile // heads) * row_stride
    # Row n of y is an output row, or transposed an input row, which is token first + n + shift.
    shift = R - 1 - above if TRANSPOSED else 0
    own = segment_numbers(segments, first + n - shift, tokens, SEGMENTS)
    lag = tl.arange(0, REACH)[:, None] - tl.arange(0, WIDTH)[None, :] - (ASIDE - C // 2)
    c = C - 1 - lag if TRANSPOSED else lag
    total = tl.zeros((BM, WIDTH), tl.float32)
    for r in range(R):  # not unrolled: hoisted loads would spill
        row = n - r + above if TRANSPOSED else n + r - above
        valid = (row >= 0) & (row < inputs)
        if SEGMENTS:
            token = first + row if TRANSPOSED else first + n + r - (R - 1)
            valid &= segment_numbers(segments, token, tokens, SEGMENTS) == own
        band = tl.load(kernel + r * C + c, mask=(c >= 0) & (c < C), other=0.0)
        entries = tile_columns(x, row, valid, start - ASIDE, columns, REACH)
        total = tl.dot(entries, band.to(entries.dtype), total, input_precision="ieee")
    j = start + tl.arange(0, WIDTH)
    mask = (n < outputs)[:, None] & (j < columns)[None, :]
    tl.store(y + n[:, None] * columns + j[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def kernel_gradient_kernel(
    grad, x, parts, segments, heads, inputs, outputs, columns, above, first, tokens, row_stride,
    R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """parts[r, c] = sum_{n, j} grad[n, j] x[n + r - above, j + c - C//2] over one block.

    Programs (block of BN columns, block of rows, batch x head); the host adds the parts, so that
    two runs agree to the last bit.
    """
    across, down = tl.num_programs(0), tl.num_programs(1)
    begin = tl.program_id(0) * BN
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(2).to(tl.int64)
    x += tile * inputs * columns
    grad += tile * outputs * columns
    if SEGMENTS:
        segments += (tile // heads) * row_stride
    parts += ((tile * down + tl.program_id(1)) * across + tl.program_id(0)) * R * C
    own = segment_numbers(segments, first + n, tokens, SEGMENTS)
    lag = tl.arange(0, REACH)[None, :] - tl.arange(0, WIDTH)[:, None] - (ASIDE - C // 2)
    for r in range(R):  # not unrolled: hoisted loads would spill
        row = n + r - above
        valid = (row >= 0) & (row < inputs)
        if SEGMENTS:
            valid &= segment_numbers(segments, first + n + r - (R - 1), tokens, SEGMENTS) == own
        # Products of every output column with every input column in its reach; the sums over
        # equal distances are the gradient.
        total = tl.zeros((WIDTH, REACH), tl.float32)
        for start in range(begin, tl.minimum(begin + BN, columns), WIDTH):
            columns_of_grad = tile_columns(grad, n, n < outputs, start, columns, WIDTH)
            entries = tile_columns(x, row, valid, start - ASIDE, columns, REACH)
            total = tl.dot(tl.trans(columns_of_grad), entries, total, input_precision="ieee")
        for c in tl.static_range(C):
            tl.store(parts + r * C + c, tl.sum(tl.sum(tl.where(lag == c, total, 0.0), 1), 0))


@triton.jit
def visible_logits(
    logits, segments, row_stride, batch, n, j, rows, columns, first_row, first_column, tokens,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """`[len(n), len(j)]` in fp32, -inf where a row cannot see; their places; what is inside."""
    inside = (n < rows)[:, None] & (j < columns)[None, :]
    visible = inside & visible_tile(
        segments, row_stride, batch, first_row + n, first_column + j, tokens, CAUSAL, WINDOW,
        SEGMENTS,
    )  # fmt: skip
    # What is hidden is loaded too: with a mask along the diagonal no load could be wide.
    at = n[:, None] * columns + j[None, :]
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(visible, x, float("-inf")), at, inside


@triton.jit
def softmax_kernel(
    logits, p, segments, heads, rows, columns, first_row, first_column, tokens, row_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """p = softmax over the visible entries of each row of logits; zero for a row that sees nothing.

    `p` may be the tile of the logits itself. Programs (block of rows, batch x head); one pass for
    the row's maximum and sum, one to write.
    """
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.program_id(1).to(tl.int64)
    logits += tile * rows * columns
    p += tile * rows * columns
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, columns, BN):
        x, _, _ = visible_logits(
            logits, segments, row_stride, tile // heads, n, start + tl.arange(0, BN), rows, columns,
            first_row, first_column, tokens, CAUSAL, WINDOW, SEGMENTS,
        )  # fmt: skip
        highest = tl.maximum(top, tl.max(x, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(x - level[:, None]), 1)
        top = highest
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, columns, BN):
        x, at, inside = visible_logits(
            logits, segments, row_stride, tile // heads, n, start + tl.arange(0, BN), rows, columns,
            first_row, first_column, tokens, CAUSAL, WINDOW, SEGMENTS,
        )  # fmt: skip
        weight = tl.exp(x - level[:, None]) / total[:, None]
        tl.store(p + at, weight.to(p.dtype.element_ty), mask=inside)


@triton.jit
def softmax_backward_kernel(grad, p, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    """grad = p (grad - sum_j p grad), in place: with anything behind P the sum needs grad itself.

    Programs (block of rows, batch x head).
    """
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.program_id(1).to(tl.int64) * rows * columns
    delta = tl.zeros((BM,), tl.float32)
    for start in range(0, columns, BN):
        j = start + tl.arange(0, BN)
        inside = (n < rows)[:, None] & (j < columns)[None, :]
        at = tile + n[:, None] * columns + j[None, :]
        weight = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        delta += tl.sum(weight * tl.load(grad + at, mask=inside, other=0.0).to(tl.float32), 1)
    for start in range(0, columns, BN):
        j = start + tl.arange(0, BN)
        inside = (n < rows)[:, None] & (j < columns)[None, :]
        at = tile + n[:, None] * columns + j[None, :]
        weight = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + at, (weight * (d - delta[:, None])).to(p.dtype.element_ty), mask=inside)
