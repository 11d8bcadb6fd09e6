"""Helper inside the fused kernels: the mask of a tile. Imported only where Triton is used."""

import triton
import triton.language as tl


@triton.jit
def visible_tile(
    segments, row_stride, batch, i, j, keys,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """`[len(i), len(j)]`: query token i sees key token j (both counted among the keys).

    `segments`: int32 `[B or 1, keys]`, -1 for padding; `row_stride` 0 if one row serves all.
    `WINDOW` 0: no limit. Tokens outside `0 .. keys-1` are never visible.
    """
    inside_i, inside_j = (i >= 0) & (i < keys), (j >= 0) & (j < keys)
    visible = inside_i[:, None] & inside_j[None, :]
    if CAUSAL:
        visible &= j[None, :] <= i[:, None]
    if WINDOW > 0:
        visible &= i[:, None] - j[None, :] < WINDOW
    if SEGMENTS:
        of_query = tl.load(segments + batch * row_stride + i, mask=inside_i, other=-1)
        of_key = tl.load(segments + batch * row_stride + j, mask=inside_j, other=-2)
        visible &= (of_query[:, None] == of_key[None, :]) & (of_query >= 0)[:, None]
    return visible
