"""What the flash kernels of multi-token attention read: wide keys and the band's logits.

Definitions as in wide.py, with one part per kernel row: part r of key j is sum_c theta[r, c]
k_{j-h+c}, and meets query i-(cq-1)+r. Everything here is linear in T. `theta` is fp32 `[heads,
ROWS, COLUMNS]`; the heads of a launch start at `first_head`.
"""

import triton
import triton.language as tl

from heedful.ops.mta.fused_tiles import kernel, parts_of, rows_of, segments_of


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


@kernel
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
    own = segments_of(segments, j, j < keys, SEGMENTS)
    k += head // group * keys * DIM
    theta += head % heads * ROWS * COLUMNS
    parts = ()
    for _ in tl.static_range(ROWS):
        parts = parts + (tl.zeros([BN, D], tl.float32),)
    for c in range(COLUMNS):
        source = j - COLUMNS // 2 + c
        valid = (source >= 0) & (source < keys)
        valid &= segments_of(segments, source, valid, SEGMENTS) == own
        x = rows_of(k, source, valid, DIM, 0, D).to(tl.float32)
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


@kernel
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
    own = segments_of(segments, i, n < queries, SEGMENTS)
    k += head // group * keys * DIM
    scores += local * SCORES * queries
    x = rows_of(q + head * queries * DIM, n, n < queries, DIM, 0, D).to(tl.float32)
    for e in range(SCORES):
        j = i - distance_of(e, NEAR_SCORES, FAR_SCORES)
        valid = (n < queries) & (j >= 0)
        valid &= segments_of(segments, j, valid, SEGMENTS) == own
        y = rows_of(k, j, valid, DIM, 0, D).to(tl.float32)
        tl.store(scores + e * queries + n, tl.sum(x * y, 1) * scale, n < queries)


@kernel
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
    bits = parts_of(parts + head // heads * part_stride, n, queries, ROWS, SEGMENTS)
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
