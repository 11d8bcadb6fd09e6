"""Convolution, its gradients and the softmax on a tile in memory, in Triton.

A tile of one head is `[rows, columns]`, fp32. Token numbers count keys: output row n of a
convolution is token `first + n`, and row m of its input stands `above` rows further up in them.
"""

import triton
import triton.language as tl

from heedful.ops.triton_tiles import visible_tile


@triton.jit
def segment_of(segments, token, tokens, SEGMENTS: tl.constexpr):
    """Segment numbers of tokens, -2 where there is no such token."""
    if SEGMENTS:
        return tl.load(segments + token, mask=(token >= 0) & (token < tokens), other=-2)
    return token * 0


@triton.jit
def convolve_kernel(
    x, y, kernel, segments, heads, inputs, outputs, columns, above, first, tokens, row_stride,
    TRANSPOSED: tl.constexpr, R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """y[n, j] = sum_{r, c} kernel[r, c] x[n + r - above, j + c - C//2], or the transpose of it.

    Programs (block of columns, block of rows, batch x head). Rows and columns outside `x` are zero.
    With segments, row n takes only from rows of its own segment (of token first + n). Transposed,
    `x` is a gradient of the outputs and `y` one of the inputs:
    y[m, j] = sum_{r, c} kernel[r, c] x[m - r + above, j - c + C//2].
    """
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(2).to(tl.int64)
    x += tile * inputs * columns
    y += tile * outputs * columns
    kernel += (tile % heads) * R * C
    if SEGMENTS:
        segments += (tile // heads) * row_stride
    # Row n of y is an output row, or transposed an input row, which is token first + n + shift.
    shift = R - 1 - above if TRANSPOSED else 0
    own = segment_of(segments, first + n - shift, tokens, SEGMENTS)
    total = tl.zeros((BM, BN), tl.float32)
    for r in range(R):  # not unrolled: hoisted loads would spill
        row = n - r + above if TRANSPOSED else n + r - above
        valid = (row >= 0) & (row < inputs)
        if SEGMENTS:
            token = first + row if TRANSPOSED else first + n + r - (R - 1)
            valid &= segment_of(segments, token, tokens, SEGMENTS) == own
        for c in tl.static_range(C):
            column = j - c + C // 2 if TRANSPOSED else j + c - C // 2
            inside = valid[:, None] & (column >= 0)[None, :] & (column < columns)[None, :]
            entry = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
            total += tl.load(kernel + r * C + c) * entry
    kept = (n < outputs)[:, None] & (j < columns)[None, :]
    tl.store(y + n[:, None] * columns + j[None, :], total, mask=kept)


@triton.jit
def kernel_gradient_kernel(
    grad, x, parts, segments, heads, inputs, outputs, columns, above, first, tokens, row_stride,
    R: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """parts[r, c] = sum_{n, j} grad[n, j] x[n + r - above, j + c - C//2] over one block.

    Programs (block of columns, block of rows, batch x head); the host adds the parts, so that two
    runs agree to the last bit.
    """
    across, down = tl.num_programs(0), tl.num_programs(1)
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(2).to(tl.int64)
    x += tile * inputs * columns
    if SEGMENTS:
        segments += (tile // heads) * row_stride
    parts += ((tile * down + tl.program_id(1)) * across + tl.program_id(0)) * R * C
    kept = (n < outputs)[:, None] & (j < columns)[None, :]
    at = grad + tile * outputs * columns + n[:, None] * columns + j[None, :]
    given = tl.load(at, mask=kept, other=0.0)
    own = segment_of(segments, first + n, tokens, SEGMENTS)
    for r in range(R):  # not unrolled: hoisted loads would spill
        row = n + r - above
        valid = (row >= 0) & (row < inputs)
        if SEGMENTS:
            valid &= segment_of(segments, first + n + r - (R - 1), tokens, SEGMENTS) == own
        for c in tl.static_range(C):
            column = j + c - C // 2
            inside = valid[:, None] & (column >= 0)[None, :] & (column < columns)[None, :]
            entry = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
            tl.store(parts + r * C + c, tl.sum(tl.sum(given * entry, 1), 0))


@triton.jit
def softmax_kernel(
    logits, segments, heads, rows, columns, first_row, first_column, tokens, row_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Softmax over the visible entries of each row, in place; a row that sees nothing becomes zero.

    Programs (block of rows, batch x head); one pass for the row's maximum and sum, one to write.
    """
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    tile = tl.program_id(1).to(tl.int64)
    logits += tile * rows * columns
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for start in range(0, columns, BN):
        j = start + tl.arange(0, BN)
        kept = (n < rows)[:, None] & (j < columns)[None, :]
        kept &= visible_tile(
            segments, row_stride, tile // heads, first_row + n, first_column + j, tokens, CAUSAL,
            WINDOW, SEGMENTS,
        )  # fmt: skip
        at = logits + n[:, None] * columns + j[None, :]
        x = tl.load(at, mask=kept, other=float("-inf"))
        highest = tl.maximum(top, tl.max(x, 1))
        level = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(x - level[:, None]), 1)
        top = highest
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.where(total == 0.0, 1.0, total)
    for start in range(0, columns, BN):
        j = start + tl.arange(0, BN)
        inside = (n < rows)[:, None] & (j < columns)[None, :]
        kept = inside & visible_tile(
            segments, row_stride, tile // heads, first_row + n, first_column + j, tokens, CAUSAL,
            WINDOW, SEGMENTS,
        )  # fmt: skip
        at = logits + n[:, None] * columns + j[None, :]
        x = tl.load(at, mask=kept, other=float("-inf"))
        tl.store(at, tl.exp(x - level[:, None]) / total[:, None], mask=inside)


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
        weight = tl.load(p + at, mask=inside, other=0.0)
        delta += tl.sum(weight * tl.load(grad + at, mask=inside, other=0.0), 1)
    for start in range(0, columns, BN):
        j = start + tl.arange(0, BN)
        inside = (n < rows)[:, None] & (j < columns)[None, :]
        at = tile + n[:, None] * columns + j[None, :]
        weight = tl.load(p + at, mask=inside, other=0.0)
        d = tl.load(grad + at, mask=inside, other=0.0)
        tl.store(grad + at, weight * (d - delta[:, None]), mask=inside)
