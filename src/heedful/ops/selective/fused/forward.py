"""Forward kernels of selective attention; the host side is flash.py.

`accumulate_kernel` finds F at the first query of every block, one number per key. From there each
tile of `attend_kernel` and `remember_kernel` finds its own F, by adding what the earlier queries of
its block mask. Which tiles a program visits, and in which order, `visits_kernel` lists from what
`survey_kernel` saw.
"""

import triton
import triton.language as tl

from heedful.ops.selective.fused.tile import (
    LOG2E,
    can_mask,
    load_rows,
    matmul,
    next_keys,
    next_queries,
    of_head,
    own_queries,
    own_selector,
    store_rows,
    tile_f,
    tile_penalty,
    tile_visible,
)


@triton.jit
def survey_kernel(
    segments, first, row_stride, tiles, queries, keys,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Classify each tile: 0 nothing visible, 1 something, 2 it is clear: no entry to mask.

    Programs (key block, query block, row of `segments`).
    """
    batch = tl.program_id(2)
    i = keys - queries + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, False)
    allowed = can_mask(visible, i, j, first, row_stride, batch, keys, False)
    some = tl.max(tl.max(visible.to(tl.int32), 1), 0)
    every = tl.min(tl.min(allowed.to(tl.int32), 1), 0)
    at = (batch * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(tiles + at, (some + every).to(tl.int8))


@triton.jit(do_not_specialize=["size", "by_batch", "by_selector", "by_row", "by_tile"])
def visits_kernel(
    tiles, order, count, size, by_batch, by_selector, by_row, by_tile, WIDTH: tl.constexpr
):
    """Of a row of tiles those that hold something, the last first, as 2 n, or 2 n + 1 if clear.

    Programs (row, selector, batch); `by_...` are the strides of `tiles`, `size` are in a row.
    """
    row, selector, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tl.arange(0, WIDTH)
    tiles += batch.to(tl.int64) * by_batch + selector * by_selector + row * by_row
    holds = tl.load(tiles + n * by_tile, mask=n < size, other=0).to(tl.int32)
    some = (holds > 0).to(tl.int32)
    number = tl.sum(some, 0)
    place = ((batch * tl.num_programs(1) + selector) * tl.num_programs(0) + row).to(tl.int64)
    at = order + place * size + number - tl.cumsum(some, 0)
    tl.store(at, 2 * n + (holds == 2).to(tl.int32), mask=holds > 0)
    tl.store(count + place, number)


@triton.jit
def accumulate_kernel(
    selector_q, selector_k, segments, first, row_stride, state, order, count, bases, last,
    scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of keys, all queries: F after the last, and before every STEP of them.

    `bases[step, j] = state[j] + sum of S[p, j] over the queries p before the step`, written for the
    query blocks that see a key of the block. Programs (key block, selector, batch) visit query
    blocks from first to last.
    """
    batch, selector = own_selector()
    blocks = tl.cdiv(queries, ROWS)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sel_k = load_rows(selector_k + selector * keys * DS, j, keys, DS, WDS)
    selector_q += selector * queries * DS
    STEPS: tl.constexpr = ROWS // STEP
    bases += selector * blocks * STEPS * keys
    place = selector * tl.num_programs(0) + tl.program_id(0)
    order += place * blocks
    visits = tl.load(count + place)

    f = tl.zeros((COLUMNS,), tl.float32)
    if state is not None:
        f += tl.load(state + selector * keys + j, mask=j < keys, other=0.0)
    within = tl.arange(0, ROWS)
    for n in range(visits):
        block, _, _, _, _, masking = next_queries(
            order, visits - 1 - n, selector_q, sel_k, j, segments, first, row_stride, batch,
            queries, keys, DS, WDS, ROWS, WINDOW,
        )  # fmt: skip
        s = tl.maximum(masking, 0.0)
        at = block.to(tl.int64) * STEPS * keys + j
        for step in tl.static_range(STEPS):
            tl.store(bases + at + step * keys, f, mask=j < keys)
            mine = s if STEPS == 1 else tl.where((within // STEP == step)[None, :], s, 0.0)
            f += tl.sum(mine, 1) * scale
    tl.store(last + selector * keys + j, f, mask=j < keys)


@triton.jit
def attend_kernel(
    selector_q, selector_k, segments, first, row_stride, q, k, v, bases, order, count, out,
    remainder, lse,
    scale, queries, keys, heads,
    PER_SELECTOR: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr,
    D: tl.constexpr, WD: tl.constexpr, DV: tl.constexpr, WDV: tl.constexpr, DS: tl.constexpr,
    WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Flash attention over `softmax(q k^T scale - F)` for HEADS heads that one selector serves.

    Programs (query block, chunk of HEADS heads, batch). A tile of F is found once and serves all
    HEADS; SHARE of these share a key head. Keys are visited from the diagonal backwards, so that
    the maximum of a row is never below the logit of its own key.

    Stores the output, what it lost by rounding (`remainder`, for dO . O in the backward, or None if
    there is none), and the softmax's log-sum-exp in base two (0 for queries that see nothing).
    """
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)  # the longest rows first
    head, batch = tl.program_id(1) * HEADS, tl.program_id(2)
    selector, head_q, head_k = of_head(batch, head, heads, PER_SELECTOR, GROUP)
    q += head_q * queries * D
    k += head_k * keys * D
    v += head_k * keys * DV
    out += head_q * queries * DV
    if remainder is not None:
        remainder += head_q * queries * DV
    lse += head_q * queries
    selector_k += selector * keys * DS
    place = selector * blocks + block
    bases += place * keys
    order += place * tl.cdiv(keys, COLUMNS)

    row, i, sel_q = own_queries(selector_q, selector, block, queries, keys, DS, WDS, ROWS)
    qs, tops, totals, accs = (), (), (), ()
    for h in tl.static_range(HEADS):
        qs += (load_rows(q + h * queries * D, row, queries, D, WD),)
        tops += (tl.full((ROWS,), float("-inf"), tl.float32),)
        totals += (tl.zeros((ROWS,), tl.float32),)
        accs += (tl.zeros((ROWS, WDV), tl.float32),)

    for n in range(tl.load(count + place)):
        j, clear, _, masking = next_keys(
            order, n, selector_k, sel_q, i, segments, first, row_stride, batch, keys, DS, WDS,
            COLUMNS, WINDOW,
        )  # fmt: skip
        base = tl.load(bases + j, mask=j < keys, other=0.0)
        penalty = tile_penalty(
            masking, base, scale, sel_q, i, j, clear, segments, row_stride, batch, keys, WINDOW,
            False,
        )  # fmt: skip

        new_tops, new_totals, new_accs = (), (), ()
        for h in tl.static_range(HEADS):
            if h % SHARE == 0:
                key = load_rows(k + h // SHARE * keys * D, j, keys, D, WD)
                value = load_rows(v + h // SHARE * keys * DV, j, keys, DV, WDV)
            logits = matmul(qs[h], tl.trans(key)) * (scale * LOG2E) - penalty
            top = tl.maximum(tops[h], tl.max(logits, 1))
            shift = tl.where(top == float("-inf"), 0.0, top)  # nothing seen so far
            p = tl.exp2(logits - shift[:, None])
            fade = tl.exp2(tops[h] - shift)
            new_tops += (top,)
            new_totals += (totals[h] * fade + tl.sum(p, 1),)
            new_accs += (matmul(p.to(value.dtype), value, accs[h] * fade[:, None]),)
        tops, totals, accs = new_tops, new_totals, new_accs

    for h in tl.static_range(HEADS):
        denominator = tl.where(totals[h] == 0, 1.0, totals[h])
        result = accs[h] / denominator[:, None]
        store_rows(out + h * queries * DV, row, queries, result, DV, WDV)
        if remainder is not None:
            result -= result.to(out.dtype.element_ty).to(tl.float32)
            store_rows(remainder + h * queries * DV, row, queries, result, DV, WDV)
        log_sum = tl.where(totals[h] == 0, 0.0, tops[h] + tl.log2(denominator))
        tl.store(lse + h * queries + row, log_sum, mask=row < queries)


@triton.jit
def remember_kernel(
    selector_q, selector_k, segments, first, row_stride, bases, order, count, memory,
    tau, scale, queries, keys,
    DS: tl.constexpr, WDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Sum of min(F, tau) over the visible keys of each query: `[B, Hs, Tq]`.

    Programs (query block, selector, batch).
    """
    blocks = tl.num_programs(0)
    block = blocks - 1 - tl.program_id(0)
    batch, selector = own_selector()
    place = selector * blocks + block
    bases += place * keys
    order += place * tl.cdiv(keys, COLUMNS)
    selector_k += selector * keys * DS
    row, i, sel_q = own_queries(selector_q, selector, block, queries, keys, DS, WDS, ROWS)
    sums = tl.zeros((ROWS,), tl.float32)
    for n in range(tl.load(count + place)):
        j, clear, _, masking = next_keys(
            order, n, selector_k, sel_q, i, segments, first, row_stride, batch, keys, DS, WDS,
            COLUMNS, WINDOW,
        )  # fmt: skip
        base = tl.load(bases + j, mask=j < keys, other=0.0)
        terms = tl.minimum(tile_f(masking, base, scale, sel_q, False), tau)
        if not clear:
            visible = tile_visible(i, j, segments, row_stride, batch, keys, WINDOW, False)
            terms = tl.where(visible, terms, 0.0)
        sums += tl.sum(terms, 1)
    tl.store(memory + selector * queries + row, sums, mask=row < queries)
