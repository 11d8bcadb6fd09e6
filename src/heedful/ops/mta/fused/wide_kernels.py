"""From keys to wide rows and the logits of the band, and back from their gradients.

The definitions are those of wide.py, with one part per row of the convolution's kernel: part r of
key j is sum_c theta[r, c] k_{j-h+c}, and it meets query i-(cq-1)+r. Everything here is linear in T.
`theta` is fp32 `[heads, ROWS, COLUMNS]`; the heads of a launch start at `first_head`. Each sum of
the backward belongs to one program alone, so that runs repeat bit for bit.
"""

import triton
import triton.language as tl

from heedful.ops.mta.fused.tile import gpu_kernel, load_columns, load_parts, load_segments


@triton.jit
def distance_of(at, NEAR: tl.constexpr, FAR: tl.constexpr):
    """The distance in column `at` of a band: a run from 0 on, then one from `FAR` on."""
    return tl.where(at < NEAR, at, at - NEAR + FAR)


@triton.jit
def band_weights(
    theta, r, e, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr, BAND: tl.constexpr, NEAR_SCORES: tl.constexpr, FAR_SCORES: tl.constexpr,
    SCORES: tl.constexpr,
):  # fmt: skip
    """theta[r, c], 0 outside, for column e of the scores of row i' and column d of row i's band.

    With i' = i-(cq-1)+r: key i'-e stands in column c = i'-e - (i-d) + h of the kernel around i-d.
    """
    c = distance_of(d, NEAR, FAR) - distance_of(e, NEAR_SCORES, FAR_SCORES)
    c += COLUMNS // 2 - (ROWS - 1 - r)
    inside = (e < SCORES) & (d < BAND) & (c >= 0) & (c < COLUMNS)
    return tl.load(theta + r * COLUMNS + c, mask=inside, other=0.0)


