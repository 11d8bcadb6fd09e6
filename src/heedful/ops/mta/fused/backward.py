"""Flash attention with wide heads and a band of given logits: the backward kernels.

For some rows of the map at a time, P and dC = P (dP - delta), with dP = dO V^T and delta =
rowsum(dO O), are computed once and laid down in the input's precision; then
dV = P^T dO, dK = dC^T Q and dQ = dC K, with wide rows, are plain matrix products over them. For
heads six times as wide, that takes a fifth fewer operations than recomputing P for dK and for dQ,
as FlashAttention does for narrow ones, and no sums of wide rows have to fit into registers.

These rows lie as `[heads, map_rows, map_keys]`. Of a row block only the tiles that meet its span of
keys are written, and only they are read.
"""

import triton
import triton.language as tl

from heedful.ops.mta.fused.tile import (
    LOG2E,
    band_place,
    gpu_kernel,
    key_span,
    load_columns,
    load_parts,
    load_segments,
    load_wide_queries,
    mask_logits,
    query_span,
    wide_product,
)


@triton.jit
def tiles_of(low, high, BN: tl.constexpr):
    """The span of keys that whole tiles around `low .. high` cover; empty if that is."""
    return low // BN * BN, tl.where(high > low, tl.cdiv(high, BN) * BN, 0)


