"""Flash attention with wide heads and a band of given logits: the forward kernel."""

import triton.language as tl

from heedful.ops.mta.fused.tile import (
    LOG2E,
    band_place,
    gpu_kernel,
    inner_keys,
    key_span,
    load_columns,
    load_parts,
    load_segments,
    load_wide_queries,
    mask_logits,
    wide_product,
)


@gpu_kernel
def forward_kernel(
    q, k, v, band, segments, parts, spans, out, lse,
    first_head, heads, group, value_heads, queries, keys, segment_stride, part_stride, span_stride,
    scale,
    OWN_KEYS: tl.constexpr, PARTS: tl.constexpr, DIM: tl.constexpr, TILES: tl.constexpr,
    TILE: tl.constexpr, RESIDENT: tl.constexpr, VALUE_DIM: tl.constexpr, DV: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    NEAR: tl.constexpr, FAR: tl.constexpr, BAND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of `BM` queries of one head: O = softmax(C) V and the log-sum-exp of its rows.

    C[i, j] = scale (wide query i . wide key j), or band[i, i-j] where an edge of visibility is near
    (wide.py). `lse` is in units of log 2; +inf for a query that sees nothing, whose output is 0.
    The heads of this launch start at `first_head` (batch and head as one index). With `OWN_KEYS`,
    `k` is `[heads of this launch, keys, WIDTH]`; else the plain keys, shared by groups. `RESIDENT`
    keeps the wide queries in shared memory; very wide ones are fetched again for every key block.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal map's last blocks are the longest
    local = tl.program_id(1).to(tl.int64)
    head = first_head + local
    batch, offset = head // heads, keys - queries
    n = block * BM + tl.arange(0, BM)
    i = n + offset
    segments += batch * segment_stride
    segment = load_segments(segments, i, n < queries, SEGMENTS)
    WIDTH: tl.constexpr = PARTS * DIM
    q += head * queries * DIM
    k += (local if OWN_KEYS else head // group) * keys * WIDTH
    v += (batch * value_heads + head % heads // group % value_heads) * keys * VALUE_DIM
    band += local * queries * BAND

    bits = load_parts(parts + batch * part_stride, n, queries, PARTS, SEGMENTS)
    q_tiles = ()
    if RESIDENT:
        for t in tl.static_range(TILES):
            q_tiles = q_tiles + (load_wide_queries(q, n, bits, PARTS, DIM, t * TILE, TILE),)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DV], tl.float32)
    first = block * BM + offset
    low, high = key_span(
        spans + batch * span_stride, block, first, keys, BM, CAUSAL, WINDOW, SEGMENTS
    )
    start, stop = inner_keys(low, high, first, BM, BN, CAUSAL, WINDOW, NEAR, FAR)
    for run in tl.static_range(3):  # tiles at the window's edge, inside, at the causal edge
        if run != 0 or WINDOW > 0:
            from_key = low if run == 0 else (start if run == 1 else stop)
            to_key = start if run == 0 else (stop if run == 1 else high)
            # At an edge nothing is fetched ahead: the band's tile would need the room.
            for key in tl.range(from_key, to_key, BN, num_stages=STAGES if run == 1 else 1):
                j = key + tl.arange(0, BN)
                if RESIDENT:
                    x = tl.zeros([BM, BN], tl.float32)
                    for t in tl.static_range(TILES):
                        tile = load_columns(k, j, j < keys, WIDTH, t * TILE, TILE)
                        x = tl.dot(q_tiles[t], tl.trans(tile), x, input_precision="ieee")
                else:
                    x = wide_product(q, n, bits, k, j, keys, PARTS, DIM, TILES, TILE, BM, BN)
                x *= scale * LOG2E
                of_keys = load_segments(segments, j, j < keys, SEGMENTS)
                if BAND > 0 and run != 1:
                    on_band, at = band_place(i, j, offset, keys, NEAR, FAR, BAND)
                    x = tl.where(on_band, tl.load(band + at, mask=on_band, other=0.0) * LOG2E, x)
                x = mask_logits(x, i, j, segment, of_keys, keys, CAUSAL, WINDOW, SEGMENTS, run != 1)
                highest = tl.maximum(top, tl.max(x, 1))
                base = tl.where(highest == float("-inf"), 0.0, highest)
                p = tl.exp2(x - base[:, None])
                shrink = tl.exp2(top - base)
                total = total * shrink + tl.sum(p, 1)
                values = load_columns(v, j, j < keys, VALUE_DIM, 0, DV)
                acc = acc * shrink[:, None]
                acc = tl.dot(p.to(values.dtype), values, acc, input_precision="ieee")
                top = highest

    seen = total > 0
    total = tl.where(seen, total, 1.0)
    acc = acc / total[:, None]
    top = tl.where(seen, top + tl.log2(total), float("inf"))
    tl.store(lse + head * queries + n, top, n < queries)
    column = tl.arange(0, DV)
    tl.store(
        out + (head * queries + n[:, None]) * VALUE_DIM + column[None, :],
        acc.to(out.dtype.element_ty), (n < queries)[:, None] & (column < VALUE_DIM)[None, :],
    )  # fmt: skip
