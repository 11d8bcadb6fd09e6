"""Blocks of query rows, with the summaries and the tokens that any of their rows reaches."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

ROWS = 128


def units_of(
    q: Float[Tensor, "#B H Tq D"], queries: Float[Tensor, "#B H M D"], reach: Int[Tensor, "#B 7 Tq"]
) -> tuple[Float[Tensor, "#B H U D"], Int[Tensor, " Tq"]]:
    """The queries of the groups that ask, one for every run of rows that see the same summaries.

    A row asks for itself while no group of its own is complete.
    """
    of_summaries = torch.cat([reach[:, :4], reach[:, 6:]], dim=1)
    changes = (of_summaries.diff(dim=2) != 0).any(1).any(0)
    first, near, after, last, _, _, asks = reach.unbind(1)
    alone = ((asks < 0) & ((near > first) | (last > after))).any(0)
    changes = torch.nn.functional.pad(changes, (1, 0), value=True) | alone
    rows = changes.nonzero()[:, 0]
    asks = asks[:, rows].expand(len(q), -1)[:, None, :, None]
    of_groups = queries.gather(2, asks.clamp(min=0).expand(-1, q.shape[1], -1, q.shape[3]))
    return of_groups.where(asks >= 0, q[:, :, rows]), changes.long().cumsum(0) - 1


class Operands(NamedTuple):
    """A call's tensors as its blocks take them.

    asking: the queries of the summaries' part: those of the tokens, or of units of rows.
    unit: to which of them each row belongs; `None` where every row uses its own query.
    hard: every token belongs wholly to one group.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    asking: Tensor
    group_k: Tensor
    group_v: Tensor
    log_size: Float[Tensor, "#B H M"]
    weight: Float[Tensor, "#B Tk S"]
    bias: Float[Tensor, "#B #H Tq Tk"] | None
    group_bias: Float[Tensor, "#B #H Tq M"] | None
    index: Int[Tensor, "#B Tk S"]
    reach: Int[Tensor, "#B 7 Tq"]
    unit: Int[Tensor, " Tq"] | None
    hard: bool
    scale: float


class Block(NamedTuple):
    """Some rows with the summaries and tokens that any of them reaches.

    clear: so many of the first summaries are seen by all rows.
    units: the rows of the summaries' part.
    """

    rows: range
    groups: range
    clear: int
    tokens: range
    units: range


def blocks_of(x: Operands) -> Iterator[Block]:
    """All blocks, from the last one on: the widest comes first, and its memory serves the rest."""
    queries = x.q.shape[2]
    starts = list(range(0, queries, ROWS))
    fill = x.reach[..., -1:].expand(-1, -1, -queries % ROWS)
    at = torch.cat([x.reach, fill], dim=2).unflatten(2, (-1, ROWS))
    first, near, after, last, start, stop, _ = at.unbind(1)
    # A row that reaches nothing of a kind must not widen the block.
    none = x.log_size.shape[2] + x.k.shape[2]
    reaches_near, reaches_after, reaches_groups = near > first, last > after, stop > start
    low = torch.minimum(first.where(reaches_near, none), after.where(reaches_after, none)).amin(
        (0, 2)
    )
    high = torch.maximum(near.where(reaches_near, 0), last.where(reaches_after, 0)).amax((0, 2))
    shared = torch.where(first.amax((0, 2)) <= low, near.amin((0, 2)), 0)
    begin, end = (
        start.where(reaches_groups, none).amin((0, 2)),
        stop.where(reaches_groups, 0).amax((0, 2)),
    )
    bounds = torch.stack([low, high, shared, begin, end]).tolist()
    unit = list(range(queries)) if x.unit is None else x.unit.tolist()
    for number in reversed(range(len(starts))):
        rows = range(starts[number], min(starts[number] + ROWS, queries))
        low, high, shared, begin, end = (row[number] for row in bounds)
        groups = range(low, max(low, high))
        clear = min(max(0, shared - groups.start), len(groups))
        units = range(unit[rows.start], unit[rows.stop - 1] + 1)
        yield Block(rows, groups, clear, range(begin, max(begin, end)), units)
