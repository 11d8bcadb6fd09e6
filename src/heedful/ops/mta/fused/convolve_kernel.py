"""The convolution of a tile as matrix products, in Triton.

A row of a multi-token kernel, written as a band matrix, makes its part of the convolution a matrix
product: `WIDTH` outputs of a row of the tile come from the `WIDTH + REST` inputs that start `ASIDE`
columns before them, as C // 2 <= ASIDE. So a load starts at a multiple of 8 columns and can take 16
bytes at a time. A tensor core is faster at the zeros of the band than anything else is at the rest.
"""

import triton
import triton.language as tl

WIDTH = tl.constexpr(64)  # columns of an output block
ASIDE = tl.constexpr(8)  # columns of the input before it that it comes from,
REST = tl.constexpr(16)  # and in all how many more than its own


@triton.jit(do_not_specialize=["inputs", "outputs", "above", "before", "first"])
def convolve_kernel(
    x, y, bands, segments, heads, inputs, outputs, columns, above, before, first, tokens,
    row_stride, low,
    R: tl.constexpr, SPLIT: tl.constexpr, SEGMENTS: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """y[n, j] = sum_{r, c} kernel[r, c] x[n + r - above, j + c - C//2]; zeros stand around `x`.

    Programs (block of columns, block of rows, batch x head). `bands` is that of every head and row
    of the kernel, `[H, R, WIDTH + REST, WIDTH]`. Where the tile is fp32 and the bands are not
    (SPLIT), the tile is split into two numbers of 8 bits each, and after `low` entries of `bands`
    stands what their rounding left. With segments, row n of y, which is token first + n, takes only
    from rows of its own segment; the row at r is token first + n + r - before.
    """
    start = tl.program_id(0) * WIDTH
    n = tl.program_id(1) * BM + tl.arange(0, BM)
    tile = tl.program_id(2).to(tl.int64)
    x += tile * inputs * columns
    y += tile * outputs * columns
    bands += (tile % heads) * R * (WIDTH + REST) * WIDTH
    if SEGMENTS:
        segments += (tile // heads) * row_stride
        own = segment_numbers(segments, first + n, tokens)
    k = tl.arange(0, WIDTH)
    rest = tl.arange(0, REST) + WIDTH
    j = tl.arange(0, WIDTH)
    total = tl.zeros((BM, WIDTH), tl.float32)
    for r in range(R):
        row = n + r - above
        valid = (row >= 0) & (row < inputs)
        if SEGMENTS:
            valid &= segment_numbers(segments, first + n + r - before, tokens) == own
        band = bands + r * (WIDTH + REST) * WIDTH
        main = band + k[:, None] * WIDTH + j[None, :]
        side = band + rest[:, None] * WIDTH + j[None, :]
        of_main = tile_columns(x, row, valid, start - ASIDE + k, columns)
        of_side = tile_columns(x, row, valid, start - ASIDE + rest, columns)
        total = add_product(total, of_main, main, low, SPLIT)
        total = add_product(total, of_side, side, low, SPLIT)
    column = start + j
    mask = (n < outputs)[:, None] & (column < columns)[None, :]
    tl.store(y + n[:, None] * columns + column[None, :], total.to(y.dtype.element_ty), mask=mask)


@triton.jit
def tile_columns(x, row, valid, column, columns):
    """`[len(row), len(column)]` of the tile, zero outside of it."""
    inside = valid[:, None] & ((column >= 0) & (column < columns))[None, :]
    return tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def add_product(total, entries, band, low, SPLIT: tl.constexpr):
    """`total` and the product of entries of the tile with a part of a band."""
    high_band = tl.load(band)
    if SPLIT:
        high = entries.to(high_band.dtype)
        rest = (entries - high.to(tl.float32)).to(high_band.dtype)
        total = tl.dot(high, high_band, total)
        total = tl.dot(rest, high_band, total)
        total = tl.dot(high, tl.load(band + low), total)
    else:
        total = tl.dot(entries, high_band, total, input_precision="ieee")
    return total


@triton.jit
def segment_numbers(segments, token, tokens):
    """Segment numbers of tokens, -2 where there is no such token."""
    return tl.load(segments + token, mask=(token >= 0) & (token < tokens), other=-2)
