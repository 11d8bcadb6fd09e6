"""Backward kernels of selective attention; the host side is fused.py.

With P the weights, dP = dO v^T and delta_i = sum_j P_ij dP_ij (= dO . O), the logits' gradient is
G = P (dP - delta), as in flash attention. F is subtracted from the logits of every head, and S[p, j]
is a term of F[i, j] for all i > p:

    dF = -sum over heads of G,    dS[p, j] = sum over i > p of dF[i, j].

The sum over later queries is split where the forward splits F. `query_gradients` and
`key_gradients` have the heads' G at hand and handle the queries of the same block; the latter also
stores the sums of G over a block, from which the two selector kernels handle the blocks after it,
without any head.
"""

import triton
import triton.language as tl

from heedful.ops.selective.fused_tile import (
    LOG2E,
    hiding_logits,
    load_rows,
    product,
    store_rows,
    sum_later,
    tile_f,
    tile_penalty,
    tile_visible,
    visit,
)


@triton.jit
def query_gradients(
    selector_q, selector_k, segments, first, row_stride, q, k, v, bases, order, count, out, rest,
    lse, grad, dq, delta, dselector_q,
    scale, queries, keys, heads,
    PER_SELECTOR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, DV: tl.constexpr, WDV: tl.constexpr, DS: tl.constexpr,
    WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """dq and delta of HEADS heads, and their share of the selector's gradient.

    Programs (query block, chunk of HEADS heads, batch), as in `attend`. `bases` has a row for every
    STEP queries, see `accumulate`. `dselector_q`: `[B, Hs, chunks + 1, Tq, Ds]`, one part per chunk of heads.
    """
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2)
    selector = (batch * (heads // PER_SELECTOR) + head // PER_SELECTOR).to(tl.int64)
    head_q = (batch * heads + head).to(tl.int64)
    head_k = (batch * (heads // GROUP) + head // GROUP).to(tl.int64)
    q += head_q * queries * D
    dq += head_q * queries * D
    k += head_k * keys * D
    v += head_k * keys * DV
    out += head_q * queries * DV
    rest += head_q * queries * DV
    grad += head_q * queries * DV
    lse += head_q * queries
    delta += head_q * queries
    selector_k += selector * keys * DS
    place = selector * blocks + block
    order += place * tl.cdiv(keys, COLUMNS)
    bases += place * (ROWS // STEP) * keys
    PARTS: tl.constexpr = PER_SELECTOR // HEADS + 1
    part = selector * PARTS + head % PER_SELECTOR // HEADS

    row = block * ROWS + tl.arange(0, ROWS)
    i = keys - queries + row
    asking = load_rows(selector_q + selector * queries * DS, row, queries, DS, WDS)
    asked = tl.zeros((ROWS, WDS), tl.float32)
    query, given, logarithm, mean, sums = (), (), (), (), ()
    for h in tl.static_range(HEADS):
        query = query + (load_rows(q + h * queries * D, row, queries, D, WD),)
        dout = load_rows(grad + h * queries * DV, row, queries, DV, WDV)
        given = given + (dout,)
        result = load_rows(out + h * queries * DV, row, queries, DV, WDV)
        # Added up as dP is, so that G is exactly zero where a query sees a single key.
        dots = product(dout, tl.trans(result))
        if out.dtype.element_ty != tl.float32:
            result = load_rows(rest + h * queries * DV, row, queries, DV, WDV)
            dots = product(dout, tl.trans(result), dots)
        average = tl.sum(tl.where(row[:, None] == row[None, :], dots, 0.0), 1)
        tl.store(delta + h * queries + row, average, mask=row < queries)
        mean = mean + (average,)
        logarithm = logarithm + (tl.load(lse + h * queries + row, mask=row < queries, other=0.0),)
        sums = sums + (tl.zeros((ROWS, WD), tl.float32),)

    for n in range(tl.load(count + place)):
        key_block, clear = visit(order, n)
        j = key_block * COLUMNS + tl.arange(0, COLUMNS)
        keyed = load_rows(selector_k, j, keys, DS, WDS)
        hiding = hiding_logits(
            asking, keyed, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, False,
        )  # fmt: skip
        base = tl.load(bases + j, mask=j < keys, other=0.0)
        penalty = tile_penalty(
            hiding, base, scale, asking, i, j, clear, segments, row_stride, batch, keys, WINDOW,
            False,
        )  # fmt: skip
        flow = tl.zeros((ROWS, COLUMNS), tl.float32)
        new_sums = ()
        for h in tl.static_range(HEADS):
            if h % SHARE == 0:
                key = load_rows(k + h // SHARE * keys * D, j, keys, D, WD)
                value = load_rows(v + h // SHARE * keys * DV, j, keys, DV, WDV)
            logits = product(query[h], tl.trans(key)) * (scale * LOG2E) - penalty
            p = tl.exp2(logits - logarithm[h][:, None])
            g = p * (product(given[h], tl.trans(value)) - mean[h][:, None])
            flow += g
            new_sums = new_sums + (product(g.to(key.dtype), key, sums[h]),)
        sums = new_sums
        ds = tl.where(hiding >= 0, -sum_later(flow, asking, False), 0.0)
        asked = product(ds.to(keyed.dtype), keyed, asked)

    for h in tl.static_range(HEADS):
        store_rows(dq + h * queries * D, row, queries, sums[h] * scale, D, WD)
    store_rows(dselector_q + part * queries * DS, row, queries, asked * scale, DS, WDS)


@triton.jit
def key_gradients(
    selector_q, selector_k, segments, first, row_stride, q, k, v, bases, order, count, lse, delta,
    grad, dk, dv, dselector_k, flows,
    begin, chunks, steps, scale, queries, keys, heads,
    PER_SELECTOR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, DV: tl.constexpr, WDV: tl.constexpr, DS: tl.constexpr,
    WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """dk and dv, and the selector's share, of one block of keys and HEADS heads; tiles transposed.

    Programs (key block, selector and one of its chunks of HEADS heads from `begin` on, batch).
    `dk`, `dv`: `[B, H / SHARE, Tk, .]`, summed over the SHARE heads here and over the rest of a
    group by the host. `flows`: `[B, Hs, these chunks, steps, Tk]`, sums of G over the queries of a
    block and the heads of a chunk; zero where no program comes by. `steps`: rows of `bases`, which
    has one for each block.
    """
    block, key_blocks = tl.program_id(0), tl.num_programs(0)
    batch, listed = tl.program_id(2), tl.program_id(1) % chunks
    chunk = begin + listed
    head = tl.program_id(1) // chunks * PER_SELECTOR + chunk * HEADS
    blocks = tl.cdiv(queries, ROWS)
    selector = (batch * (heads // PER_SELECTOR) + head // PER_SELECTOR).to(tl.int64)
    head_q = (batch * heads + head).to(tl.int64)
    head_k = (batch * (heads // GROUP) + head // GROUP).to(tl.int64)
    slot = head_q // SHARE
    q += head_q * queries * D
    k += head_k * keys * D
    v += head_k * keys * DV
    dk += slot * keys * D
    dv += slot * keys * DV
    grad += head_q * queries * DV
    lse += head_q * queries
    delta += head_q * queries
    selector_q += selector * queries * DS
    bases += selector * steps * keys
    place = selector * key_blocks + block
    order += place * blocks
    flows += (selector * chunks + listed) * steps * keys

    j = block * COLUMNS + tl.arange(0, COLUMNS)
    keyed = load_rows(selector_k + selector * keys * DS, j, keys, DS, WDS)
    keying = tl.zeros((COLUMNS, WDS), tl.float32)
    key, value, sums_k, sums_v = (), (), (), ()
    for kv in tl.static_range(HEADS // SHARE):
        key = key + (load_rows(k + kv * keys * D, j, keys, D, WD),)
        value = value + (load_rows(v + kv * keys * DV, j, keys, DV, WDV),)
        sums_k = sums_k + (tl.zeros((COLUMNS, WD), tl.float32),)
        sums_v = sums_v + (tl.zeros((COLUMNS, WDV), tl.float32),)

    for n in range(tl.load(count + place)):
        query_block, clear = visit(order, n)
        row = query_block * ROWS + tl.arange(0, ROWS)
        i = keys - queries + row
        asking = load_rows(selector_q, row, queries, DS, WDS)
        hiding = hiding_logits(
            asking, keyed, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, True,
        )  # fmt: skip
        at = query_block.to(tl.int64) * keys + j
        base = tl.load(bases + at, mask=j < keys, other=0.0)
        penalty = tile_penalty(
            hiding, base, scale, asking, i, j, clear, segments, row_stride, batch, keys, WINDOW,
            True,
        )  # fmt: skip
        flow = tl.zeros((COLUMNS, ROWS), tl.float32)
        new_k, new_v = (), ()
        for h in tl.static_range(HEADS):
            query = load_rows(q + h * queries * D, row, queries, D, WD)
            dout = load_rows(grad + h * queries * DV, row, queries, DV, WDV)
            logarithm = tl.load(lse + h * queries + row, mask=row < queries, other=0.0)
            mean = tl.load(delta + h * queries + row, mask=row < queries, other=0.0)
            if h % SHARE == 0:
                sum_k, sum_v = sums_k[h // SHARE], sums_v[h // SHARE]
            logits = product(key[h // SHARE], tl.trans(query)) * (scale * LOG2E) - penalty
            p = tl.exp2(logits - logarithm[None, :])
            sum_v = product(p.to(dout.dtype), dout, sum_v)
            g = p * (product(value[h // SHARE], tl.trans(dout)) - mean[None, :])
            sum_k = product(g.to(query.dtype), query, sum_k)
            flow += g
            if h % SHARE == SHARE - 1:
                new_k, new_v = new_k + (sum_k,), new_v + (sum_v,)
        sums_k, sums_v = new_k, new_v
        tl.store(flows + at, tl.sum(flow, 1), mask=j < keys)
        ds = tl.where(hiding >= 0, -sum_later(flow, asking, True), 0.0)
        keying = product(ds.to(asking.dtype), asking, keying)

    for kv in tl.static_range(HEADS // SHARE):
        store_rows(dk + kv * keys * D, j, keys, sums_k[kv] * scale, D, WD)
        store_rows(dv + kv * keys * DV, j, keys, sums_v[kv], DV, WDV)
    PARTS: tl.constexpr = PER_SELECTOR // HEADS + 1
    part = selector * PARTS + chunk
    store_rows(dselector_k + part * keys * DS, j, keys, keying * scale, DS, WDS)


@triton.jit
def selector_key_gradients(
    selector_q, selector_k, segments, first, row_stride, bases, flows, grad_state, grad_memory,
    order, count, later, dstate, dselector_k,
    tau, chunks, scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of keys: what dF of later steps, and of the memory, gives the selector.

    Programs (key block, selector, batch) go from the last query block to the first and carry the
    sum of dF over all that is behind; it starts as the outgoing state's gradient and ends as the
    incoming one's. `later[b, j]`: that sum behind block b. `flows`: `[B, Hs, steps, Tk]`, now over
    all heads. `grad_memory`: `[B, Tq]`, divided by the number of selectors.
    """
    batch, selectors = tl.program_id(2), tl.num_programs(1)
    selector = (batch * selectors + tl.program_id(1)).to(tl.int64)
    blocks = tl.cdiv(queries, ROWS)
    STEPS: tl.constexpr = ROWS // STEP
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    keyed = load_rows(selector_k + selector * keys * DS, j, keys, DS, WDS)
    keying = tl.zeros((COLUMNS, WDS), tl.float32)
    selector_q += selector * queries * DS
    later += selector * blocks * keys
    bases += selector * blocks * STEPS * keys
    flows += selector * blocks * STEPS * keys
    place = selector * tl.num_programs(0) + tl.program_id(0)
    order += place * blocks

    df = tl.load(grad_state + selector * keys + j, mask=j < keys, other=0.0)
    within = tl.arange(0, ROWS)
    for n in range(tl.load(count + place)):
        query_block, clear = visit(order, n)
        at = query_block.to(tl.int64) * keys + j
        tl.store(later + at, df, mask=j < keys)
        row = query_block * ROWS + within
        i = keys - queries + row
        asking = load_rows(selector_q, row, queries, DS, WDS)
        hiding = hiding_logits(
            asking, keyed, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, True,
        )  # fmt: skip
        at += query_block.to(tl.int64) * (STEPS - 1) * keys
        ds = tl.zeros((COLUMNS, ROWS), tl.float32) + df[:, None]
        for back in tl.static_range(STEPS):
            step = STEPS - 1 - back
            if back > 0:
                ds = tl.where((within // STEP == step)[None, :], df[:, None], ds)
            df -= tl.load(flows + at + step * keys, mask=j < keys, other=0.0)
        if tau is not None:
            base = tl.load(bases + at, mask=j < keys, other=0.0)
            f = tile_f(hiding, base, scale, asking, True)
            grown = tl.load(grad_memory + batch * queries + row, mask=row < queries, other=0.0)
            counted = tl.where(f <= tau, grown[None, :], 0.0)
            if not clear:
                visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, True)
                counted = tl.where(visible, counted, 0.0)
            ds += sum_later(counted, asking, True)
            df += tl.sum(counted, 1)
        ds = tl.where(hiding >= 0, ds, 0.0)
        keying = product(ds.to(asking.dtype), asking, keying)
    tl.store(dstate + selector * keys + j, df, mask=j < keys)
    part = selector * (chunks + 1) + chunks
    store_rows(dselector_k + part * keys * DS, j, keys, keying * scale, DS, WDS)


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
    asking = load_rows(selector_q + selector * queries * DS, row, queries, DS, WDS)
    asked = tl.zeros((ROWS, WDS), tl.float32)
    for n in range(tl.load(count + place)):
        key_block, clear = visit(order, n)
        j = key_block * COLUMNS + tl.arange(0, COLUMNS)
        keyed = load_rows(selector_k, j, keys, DS, WDS)
        hiding = hiding_logits(
            asking, keyed, i, j, clear, segments, first, row_stride, batch, keys, WINDOW, False,
        )  # fmt: skip
        df = tl.load(later + j, mask=j < keys, other=0.0)
        ds = tl.zeros((ROWS, COLUMNS), tl.float32) + df[None, :]
        if tau is not None:
            base = tl.load(bases + j, mask=j < keys, other=0.0)
            f = tile_f(hiding, base, scale, asking, False)
            grown = tl.load(grad_memory + batch * queries + row, mask=row < queries, other=0.0)
            counted = tl.where(f <= tau, grown[:, None], 0.0)
            if not clear:
                visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, False)
                counted = tl.where(visible, counted, 0.0)
            ds += sum_later(counted, asking, False)
        ds = tl.where(hiding >= 0, ds, 0.0)
        asked = product(ds.to(keyed.dtype), keyed, asked)
    part = selector * (chunks + 1) + chunks
    store_rows(dselector_q + part * queries * DS, row, queries, asked * scale, DS, WDS)
