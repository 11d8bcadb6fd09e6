"""Backward kernels of selective attention; the host side is flash.py.

With P the weights, dP = dO v^T and delta_i = sum_j P_ij dP_ij (= dO . O), the logits' gradient is
G = P (dP - delta), as in flash attention. F is taken off the logits of every head, and S[p, j] is a
term of F[i, j] for all i > p:

    dF = -sum over heads of G,    dS[p, j] = sum over i > p of dF[i, j].

The sum over later queries is split where the forward splits F. The first two kernels have G at hand
and handle the later queries of the same block. `key_gradients_kernel` stores the sums of G over its
blocks. From these the last two kernels, which need no heads, handle all that is behind a block.
"""

import triton
import triton.language as tl

from heedful.ops.selective.fused.tile import (
    LOG2E,
    load_rows,
    matmul,
    next_keys,
    next_queries,
    of_head,
    own_queries,
    own_selector,
    store_rows,
    sum_later,
    tile_f,
    tile_penalty,
    tile_visible,
)


@triton.jit
def query_gradients_kernel(
    selector_q, selector_k, segments, first, row_stride, q, k, v, bases, order, count, out,
    remainder, lse, grad, dq, delta, dselector_q,
    scale, queries, keys, heads,
    PER_SELECTOR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, DV: tl.constexpr, WDV: tl.constexpr, DS: tl.constexpr,
    WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """dq and delta of HEADS heads, and their share of the selector's gradient.

    Programs (query block, chunk of HEADS heads, batch), as in `attend_kernel`. `bases` has a row
    for every STEP queries. `dselector_q`: `[B, Hs, chunks + 1, Tq, Ds]`, a part per chunk of heads.
    """
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)  # the longest rows first
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2)
    selector, head_q, head_k = of_head(batch, head, heads, PER_SELECTOR, GROUP)
    q += head_q * queries * D
    dq += head_q * queries * D
    k += head_k * keys * D
    v += head_k * keys * DV
    out += head_q * queries * DV
    remainder += head_q * queries * DV
    grad += head_q * queries * DV
    lse += head_q * queries
    delta += head_q * queries
    selector_k += selector * keys * DS
    place = selector * blocks + block
    order += place * tl.cdiv(keys, COLUMNS)
    bases += place * (ROWS // STEP) * keys

    row, i, sel_q = own_queries(selector_q, selector, block, queries, keys, DS, WDS, ROWS)
    dsel_q = tl.zeros((ROWS, WDS), tl.float32)
    qs, douts, lses, deltas, dqs = (), (), (), (), ()
    for h in tl.static_range(HEADS):
        qs += (load_rows(q + h * queries * D, row, queries, D, WD),)
        dout = load_rows(grad + h * queries * DV, row, queries, DV, WDV)
        result = load_rows(out + h * queries * DV, row, queries, DV, WDV)
        # Added up as dP will be, so that G is exactly zero where a query sees a single key.
        dots = matmul(dout, tl.trans(result))
        if out.dtype.element_ty != tl.float32:
            result = load_rows(remainder + h * queries * DV, row, queries, DV, WDV)
            dots = matmul(dout, tl.trans(result), dots)
        dot = tl.sum(tl.where(row[:, None] == row[None, :], dots, 0.0), 1)
        tl.store(delta + h * queries + row, dot, mask=row < queries)
        douts += (dout,)
        lses += (tl.load(lse + h * queries + row, mask=row < queries, other=0.0),)
        deltas += (dot,)
        dqs += (tl.zeros((ROWS, WD), tl.float32),)

    for n in range(tl.load(count + place)):
        j, clear, sel_k, masking = next_keys(
            order, n, selector_k, sel_q, i, segments, first, row_stride, batch, keys, DS, WDS,
            COLUMNS, WINDOW,
        )  # fmt: skip
        base = tl.load(bases + j, mask=j < keys, other=0.0)
        penalty = tile_penalty(
            masking, base, scale, sel_q, i, j, clear, segments, row_stride, batch, keys, WINDOW,
            False,
        )  # fmt: skip

        g_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
        new_dqs = ()
        for h in tl.static_range(HEADS):
            if h % SHARE == 0:
                key = load_rows(k + h // SHARE * keys * D, j, keys, D, WD)
                value = load_rows(v + h // SHARE * keys * DV, j, keys, DV, WDV)
            logits = matmul(qs[h], tl.trans(key)) * (scale * LOG2E) - penalty
            p = tl.exp2(logits - lses[h][:, None])
            g = p * (matmul(douts[h], tl.trans(value)) - deltas[h][:, None])
            g_sum += g
            new_dqs += (matmul(g.to(key.dtype), key, dqs[h]),)
        dqs = new_dqs
        ds = tl.where(masking >= 0, -sum_later(g_sum, sel_q, False), 0.0)
        dsel_q = matmul(ds.to(sel_k.dtype), sel_k, dsel_q)

    for h in tl.static_range(HEADS):
        store_rows(dq + h * queries * D, row, queries, dqs[h] * scale, D, WD)
    PARTS: tl.constexpr = PER_SELECTOR // HEADS + 1
    part = selector * PARTS + head % PER_SELECTOR // HEADS
    store_rows(dselector_q + part * queries * DS, row, queries, dsel_q * scale, DS, WDS)


@triton.jit(do_not_specialize=["begin", "chunks"])
def key_gradients_kernel(
    selector_q, selector_k, segments, first, row_stride, q, k, v, bases, order, count, lse, delta,
    grad, dk, dv, dselector_k, g_sums,
    begin, chunks, scale, queries, keys, heads,
    PER_SELECTOR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, DV: tl.constexpr, WDV: tl.constexpr, DS: tl.constexpr,
    WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """dk and dv, and the selector's share, of one block of keys and HEADS heads; tiles transposed.

    Programs (key block, selector and one of `chunks` chunks of HEADS heads from `begin` on, batch).
    `dk`, `dv`: `[B, H / SHARE, Tk, .]`, summed over the SHARE heads here and over the rest of a
    group by the host. `bases` has a row for each block; STEPS of these are a block of the other
    kernels. `g_sums`: `[B, Hs, chunks, blocks of the others, Tk]`, sums of G over the queries of a
    block and the heads of a chunk, zero where no program comes by.
    """
    block, key_blocks = tl.program_id(0), tl.num_programs(0)
    batch, nth = tl.program_id(2), tl.program_id(1) % chunks
    head = tl.program_id(1) // chunks * PER_SELECTOR + (begin + nth) * HEADS
    selector, head_q, head_k = of_head(batch, head, heads, PER_SELECTOR, GROUP)
    q += head_q * queries * D
    k += head_k * keys * D
    v += head_k * keys * DV
    dk += head_q // SHARE * keys * D
    dv += head_q // SHARE * keys * DV
    grad += head_q * queries * DV
    lse += head_q * queries
    delta += head_q * queries
    selector_q += selector * queries * DS
    blocks = tl.cdiv(queries, ROWS * STEPS)
    bases += selector * blocks * STEPS * keys
    g_sums += (selector * chunks + nth) * blocks * keys
    place = selector * key_blocks + block
    order += place * tl.cdiv(queries, ROWS)

    j = block * COLUMNS + tl.arange(0, COLUMNS)
    sel_k = load_rows(selector_k + selector * keys * DS, j, keys, DS, WDS)
    dsel_k = tl.zeros((COLUMNS, WDS), tl.float32)
    ks, vs, dks, dvs = (), (), (), ()
    for kv in tl.static_range(HEADS // SHARE):
        ks += (load_rows(k + kv * keys * D, j, keys, D, WD),)
        vs += (load_rows(v + kv * keys * DV, j, keys, DV, WDV),)
        dks += (tl.zeros((COLUMNS, WD), tl.float32),)
        dvs += (tl.zeros((COLUMNS, WDV), tl.float32),)

    behind = tl.zeros((COLUMNS,), tl.float32)  # what the block's steps visited so far have of G
    previous = -1
    for n in range(tl.load(count + place)):
        query_block, row, i, clear, sel_q, masking = next_queries(
            order, n, selector_q, sel_k, j, segments, first, row_stride, batch, queries, keys, DS,
            WDS, ROWS, WINDOW,
        )  # fmt: skip
        base = tl.load(bases + query_block.to(tl.int64) * keys + j, mask=j < keys, other=0.0)
        penalty = tile_penalty(
            masking, base, scale, sel_q, i, j, clear, segments, row_stride, batch, keys, WINDOW,
            True,
        )  # fmt: skip

        g_sum = tl.zeros((COLUMNS, ROWS), tl.float32)
        new_dks, new_dvs = (), ()
        for h in tl.static_range(HEADS):
            if h % SHARE == 0:
                key, value = ks[h // SHARE], vs[h // SHARE]
                dkey, dvalue = dks[h // SHARE], dvs[h // SHARE]
            query = load_rows(q + h * queries * D, row, queries, D, WD)
            dout = load_rows(grad + h * queries * DV, row, queries, DV, WDV)
            log_sum = tl.load(lse + h * queries + row, mask=row < queries, other=0.0)
            dot = tl.load(delta + h * queries + row, mask=row < queries, other=0.0)
            logits = matmul(key, tl.trans(query)) * (scale * LOG2E) - penalty
            p = tl.exp2(logits - log_sum[None, :])
            dvalue = matmul(p.to(dout.dtype), dout, dvalue)
            g = p * (matmul(value, tl.trans(dout)) - dot[None, :])
            dkey = matmul(g.to(query.dtype), query, dkey)
            g_sum += g
            if h % SHARE == SHARE - 1:
                new_dks += (dkey,)
                new_dvs += (dvalue,)
        dks, dvs = new_dks, new_dvs
        whole = query_block // STEPS
        behind = tl.where(whole == previous, behind, 0.0)
        previous = whole
        later = sum_later(g_sum, sel_q, True) + behind[:, None]
        behind += tl.sum(g_sum, 1)
        tl.store(g_sums + whole.to(tl.int64) * keys + j, behind, mask=j < keys)
        ds = tl.where(masking >= 0, -later, 0.0)
        dsel_k = matmul(ds.to(sel_q.dtype), sel_q, dsel_k)

    for kv in tl.static_range(HEADS // SHARE):
        store_rows(dk + kv * keys * D, j, keys, dks[kv] * scale, D, WD)
        store_rows(dv + kv * keys * DV, j, keys, dvs[kv], DV, WDV)
    PARTS: tl.constexpr = PER_SELECTOR // HEADS + 1
    part = selector * PARTS + begin + nth
    store_rows(dselector_k + part * keys * DS, j, keys, dsel_k * scale, DS, WDS)


@triton.jit
def _memory_gradient(
    masking, base, tau, scale, like, grad_memory, row, i, j, clear, segments, row_stride, batch,
    queries, keys,
    WINDOW: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """dF of the memory: the gradient of a query's memory where it sees a key with F <= tau."""
    f = tile_f(masking, base, scale, like, TRANSPOSED)
    per_query = tl.load(grad_memory + batch * queries + row, mask=row < queries, other=0.0)
    per_query = per_query[None, :] if TRANSPOSED else per_query[:, None]
    gradient = tl.where(f <= tau, per_query, 0.0)
    if not clear:
        visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, TRANSPOSED)
        gradient = tl.where(visible, gradient, 0.0)
    return gradient


@triton.jit
def selector_key_gradients_kernel(
    selector_q, selector_k, segments, first, row_stride, bases, g_sums, grad_state, grad_memory,
    order, count, later, dstate, dselector_k,
    tau, chunks, scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The selector's gradient for one block of keys, from later blocks and from the memory.

    Programs (key block, selector, batch) go from the last query block to the first and carry the
    sum of dF over all that is behind; it starts as the outgoing state's gradient and ends as the
    incoming one's. `later[b, j]`: that sum behind block b. `g_sums`: as from
    `key_gradients_kernel`, now over all heads. `grad_memory`: `[B, Tq]`, divided by the number of
    selectors.
    """
    batch, selector = own_selector()
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
        query_block, row, i, clear, sel_q, masking = next_queries(
            order, n, selector_q, sel_k, j, segments, first, row_stride, batch, queries, keys, DS,
            WDS, ROWS, WINDOW,
        )  # fmt: skip
        at = query_block.to(tl.int64) * keys + j
        tl.store(later + at, df, mask=j < keys)
        ds = tl.zeros((COLUMNS, ROWS), tl.float32) + df[:, None]
        df -= tl.load(g_sums + at, mask=j < keys, other=0.0)
        if tau is not None:
            base_at = query_block.to(tl.int64) * STEPS * keys + j
            base = tl.load(bases + base_at, mask=j < keys, other=0.0)
            memory_gradient = _memory_gradient(
                masking, base, tau, scale, sel_q, grad_memory, row, i, j, clear, segments,
                row_stride, batch, queries, keys, WINDOW, True,
            )  # fmt: skip
            ds += sum_later(memory_gradient, sel_q, True)
            df += tl.sum(memory_gradient, 1)
        ds = tl.where(masking >= 0, ds, 0.0)
        dsel_k = matmul(ds.to(sel_q.dtype), sel_q, dsel_k)
    tl.store(dstate + selector * keys + j, df, mask=j < keys)
    part = selector * (chunks + 1) + chunks
    store_rows(dselector_k + part * keys * DS, j, keys, dsel_k * scale, DS, WDS)


@triton.jit
def selector_query_gradients_kernel(
    selector_q, selector_k, segments, first, row_stride, bases, later, grad_memory, order, count,
    dselector_q,
    tau, chunks, scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The same for one block of queries, from the sums `later` of the kernel above."""
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    batch, selector = own_selector()
    place = selector * blocks + block
    order += place * tl.cdiv(keys, COLUMNS)
    later += place * keys
    bases += place * (ROWS // STEP) * keys
    selector_k += selector * keys * DS
    row, i, sel_q = own_queries(selector_q, selector, block, queries, keys, DS, WDS, ROWS)
    dsel_q = tl.zeros((ROWS, WDS), tl.float32)
    for n in range(tl.load(count + place)):
        j, clear, sel_k, masking = next_keys(
            order, n, selector_k, sel_q, i, segments, first, row_stride, batch, keys, DS, WDS,
            COLUMNS, WINDOW,
        )  # fmt: skip
        df = tl.load(later + j, mask=j < keys, other=0.0)
        ds = tl.zeros((ROWS, COLUMNS), tl.float32) + df[None, :]
        if tau is not None:
            base = tl.load(bases + j, mask=j < keys, other=0.0)
            memory_gradient = _memory_gradient(
                masking, base, tau, scale, sel_q, grad_memory, row, i, j, clear, segments,
                row_stride, batch, queries, keys, WINDOW, False,
            )  # fmt: skip
            ds += sum_later(memory_gradient, sel_q, False)
        ds = tl.where(masking >= 0, ds, 0.0)
        dsel_q = matmul(ds.to(sel_k.dtype), sel_k, dsel_q)
    part = selector * (chunks + 1) + chunks
    store_rows(dselector_q + part * queries * DS, row, queries, dsel_q * scale, DS, WDS)