@gpu_kernel
def filter_kernel(
    k, theta, segments, wide,
    first_head, heads, group, keys, segment_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    SEGMENTS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The wide rows of `BN` keys for one query head: `wide` `[head, keys, ROWS, DIM]`."""
    local = tl.program_id(1).to(tl.int64)
    head = first_head + local
    segments += head // heads * segment_stride
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    own = load_segments(segments, j, j < keys, SEGMENTS)
    k += head // group * keys * DIM
    theta += head % heads * ROWS * COLUMNS
    parts = ()
    for _ in tl.static_range(ROWS):
        parts = parts + (tl.zeros([BN, D], tl.float32),)
    for c in range(COLUMNS):
        source = j - COLUMNS // 2 + c
        valid = (source >= 0) & (source < keys)
        valid &= load_segments(segments, source, valid, SEGMENTS) == own
        x = load_columns(k, source, valid, DIM, 0, D).to(tl.float32)
        more = ()
        for r in tl.static_range(ROWS):
            more = more + (parts[r] + tl.load(theta + r * COLUMNS + c) * x,)
        parts = more
    column = tl.arange(0, D)
    wide += local * keys * ROWS * DIM
    for r in tl.static_range(ROWS):
        tl.store(
            wide + (j[:, None] * ROWS + r) * DIM + column[None, :],
            parts[r].to(wide.dtype.element_ty), (j < keys)[:, None] & (column < DIM)[None, :],
        )  # fmt: skip


@gpu_kernel
def scores_kernel(
    q, k, segments, scores,
    first_head, heads, group, queries, keys, segment_stride, scale,
    DIM: tl.constexpr, D: tl.constexpr, SEGMENTS: tl.constexpr, NEAR_SCORES: tl.constexpr,
    FAR_SCORES: tl.constexpr, SCORES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Z[i, i-e] of `BM` queries at the distances e of the band, `[head, SCORES, queries]`."""
    local = tl.program_id(1).to(tl.int64)
    head = first_head + local
    segments += head // heads * segment_stride
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    i = n + keys - queries
    own = load_segments(segments, i, n < queries, SEGMENTS)
    k += head // group * keys * DIM
    scores += local * SCORES * queries
    x = load_columns(q + head * queries * DIM, n, n < queries, DIM, 0, D).to(tl.float32)
    for e in range(SCORES):
        j = i - distance_of(e, NEAR_SCORES, FAR_SCORES)
        valid = (n < queries) & (j >= 0)
        valid &= load_segments(segments, j, valid, SEGMENTS) == own
        y = load_columns(k, j, valid, DIM, 0, D).to(tl.float32)
        tl.store(scores + e * queries + n, tl.sum(x * y, 1) * scale, n < queries)


@gpu_kernel
def band_kernel(
    scores, theta, parts, band,
    first_head, heads, queries, part_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr, BAND: tl.constexpr, BAND_PADDED: tl.constexpr, NEAR_SCORES: tl.constexpr,
    FAR_SCORES: tl.constexpr, SCORES: tl.constexpr, SCORES_PADDED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Logits of `BM` queries on the band, `[head, queries, BAND]`, from Z at its distances e.

    C[i, i-d] = sum_{r, e} theta[r, c] Z[i', i'-e], i' and c as in `band_weights`.
    """
    local = tl.program_id(1).to(tl.int64)
    head = first_head + local
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    bits = load_parts(parts + head // heads * part_stride, n, queries, ROWS, SEGMENTS)
    theta += head % heads * ROWS * COLUMNS
    scores += local * SCORES * queries
    e, d = tl.arange(0, SCORES_PADDED), tl.arange(0, BAND_PADDED)
    total = tl.zeros([BM, BAND_PADDED], tl.float32)
    for r in range(ROWS):
        exists = ((bits >> r) & 1) != 0
        z = tl.load(
            scores + e[None, :] * queries + (n - (ROWS - 1 - r))[:, None],
            mask=exists[:, None] & (e < SCORES)[None, :], other=0.0,
        )  # fmt: skip
        weights = band_weights(
            theta, r, e[:, None], d[None, :], ROWS, COLUMNS, NEAR, FAR, BAND, NEAR_SCORES,
            FAR_SCORES, SCORES,
        )  # fmt: skip
        total = tl.dot(z, weights, total, input_precision="ieee")
    at = band + (local * queries + n[:, None]) * BAND + d[None, :]
    tl.store(at, total, (n < queries)[:, None] & (d < BAND)[None, :])


@gpu_kernel
def scores_grad_kernel(
    dband, theta, parts, dscores,
    first_head, heads, queries, part_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SEGMENTS: tl.constexpr, NEAR: tl.constexpr,
    FAR: tl.constexpr, BAND: tl.constexpr, BAND_PADDED: tl.constexpr, NEAR_SCORES: tl.constexpr,
    FAR_SCORES: tl.constexpr, SCORES: tl.constexpr, SCORES_PADDED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dZ at the band's distances e, `[head, SCORES, queries]`: the adjoint of `band_kernel`.

    dZ[i', i'-e] = sum_{r, d} theta[r, c] dC[i, i-d] with i = i'+(cq-1)-r.
    """
    local = tl.program_id(1).to(tl.int64)
    head = first_head + local
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    parts += head // heads * part_stride
    theta += head % heads * ROWS * COLUMNS
    e, d = tl.arange(0, SCORES_PADDED), tl.arange(0, BAND_PADDED)
    total = tl.zeros([BM, SCORES_PADDED], tl.float32)
    for r in range(ROWS):
        on = n + ROWS - 1 - r
        exists = ((load_parts(parts, on, queries, ROWS, SEGMENTS) >> r) & 1) != 0
        slope = tl.load(
            dband + (local * queries + on[:, None]) * BAND + d[None, :],
            mask=exists[:, None] & (d < BAND)[None, :], other=0.0,
        )  # fmt: skip
        weights = band_weights(
            theta, r, e[None, :], d[:, None], ROWS, COLUMNS, NEAR, FAR, BAND, NEAR_SCORES,
            FAR_SCORES, SCORES,
        )  # fmt: skip
        total = tl.dot(slope, weights, total, input_precision="ieee")
    at = dscores + (local * SCORES + e[None, :]) * queries + n[:, None]
    tl.store(at, total, (n < queries)[:, None] & (e < SCORES)[None, :])


@gpu_kernel
def fold_queries_kernel(
    wide, dscores, k, segments, parts, dq,
    first_head, heads, group, queries, keys, segment_stride, part_stride, scale,
    ROWS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, SEGMENTS: tl.constexpr,
    NEAR_SCORES: tl.constexpr, FAR_SCORES: tl.constexpr, SCORES: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dq_i = sum_r (part r of the wide row i+(cq-1)-r) + scale sum_e dZ[i, i-e] k_{i-e}."""
    local = tl.program_id(1).to(tl.int64)
    head = first_head + local
    segments += head // heads * segment_stride
    parts += head // heads * part_stride
    n = tl.program_id(0) * BM + tl.arange(0, BM)
    i = n + keys - queries
    own = load_segments(segments, i, n < queries, SEGMENTS)
    k += head // group * keys * DIM
    dscores += local * SCORES * queries
    wide += local * queries * ROWS * DIM
    total = tl.zeros([BM, D], tl.float32)
    for e in range(SCORES):
        j = i - distance_of(e, NEAR_SCORES, FAR_SCORES)
        valid = (n < queries) & (j >= 0)
        valid &= load_segments(segments, j, valid, SEGMENTS) == own
        slope = tl.load(dscores + e * queries + n, mask=valid, other=0.0)
        total += slope[:, None] * load_columns(k, j, valid, DIM, 0, D).to(tl.float32)
    total *= scale
    for r in range(ROWS):
        on = n + ROWS - 1 - r
        exists = (load_parts(parts, on, queries, ROWS, SEGMENTS) >> r) & 1
        total += load_columns(wide, on * ROWS + r, exists != 0, DIM, 0, D)
    column = tl.arange(0, D)
    tl.store(
        dq + (head * queries + n[:, None]) * DIM + column[None, :],
        total.to(dq.dtype.element_ty), (n < queries)[:, None] & (column < DIM)[None, :],
    )  # fmt: skip


@gpu_kernel
def fold_keys_kernel(
    wide, dscores, q, theta, segments, dk,
    first_head, heads, group, queries, keys, segment_stride, scale,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
    SEGMENTS: tl.constexpr, NEAR_SCORES: tl.constexpr, FAR_SCORES: tl.constexpr,
    SCORES: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dk_j = sum_{r, c} theta[r, c] (part r of wide row j+h-c) + scale sum_e dZ[j+e, j] q_{j+e}.

    Summed over the query heads of one key head.
    """
    shared = tl.program_id(1).to(tl.int64)
    first = first_head + shared * group
    segments += first // heads * segment_stride
    j = tl.program_id(0) * BN + tl.arange(0, BN)
    own = load_segments(segments, j, j < keys, SEGMENTS)
    total = tl.zeros([BN, D], tl.float32)
    for member in range(group):
        local = shared * group + member
        head = first_head + local
        for e in range(SCORES):
            i = j + distance_of(e, NEAR_SCORES, FAR_SCORES)
            n = i - keys + queries
            valid = (n >= 0) & (i < keys)
            valid &= load_segments(segments, i, valid, SEGMENTS) == own
            at = dscores + (local * SCORES + e) * queries + n
            slope = tl.load(at, mask=valid, other=0.0) * scale
            x = load_columns(q + head * queries * DIM, n, valid, DIM, 0, D)
            total += slope[:, None] * x.to(tl.float32)
        for c in range(COLUMNS):
            target = j + COLUMNS // 2 - c
            valid = (target >= 0) & (target < keys)
            valid &= load_segments(segments, target, valid, SEGMENTS) == own
            for r in range(ROWS):
                weight = tl.load(theta + (head % heads * ROWS + r) * COLUMNS + c)
                x = load_columns(
                    wide + local * keys * ROWS * DIM, target * ROWS + r, valid, DIM, 0, D
                )
                total += weight * x
    column = tl.arange(0, D)
    tl.store(
        dk + (first // group * keys + j[:, None]) * DIM + column[None, :],
        total.to(dk.dtype.element_ty), (j < keys)[:, None] & (column < DIM)[None, :],
    )  # fmt: skip


@gpu_kernel
def theta_grad_kernel(
    wide, dband, k, scores, segments, parts, dtheta,
    first_head, heads, group, queries, keys, segment_stride, part_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr,
    SEGMENTS: tl.constexpr, NEAR: tl.constexpr, FAR: tl.constexpr, BAND: tl.constexpr,
    BAND_PADDED: tl.constexpr, NEAR_SCORES: tl.constexpr, FAR_SCORES: tl.constexpr,
    SCORES: tl.constexpr, SCORES_PADDED: tl.constexpr, BN: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Row r of a head's gradient, from `TOKENS` tokens: `[third grid axis, head, ROWS, COLUMNS]`.

    dtheta[r, c] = sum_j (part r of wide row j) . k_{j-h+c} + sum_{i, d} dC[i, i-d] Z[i', j-h+c]
    with i' = i-(cq-1)+r, j = i-d. Both are sums along diagonals of matrix products over tokens,
    taken once at the end.
    """
    r = tl.program_id(0)
    local = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    head = first_head + local
    back, offset = ROWS - 1 - r, keys - queries
    segments += head // heads * segment_stride
    parts += head // heads * part_stride
    k += head // group * keys * DIM
    wide += local * keys * ROWS * DIM
    dband += local * queries * BAND
    scores += local * SCORES * queries
    from_token = split * TOKENS
    to_token = tl.minimum(from_token + TOKENS, keys)

    # Tokens j by the keys that they reach, which start at the first token's j - h.
    products = tl.zeros([BN, 2 * BN], tl.float32)
    for token in range(from_token, to_token, BN):
        j = token + tl.arange(0, BN)
        source = token - COLUMNS // 2 + tl.arange(0, 2 * BN)
        valid = (source >= 0) & (source < keys)
        product = tl.zeros([BN, 2 * BN], tl.float32)
        for column in range(0, DIM, 32):
            x = load_columns(wide, j * ROWS + r, j < to_token, DIM, column, 32)
            y = load_columns(k, source, valid, DIM, column, 32).to(tl.float32)
            product = tl.dot(x, tl.trans(y), product, input_precision="ieee")
        if SEGMENTS:
            own = load_segments(segments, j, j < keys, SEGMENTS)
            of_source = load_segments(segments, source, valid, SEGMENTS)
            product = tl.where(own[:, None] == of_source[None, :], product, 0.0)
        products += product
    met = tl.arange(0, 2 * BN)[None, :] - tl.arange(0, BN)[:, None]  # c

    e, d = tl.arange(0, SCORES_PADDED), tl.arange(0, BAND_PADDED)
    of_band = tl.zeros([SCORES_PADDED, BAND_PADDED], tl.float32)
    if BAND > 0:
        for token in range(tl.maximum(from_token, offset), to_token, BN):
            i = token + tl.arange(0, BN)
            n = i - offset
            exists = ((load_parts(parts, n, to_token - offset, ROWS, SEGMENTS) >> r) & 1) != 0
            z = tl.load(
                scores + e[:, None] * queries + (n - back)[None, :],
                mask=exists[None, :] & (e < SCORES)[:, None], other=0.0,
            )  # fmt: skip
            slope = tl.load(
                dband + n[:, None] * BAND + d[None, :],
                mask=exists[:, None] & (d < BAND)[None, :], other=0.0,
            )  # fmt: skip
            of_band = tl.dot(z, slope, of_band, input_precision="ieee")
    met_on_band = distance_of(d, NEAR, FAR)[None, :] - back + COLUMNS // 2
    met_on_band = met_on_band - distance_of(e, NEAR_SCORES, FAR_SCORES)[:, None]  # c

    dtheta += ((split * tl.num_programs(1) + local) * ROWS + r) * COLUMNS
    for c in range(COLUMNS):
        along = tl.sum(tl.sum(tl.where(met == c, products, 0.0), 1), 0)
        along += tl.sum(tl.sum(tl.where(met_on_band == c, of_band, 0.0), 1), 0)
        tl.store(dtheta + c, along)
