"""Limits of selective attention's fused kernels, and their tiles; free of Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

from heedful.ops.common.terms import Terms
from heedful.ops.impl import over_grid, over_limit, padded


class TileLaunch(NamedTuple):
    """One kernel: its tile, how many heads a program serves with one tile of F, warps, stages."""

    heads: int
    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def tile(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns} | self.resources

    @property
    def resources(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


class Plan(NamedTuple):
    """Tiles of the kernels of one call.

    All have tiles of the same number of queries but `key_gradients`, which takes a whole fraction.
    """

    attend: TileLaunch
    query_gradients: TileLaunch
    key_gradients: TileLaunch
    selector: TileLaunch


class _Limits(NamedTuple):
    """A launch with its most heads: `shared` of one key head, `apart` of several."""

    shared: int
    apart: int
    rows: int
    columns: int
    warps: int
    stages: int


# By element size and widest head dim, in the order of `Plan`. Chosen for two programs on each
# multiprocessor of sm_90, one everywhere, and few spilled registers, by what the compiler reports.
_LIMITS = {
    (2, 64): [
        _Limits(4, 2, 64, 64, 4, 2),
        _Limits(2, 2, 64, 32, 4, 2),
        _Limits(4, 2, 32, 64, 4, 2),
        _Limits(1, 1, 64, 64, 4, 3),
    ],
    (2, 128): [
        _Limits(2, 1, 64, 32, 4, 2),
        _Limits(1, 1, 64, 32, 4, 2),
        _Limits(1, 1, 32, 64, 4, 2),
        _Limits(1, 1, 64, 64, 4, 2),
    ],
    (2, 256): [
        _Limits(1, 1, 32, 64, 8, 1),
        _Limits(1, 1, 32, 32, 8, 1),
        _Limits(1, 1, 16, 32, 8, 1),
        _Limits(1, 1, 32, 64, 4, 2),
    ],
    # fp32 never sees a tensor core here: for checks, not for speed.
    (4, 64): [
        _Limits(1, 1, 32, 32, 4, 2),
        _Limits(1, 1, 32, 32, 4, 2),
        _Limits(1, 1, 32, 32, 8, 2),
        _Limits(1, 1, 32, 32, 4, 2),
    ],
    (4, 128): [
        _Limits(1, 1, 32, 32, 8, 1),
        _Limits(1, 1, 32, 16, 8, 1),
        _Limits(1, 1, 16, 32, 8, 1),
        _Limits(1, 1, 32, 32, 4, 1),
    ],
    (4, 256): [_Limits(1, 1, 16, 16, 8, 1)] * 4,
}
# Of `key_gradients`, where an H100 was a quarter faster with it; on others it would not fit.
_ON_HOPPER = {(2, 128): _Limits(1, 1, 32, 128, 8, 2)}


def selective_attention_limit(q: Tensor, v: Tensor, selector_q: Tensor, terms: Terms) -> str | None:
    """Why the kernels do not support a call, as one clause, or `None`."""
    visibility = terms.visibility
    if visibility.mutual is not None:
        return "its kernels know no tokens that see later ones (visibility.mutual)"
    if not visibility.in_place:
        return "its kernels know no positions and queries of their own (visibility)"
    if terms.dropout is not None:
        return "its kernels drop no weights (dropout_p)"
    if terms.bias is not None:
        return "its kernels add no bias to the logits"
    if terms.softcap is not None:
        return "its kernels do not cap the logits (softcap)"
    if terms.sinks is not None:
        return "its kernels have no sinks"
    if terms.scale < 0:
        return f"scale {terms.scale} is negative"
    return over_grid(batch=q.shape[0], heads=q.shape[1]) or over_limit(
        q, q=q.shape[3], v=v.shape[3], selector_q=selector_q.shape[3]
    )


def plan(q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, tile: list[int]) -> Plan:
    """By dtype, head counts, dims and device, so that no row depends on its batch.

    `tile` (queries, keys, queries of `key_gradients`) overrides the tiles, if it is not empty.
    """
    counts = q.shape[1], k.shape[1], selector_q.shape[1]
    widest = max(64, *(padded(x.shape[3]) for x in (q, v, selector_q)))
    limits = list(_LIMITS[q.element_size(), widest])
    if on_hopper(q.device):
        limits[2] = _ON_HOPPER.get((q.element_size(), widest), limits[2])
    launches = [TileLaunch(shared_heads(*counts, x.shared, x.apart), *x[2:]) for x in limits]
    if tile:
        rows, columns, step = tile
        launches = [x._replace(rows=rows, columns=columns) for x in launches]
        launches[2] = launches[2]._replace(rows=step)
    return Plan(*launches)


def on_hopper(device: torch.device) -> bool:
    """Test whether this is an H100 or one like it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def shared_heads(heads: int, key_heads: int, selectors: int, shared: int, apart: int) -> int:
    """The most heads that can share a program: all of one selector, so that programs are full.

    At most `shared` of the group of one key head, or at most `apart` in whole groups.
    """
    group, served = heads // key_heads, heads // selectors
    within = [n for n in range(1, shared + 1) if group % n == 0]
    across = range(group, apart + 1, group)
    return max(n for n in (*within, *across) if served % n == 0)
