"""Which groups a cache of summaries knows, and which tokens it still needs one by one.

Layers with the same groups have the same ledger, so that one of them keeps it for all in each
forward pass. The newest group of a row counts as open until the next one has begun.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from heedful.nn.grouping import Grouping
from heedful.ops import Groups
from heedful.ops.grouped.groups import NEVER, NOBODY, Places


class Ledger(NamedTuple):
    """Groups so far, and the memberships of near tokens; every tensor is of all rows.

    index, weight: of the tokens from `first` on, `[B, n, S]`.
    start, end, complete, mass: of all groups, `[B, M]`; those from `count` on may still grow.
    count: how many groups of each row do not change any more, `[B]`.
    begins: where each row's open groups begin, `[B]`.
    fill: how full its open group is before that, `[B, 1]`.
    first: the first token that some row needs by itself.
    opened: the first token of a group that may still grow.
    """

    index: Int[Tensor, "B n S"]
    weight: Float[Tensor, "B n S"]
    start: Int[Tensor, "B M"]
    end: Int[Tensor, "B M"]
    complete: Bool[Tensor, "B M"]
    mass: Float[Tensor, "B M"]
    count: Int[Tensor, " B"]
    begins: Int[Tensor, " B"]
    fill: Float[Tensor, "B 1"]
    first: int
    opened: int

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "Ledger":
        """Before the first token."""
        none = torch.zeros(rows, 0, device=device, dtype=torch.float64)
        whole = torch.zeros(rows, device=device, dtype=torch.int64)
        return cls(
            none[..., None].long(), none[..., None], none.long(), none.long(), none.bool(), none,
            whole, whole, torch.zeros(rows, 1, device=device, dtype=torch.float64), 0, 0,
        )  # fmt: skip


class Entry(NamedTuple):
    """What new tokens change.

    made: the groups of the tokens from the oldest open group on, numbered from zero.
    to: their numbers in the row, `[B, m]`; `groups.count` for one that a row does not have.
    groups: all groups, over the tokens that were near.
    after: the ledger for the next call.
    """

    made: Groups
    to: Int[Tensor, "B m"]
    groups: Groups
    after: Ledger


def entered(
    held: Ledger,
    tokens: int,
    features: Float[Tensor, "B n F"] | None,
    places: Places,
    document: Int[Tensor, "B 1"],
    grouping: Grouping,
    window: int,
) -> Entry:
    """The groups with new tokens: these join open ones, close them and begin others.

    Arguments:
        held: what was known.
        tokens: how many there are from the oldest open group on, the new ones with them.
        features, places: of these tokens.
        document: where the document of each row's open group begins in the row.
        grouping: makes groups of them.
        window: from how many tokens on a group is seen by its summary.
    """
    stop, rows = held.opened + tokens, len(held.count)
    number = torch.arange(held.start.shape[1], device=held.start.device)
    known = number < held.count[:, None]
    before = (known & (held.start >= document)).sum(1, keepdim=True)  # groups of that document
    begun = held.fill if grouping.kind == "cif" else before
    begun = begun.where(places.start == held.begins[:, None] - held.opened, 0)
    made = grouping.groups(features, places, begun)
    there = made.there.expand(rows, -1)
    count = max(1, int((held.count + there.sum(1)).max()))
    local = torch.arange(made.count, device=there.device)
    to = (held.count[:, None] + local).where(there, count)

    def joined(old: Shaped[Tensor, "B M"], more: Shaped[Tensor, "B m"], away) -> Tensor:
        base = pad(old.where(known, away)[:, :count], (0, max(0, count - old.shape[1]) + 1),
                   value=away)  # fmt: skip
        return base.scatter(1, to, more.expand(rows, -1).to(base.dtype))[:, :count]

    start = joined(held.start, made.start + held.opened, NEVER)
    end = joined(held.end, made.end + held.opened, NEVER)
    complete, mass = joined(held.complete, made.complete, False), joined(held.mass, made.mass, 0.0)
    index = (made.index + held.count[:, None, None]).where(made.weight > 0, NOBODY)
    index, weight = _since(held, *torch.broadcast_tensors(index, made.weight))

    final = (end < stop - 1).sum(1)
    begins = _at(start, final).clamp(max=stop)
    opened = int(begins.min())
    seen = (end <= stop - window).sum(1).minimum(final)
    first = max(held.first, min(int(_at(start, seen).min()), opened))
    drop = first - held.first
    near_index, near_weight = index[:, drop:].clone(), weight[:, drop:].clone()
    after = Ledger(
        near_index, near_weight, start, end, complete, mass, final, begins,
        _fill(held, features, made, grouping, begins, final), first, opened,
    )  # fmt: skip
    reach = grouping.longest_span
    groups = Groups(index, weight, start, end, complete, reach, mass, held.first, made.hard)
    return Entry(made, to, groups, after)


def _since(
    held: Ledger, index: Int[Tensor, "B n S"], weight: Float[Tensor, "B n S"]
) -> tuple[Int[Tensor, "B m S"], Float[Tensor, "B m S"]]:
    """Memberships of all near tokens: those of complete groups as they were found before."""
    if not held.index.shape[1]:
        return index, weight
    old = held.opened - held.first
    known = torch.arange(held.opened, held.opened + index.shape[1], device=index.device)
    known = (known < held.begins[:, None])[..., None]
    fill = index.shape[1] - (held.index.shape[1] - old)
    parts = []
    for before, now in ((held.index, index), (held.weight, weight.to(held.weight.dtype))):
        same = pad(before[:, old:], (0, 0, 0, fill))
        parts.append(torch.cat([before[:, :old], same.where(known, now)], dim=1))
    return parts[0], parts[1]


def _fill(
    held: Ledger,
    features: Float[Tensor, "B n F"] | None,
    made: Groups,
    grouping: Grouping,
    begins: Int[Tensor, " B"],
    final: Int[Tensor, " B"],
) -> Float[Tensor, "B 1"]:
    """How full each row's open group is before its first token begins (cif)."""
    if grouping.kind != "cif":
        return held.fill
    rows, tokens = len(begins), features.shape[1]
    at = (begins - held.opened).clamp(max=tokens - 1)[:, None]
    index = made.index[..., 0].expand(rows, -1).gather(1, at) + held.count[:, None]
    share = made.weight[..., 0].expand(rows, -1).gather(1, at)
    alpha = features[..., 0].gather(1, at).to(share.dtype)
    begun = (index < final[:, None]) & (begins[:, None] < held.opened + tokens)
    return (1 - share * alpha).where(begun, 0.0).to(held.fill.dtype)


def _at(ascending: Int[Tensor, "B M"], place: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The number at each row's place; beyond the last one, one that comes never."""
    return pad(ascending, (0, 1), value=NEVER).gather(1, place[:, None])[:, 0]
