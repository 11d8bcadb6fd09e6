"""What the fused kernels of multi-token attention serve, and the sizes at which they are launched.

Free of Triton, so that a caller can ask before anything is imported.
"""

from typing import NamedTuple

from torch import Tensor

from heedful.ops.common.limits import over_grid, over_limit, padded

MAX_ROWS, MAX_COLUMNS = 8, 15
SHARED = 208 * 1024  # bytes of a block's operands on an H100 or H200, less what reductions need
SCRATCH = 512 * 2**20  # bytes of wide rows, and of rows of the map, that are held at once


class ForwardLaunch(NamedTuple):
    """Block of queries, block of keys, columns of wide rows at a time, whether the wide queries
    stay in shared memory, warps, and how many tiles the memory pipeline holds."""

    queries: int
    keys: int
    tile: int
    resident: bool
    warps: int
    stages: int


class BackwardLaunch(NamedTuple):
    """Tile of the map, columns of wide rows at a time, columns and steps of the products with the
    map, warps, and how many tiles the memory pipeline holds."""

    queries: int
    keys: int
    tile: int
    columns: int
    value_columns: int
    step: int
    warps: int
    stages: int


def multi_token_attention_limit(
    q: Tensor,
    v: Tensor,
    conv: Tensor | None = None,
    post_conv: Tensor | None = None,
    mix: Tensor | None = None,
    post_mix: Tensor | None = None,
) -> str | None:
    """The limit that a call exceeds, as one clause, or `None`."""
    if not post_conv is mix is post_mix is None:  # row blocks take all heads of all rows at once
        reason = over_grid(batch_times_heads=q.shape[0] * q.shape[1])
        if reason is not None:
            return reason
    for kernel in (conv, post_conv):
        if kernel is None:
            continue
        _, rows, columns = kernel.shape
        for name, size, most in (("c_q", rows, MAX_ROWS), ("c_k", columns, MAX_COLUMNS)):
            if size > most:
                return f"{name} {size} is above {most}"
    return over_limit(q, q=q.shape[3], v=v.shape[3])


def forward_launch(width: int, value_dim: int, itemsize: int) -> ForwardLaunch:
    """Wide queries stay where they fit beside keys enough to keep the tensor cores busy."""
    tile = column_tile(width)
    if itemsize == 4:
        return ForwardLaunch(32, 32, min(tile, 32), False, 4, 1)
    row, values = -(-width // tile) * tile * itemsize, padded(value_dim) * itemsize
    for keys in (128, 64):
        if 128 * row + 2 * keys * (row + values) <= SHARED:
            return ForwardLaunch(128, keys, tile, True, 8, 2)
    return ForwardLaunch(128, 64 if value_dim > 128 else 128, min(64, padded(width)), False, 8, 3)


def backward_launch(width: int, value_dim: int, itemsize: int) -> BackwardLaunch:
    """Tiles of plain matrix products."""
    if itemsize == 4:
        return BackwardLaunch(32, 32, 32, 32, 32, 32, 4, 1)
    return BackwardLaunch(
        128, 128, min(64, padded(width)), column_tile(width), column_tile(value_dim), 64, 8, 3
    )


def token_block(dim: int) -> int:
    """Tokens per program of the kernels that are linear in T: all their parts fit in registers."""
    return min(64, 4096 // padded(dim))


def column_tile(width: int) -> int:
    """Columns of wide rows at a time: 128, or 64 if that fills up much less, or all of few."""
    if width <= 64:
        return padded(width)
    return min((128, 64), key=lambda x: -(-width // x) * x * (1.25 if x == 64 else 1))


def heads_at_once(units: int, bytes_of_unit: int, bytes_of_q: int) -> int:
    """Key heads (of all batch rows) whose wide rows are held at once: `SCRATCH`, or as q takes."""
    return max(1, min(units, max(SCRATCH, bytes_of_q) // bytes_of_unit))


def blocks_at_once(blocks: int, bytes_of_block: int) -> int:
    """Row blocks of the map that are held at once."""
    return max(1, min(blocks, SCRATCH // bytes_of_block))