@gpu_kernel
def map_kernel(
    q, k, v, band, segments, parts, spans, grad, lse, delta, p_map, dc_map, dband,
    first_head, heads, group, value_heads, queries, keys, segment_stride, part_stride, span_stride,
    scale, first_block, map_rows, map_keys,
    OWN_KEYS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILES: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, BAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile of P and of dC without the band (there 0); dC on the band goes to `dband`.

    `dband` is fp32 `[head, queries, BAND]`; entries with a weight are written. The map's rows start
    at row block `first_block`. Other arguments as in `forward_kernel`.
    """
    block = first_block + tl.program_id(1)
    local = tl.program_id(2).to(tl.int64)
    head = first_head + local
    batch, offset = head // heads, keys - queries
    first = block * BM + offset
    low, high = key_span(
        spans + batch * span_stride, block, first, keys, BM, CAUSAL, WINDOW, SEGMENTS
    )
    key = tl.program_id(0) * BN
    if (key < high) & (key + BN > low):
        n, j = block * BM + tl.arange(0, BM), key + tl.arange(0, BN)
        i = n + offset
        segments += batch * segment_stride
        q += head * queries * DIM
        k += (local if OWN_KEYS else head // group) * keys * PARTS * DIM
        v += (batch * value_heads + head % heads // group % value_heads) * keys * VALUE_DIM
        band += local * queries * BAND
        bits = load_parts(parts + batch * part_stride, n, queries, PARTS, SEGMENTS)
        x = wide_product(q, n, bits, k, j, keys, PARTS, DIM, TILES, TILE, BM, BN)
        x *= scale * LOG2E
        segment_i = load_segments(segments, i, n < queries, SEGMENTS)
        segment_j = load_segments(segments, j, j < keys, SEGMENTS)
        inside = key + BN <= keys
        if CAUSAL:
            inside &= key + BN - 1 <= first - NEAR
        if WINDOW > 0:
            inside &= first + BM - 1 - key < FAR
        if inside:
            x = mask_logits(x, i, j, segment_i, segment_j, keys, CAUSAL, WINDOW, SEGMENTS, False)
        else:
            if BAND > 0:
                on_band, at = band_place(i, j, offset, keys, NEAR, FAR, BAND)
                x = tl.where(on_band, tl.load(band + at, mask=on_band, other=0.0) * LOG2E, x)
            x = mask_logits(x, i, j, segment_i, segment_j, keys, CAUSAL, WINDOW, SEGMENTS, True)
        row_lse = tl.load(lse + head * queries + n, mask=n < queries, other=float("inf"))
        p = tl.exp2(x - row_lse[:, None])

        grad += head * queries * VALUE_DIM
        one = tl.where(n < queries, 1, 0)
        dp = wide_product(grad, n, one, v, j, keys, 1, VALUE_DIM, VALUE_TILES, TILE, BM, BN)
        row_delta = tl.load(delta + head * queries + n, mask=n < queries, other=0.0)
        # With all weight on one key there is no slope, where rounding would leave one.
        dc = tl.where(p == 1.0, 0.0, p * (dp - row_delta[:, None]))
        if BAND > 0:  # noqa: SIM102 (one is known to the compiler, the other is not)
            if not inside:
                on_band, at = band_place(i, j, offset, keys, NEAR, FAR, BAND)
                on_band &= p > 0
                tl.store(dband + local * queries * BAND + at, dc, on_band)
                dc = tl.where(on_band, 0.0, dc)

        row = (local * map_rows + tl.program_id(1) * BM + tl.arange(0, BM)) * map_keys
        at = row[:, None] + j[None, :]
        kept = (n < queries)[:, None]
        tl.store(p_map + at, p.to(p_map.dtype.element_ty), kept)
        tl.store(dc_map + at, dc.to(dc_map.dtype.element_ty), kept)


@gpu_kernel
def queries_kernel(
    k, dc_map, spans, dq,
    first_head, heads, group, queries, keys, span_stride, scale, first_block, map_rows, map_keys,
    OWN_KEYS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """dQ = scale dC K for `TILE` columns of `BM` wide rows, `[head, queries, WIDTH]` in fp32."""
    WIDTH: tl.constexpr = PARTS * DIM
    block = first_block + tl.program_id(1)
    local = tl.program_id(2).to(tl.int64)
    head = first_head + local
    batch = head // heads
    low, high = key_span(
        spans + batch * span_stride, block, block * BM + keys - queries, keys, BM, CAUSAL, WINDOW,
        SEGMENTS,
    )  # fmt: skip
    low, high = tiles_of(low, high, BN)
    k += (local if OWN_KEYS else head // group) * keys * WIDTH
    n = block * BM + tl.arange(0, BM)
    row = (local * map_rows + tl.program_id(1) * BM + tl.arange(0, BM)) * map_keys
    total = tl.zeros([BM, TILE], tl.float32)
    for key in range(low, high, STEP):
        j = key + tl.arange(0, STEP)
        dc = tl.load(dc_map + row[:, None] + j[None, :], mask=(n < queries)[:, None], other=0.0)
        rows_k = load_columns(k, j, j < keys, WIDTH, tl.program_id(0) * TILE, TILE)
        total = tl.dot(dc, rows_k, total, input_precision="ieee")
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at = (local * queries + n[:, None]) * WIDTH + column[None, :]
    tl.store(dq + at, total * scale, (n < queries)[:, None] & (column < WIDTH)[None, :])


@gpu_kernel
def keys_kernel(
    x, x_map, parts, spans, query_spans, total,
    first_head, heads, queries, keys, part_stride, span_stride, query_span_stride, scale,
    first_block, last_block, map_rows, map_keys,
    PARTS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Adds scale (map^T X) for `BN` keys and `TILE` columns to `total`, `[head, keys, WIDTH]`.

    X are wide rows of queries (dK, with the map of dC) or those of dO, of one part (dV, with P's).
    Row blocks `first_block .. last_block-1` of `BM` queries lie in the map.
    """
    WIDTH: tl.constexpr = PARTS * DIM
    block = tl.program_id(1)
    local = tl.program_id(2).to(tl.int64)
    head = first_head + local
    batch, offset = head // heads, keys - queries
    low, high = query_span(
        query_spans + batch * query_span_stride, block, block * BN, queries, offset, BN, CAUSAL,
        WINDOW, SEGMENTS,
    )  # fmt: skip
    low = tl.maximum(low, first_block * BM) // STEP * STEP
    high = tl.minimum(high, last_block * BM)
    j = block * BN + tl.arange(0, BN)
    x += head * queries * DIM
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    product = tl.zeros([BN, TILE], tl.float32)
    for query in range(low, high, STEP):
        n = query + tl.arange(0, STEP)
        of_block = query // BM
        from_key, to_key = key_span(
            spans + batch * span_stride, of_block, of_block * BM + offset, keys, BM, CAUSAL, WINDOW,
            SEGMENTS,
        )  # fmt: skip
        from_key, to_key = tiles_of(from_key, to_key, BN)
        written = (n < queries)[:, None] & ((j >= from_key) & (j < to_key))[None, :]
        row = (local * map_rows + n - first_block * BM) * map_keys
        weights = tl.load(x_map + row[:, None] + j[None, :], mask=written, other=0.0)
        if PARTS == 1:
            rows_x = load_columns(x, n, n < queries, DIM, tl.program_id(0) * TILE, TILE)
        else:
            bits = load_parts(parts + batch * part_stride, n, queries, PARTS, SEGMENTS)
            rows_x = load_wide_queries(x, n, bits, PARTS, DIM, tl.program_id(0) * TILE, TILE)
        product = tl.dot(tl.trans(weights), rows_x, product, input_precision="ieee")
    at = total + (local * keys + j[:, None]) * WIDTH + column[None, :]
    valid = (j < keys)[:, None] & (column < WIDTH)[None, :]
    if high > low:
        tl.store(at, tl.load(at, mask=valid, other=0.0) + product * scale, valid)
