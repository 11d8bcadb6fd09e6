"""The softmax of a tile and its backward in Triton: a program per row, two passes over it.

What they compute is written in common/softmax.py.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # columns at a time
LOW = tl.constexpr(-3.4e38)  # finite, for a row that sees nothing would become NaN


@triton.jit(do_not_specialize=["rows", "clear"])
def softmax_kernel(
    logits, mask, sinks, p, log_sums, heads, rows, columns, clear, mask_stride,
    SINKS: tl.constexpr,
):  # fmt: skip
    """p = softmax(logits), zero where masked, and each row's logarithm of its sum, sink included.

    Programs (row, batch x head). `mask` is that of the columns from `clear` on, `[B or 1, rows,
    columns - clear]`, and `mask_stride` 0 if it is one for all.
    """
    row, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = (tile * rows + row) * columns
    mask += tile // heads * mask_stride + row * (columns - clear) - clear
    top = tl.full((BLOCK,), LOW, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x, _, _ = visible_logits(logits + place, mask, start, columns, clear)
        highest = tl.maximum(top, x)
        total = total * tl.exp(top - highest) + tl.exp(x - highest)
        top = highest
    level = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + tile % heads)
        level = tl.maximum(level, sink)
    whole = tl.sum(total * tl.exp(top - level), 0)
    if SINKS:
        whole += tl.exp(sink - level)
    log_sum = level + tl.log(whole)
    tl.store(log_sums + tile * rows + row, log_sum)
    for start in range(0, columns, BLOCK):
        x, j, masked = visible_logits(logits + place, mask, start, columns, clear)
        weight = tl.where(masked, 0.0, tl.exp(x - log_sum))
        tl.store(p + place + j, weight.to(p.dtype.element_ty), mask=j < columns)


@triton.jit(do_not_specialize=["rows", "clear"])
def softmax_backward_kernel(
    grad, logits, log_sums, mask, out, totals, heads, rows, columns, clear, mask_stride
):  # fmt: skip
    """out = p (grad - sum_j p grad), and that sum. Programs (row, batch x head)."""
    row, tile = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = (tile * rows + row) * columns
    mask += tile // heads * mask_stride + row * (columns - clear) - clear
    log_sum = tl.load(log_sums + tile * rows + row)
    parts = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        x, j, masked = visible_logits(logits + place, mask, start, columns, clear)
        d = tl.load(grad + place + j, mask=j < columns, other=0.0).to(tl.float32)
        parts += tl.where(masked, 0.0, tl.exp(x - log_sum)) * d
    total = tl.sum(parts, 0)
    tl.store(totals + tile * rows + row, total)
    for start in range(0, columns, BLOCK):
        x, j, masked = visible_logits(logits + place, mask, start, columns, clear)
        d = tl.load(grad + place + j, mask=j < columns, other=0.0).to(tl.float32)
        d = tl.where(masked, 0.0, tl.exp(x - log_sum)) * (d - total)
        tl.store(out + place + j, d.to(out.dtype.element_ty), mask=j < columns)


@triton.jit
def visible_logits(logits, mask, start, columns, clear):
    """Logits of a row's next columns, `LOW` where masked; the columns; and whether they are."""
    j = start + tl.arange(0, BLOCK)
    inside = j < columns
    masked = tl.load(mask + j, mask=inside & (j >= clear), other=0) != 0
    masked = masked | ~inside
    x = tl.load(logits + j, mask=inside, other=0.0)
    return tl.where(masked, LOW, x), j, masked
