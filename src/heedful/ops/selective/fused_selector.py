"""Backward kernels of selective attention without heads: what later blocks give the selector.

fused_backward.py tells how the selector's gradient is split.
"""

import triton
import triton.language as tl

from heedful.ops.selective.fused_tile import (
    hiding_logits,
    load_rows,
    product,
    store_rows,
    sum_later,
    tile_f,
    tile_visible,
    visit,
)


@triton.jit
def _memory_gradient(
    hiding, base, tau, scale, like, grad_memory, row, i, j, clear, segments, row_stride, batch,
    queries, keys,
    WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """dF of the memory: the gradient of a query's memory where it sees a key with F <= tau."""
    f = tile_f(hiding, base, scale, like, TRANSPOSED)
    per_query = tl.load(grad_memory + batch * queries + row, mask=row < queries, other=0.0)
    per_query = per_query[None, :] if TRANSPOSED else per_query[:, None]
    counted = tl.where(f <= tau, per_query, 0.0)
    if not clear:
        visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, TRANSPOSED)
        counted = tl.where(visible, counted, 0.0)
    return counted


@triton.jit
def selector_key_gradients(
    selector_q, selector_k, segments, first, row_stride, bases, g_sums, grad_state, grad_memory,
    order, count, later, dstate, dselector_k,
    tau, chunks, scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The selector's gradient for one block of keys, from later blocks and from the memory.

    Programs (key block, selector, batch) go from the last query block to the first and carry the
    sum of dF over all that is behind; it starts as the outgoing state's gradient and ends as the
    incoming one's. `later[b, j]`: that sum behind block b. `g_sums`: as from `key_gradients`, now
    over all heads. `grad_memory`: `[B, Tq]`, divided by the number of selectors.
    """
    batch, selectors = tl.program_id(2), tl.num_programs(1)
    selector = (batch * selectors + tl.program_id(1)).to(tl.int64)
    blocks = tl.cdiv(queries, ROWS)
    STEPS: tl.constexpr = ROWS // STEP
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sel_k = load_rows(selector_k + selector * keys * DS, j, keys, DS, WDS)
    dsel_k = tl.zeros((COLUMNS, WDS), tl.float32)
    selector_q += selector * queries * DS
    later += selector * blocks * keys
    bases += selector * blocks * STEPS * keys
    g_sums += selector * blocks * keys
    place = selector * tl.num_programs(0) + tl.program_id(0)
    order += place * blocks

    df = tl.load(grad_state + selector * keys + j, mask=j < keys, other=0.0)
    for n in range(tl.load(count + place)):
        query_block, clear = visit(order, n)
        row = query_block * ROWS + tl.arange(0, ROWS)
        i = keys - queries + row
        sel_q = load_rows(selector_q, row, queries, DS, WDS)
        hiding = hiding_logits(
            sel_q, sel_k, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, True,
        )  # fmt: skip
        at = query_block.to(tl.int64) * keys + j
        tl.store(later + at, df, mask=j < keys)
        ds = tl.zeros((COLUMNS, ROWS), tl.float32) + df[:, None]
        df -= tl.load(g_sums + at, mask=j < keys, other=0.0)
        if tau is not None:
            base_at = query_block.to(tl.int64) * STEPS * keys + j
            base = tl.load(bases + base_at, mask=j < keys, other=0.0)
            counted = _memory_gradient(
                hiding, base, tau, scale, sel_q, grad_memory, row, i, j, clear, segments,
                row_stride, batch, queries, keys, WINDOW, True,
            )  # fmt: skip
            ds += sum_later(counted, sel_q, True)
            df += tl.sum(counted, 1)
        ds = tl.where(hiding >= 0, ds, 0.0)
        dsel_k = product(ds.to(sel_q.dtype), sel_q, dsel_k)
    tl.store(dstate + selector * keys + j, df, mask=j < keys)
    part = selector * (chunks + 1) + chunks
    store_rows(dselector_k + part * keys * DS, j, keys, dsel_k * scale, DS, WDS)


@triton.jit
def selector_query_gradients(
    selector_q, selector_k, segments, first, row_stride, bases, later, grad_memory, order, count,
    dselector_q,
    tau, chunks, scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The same for one block of queries, from the sums that `selector_key_gradients` stored."""
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    batch, selectors = tl.program_id(2), tl.num_programs(1)
    selector = (batch * selectors + tl.program_id(1)).to(tl.int64)
    place = selector * blocks + block
    order += place * tl.cdiv(keys, COLUMNS)
    later += place * keys
    bases += place * (ROWS // STEP) * keys
    selector_k += selector * keys * DS
    row = block * ROWS + tl.arange(0, ROWS)
    i = keys - queries + row
    sel_q = load_rows(selector_q + selector * queries * DS, row, queries, DS, WDS)
    dsel_q = tl.zeros((ROWS, WDS), tl.float32)
    for n in range(tl.load(count + place)):
        key_block, clear = visit(order, n)
        j = key_block * COLUMNS + tl.arange(0, COLUMNS)
        sel_k = load_rows(selector_k, j, keys, DS, WDS)
        hiding = hiding_logits(
            sel_q, sel_k, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, False,
        )  # fmt: skip
        df = tl.load(later + j, mask=j < keys, other=0.0)
        ds = tl.zeros((ROWS, COLUMNS), tl.float32) + df[None, :]
        if tau is not None:
            base = tl.load(bases + j, mask=j < keys, other=0.0)
            counted = _memory_gradient(
                hiding, base, tau, scale, sel_q, grad_memory, row, i, j, clear, segments,
                row_stride, batch, queries, keys, WINDOW, False,
            )  # fmt: skip
            ds += sum_later(counted, sel_q, False)
        ds = tl.where(hiding >= 0, ds, 0.0)
        dsel_q = product(ds.to(sel_k.dtype), sel_k, dsel_q)
    part = selector * (chunks + 1) + chunks
    store_rows(dselector_q + part * queries * DS, row, queries, dsel_q * scale, DS, WDS)
