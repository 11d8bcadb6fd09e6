"""Ledger of the groups in a cache of summaries, and of the tokens still needed one by one.

Layers with the same groups have the same ledger, so that one of them keeps it for all in each
forward pass. The newest group of a sequence counts as open until the next one has begun.
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
    """Groups so far, and the memberships of near tokens; every tensor is of all sequences.

    index, weight: of the tokens from `first` on, `[B, n, S]`.
    start, end, complete, mass: of all groups, `[B, M]`; those from `count` on may still grow.
    count: how many groups of each sequence do not change any more, `[B]`.
    begins: where each sequence's open groups begin, `[B]`.
    fill: how full its open group is before that, `[B, 1]`.
    first: the first token that some sequence needs by itself.
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
    def empty(cls, batch: int, device: torch.device) -> "Ledger":
        """Before the first token."""
        none = torch.zeros(batch, 0, device=device, dtype=torch.float64)
        whole = torch.zeros(batch, device=device, dtype=torch.int64)
        return cls(
            none[..., None].long(), none[..., None], none.long(), none.long(), none.bool(), none,
            whole, whole, torch.zeros(batch, 1, device=device, dtype=torch.float64), 0, 0,
        )  # fmt: skip


class Entry(NamedTuple):
    """Changes by new tokens.

    open: the groups of the tokens from the oldest open group on, numbered from zero.
    to: their numbers in the sequence, `[B, m]`; `groups.count` for one that a sequence lacks.
    groups: all groups, over the tokens that were near.
    after: the ledger for the next call.
    """

    open: Groups
    to: Int[Tensor, "B m"]
    groups: Groups
    after: Ledger


def entry_of(
    ledger: Ledger,
    tokens: int,
    features: Float[Tensor, "B n F"] | None,
    places: Places,
    document: Int[Tensor, "B 1"],
    grouping: Grouping,
    window: int,
) -> Entry:
    """The groups with new tokens: these join open ones, close them and begin others.

    Arguments:
        ledger: of the tokens before.
        tokens: how many there are from the oldest open group on, the new ones with them.
        features, places: of these tokens.
        document: where the document of each sequence's open group begins.
        grouping: makes groups of them.
        window: from how many tokens on a group is attended to through its summary.
    """
    stop, final_before = ledger.opened + tokens, _final(ledger)
    before = (final_before & (ledger.start >= document)).sum(1, keepdim=True)  # of that document
    offset = ledger.fill if grouping.kind == "cif" else before
    offset = offset.where(places.start == ledger.begins[:, None] - ledger.opened, 0)
    new = grouping.groups(features, places, offset)
    to, count = _numbers(ledger, new)

    def joined(old: Shaped[Tensor, "B M"], more: Shaped[Tensor, "B m"], empty) -> Tensor:
        old = old.where(final_before, empty)[:, :count]
        old = pad(old, (0, count - old.shape[1] + 1), value=empty)
        return old.scatter(1, to, more.expand(len(old), -1).to(old.dtype))[:, :count]

    start = joined(ledger.start, new.start + ledger.opened, NEVER)
    end = joined(ledger.end, new.end + ledger.opened, NEVER)
    complete = joined(ledger.complete, new.complete, False)
    mass = joined(ledger.mass, new.mass, 0.0)
    index = (new.index + ledger.count[:, None, None]).where(new.weight > 0, NOBODY)
    index, weight = _memberships(ledger, *torch.broadcast_tensors(index, new.weight))

    final = (end < stop - 1).sum(1)
    begins = _at(start, final).clamp(max=stop)
    fill = _fill(ledger, features, new, grouping, begins, final)
    opened = int(begins.min())
    after = Ledger(
        index, weight, start, end, complete, mass, final, begins, fill, ledger.first, opened
    )
    reach = grouping.longest_span
    groups = Groups(index, weight, start, end, complete, reach, mass, ledger.first, new.hard)
    return Entry(new, to, groups, _without_far(after, stop, window))


def _without_far(ledger: Ledger, stop: int, window: int) -> Ledger:
    """Without the memberships of tokens that the token `stop` sees in summaries alone."""
    far = (ledger.end <= stop - window).sum(1).minimum(ledger.count)
    first = max(ledger.first, min(int(_at(ledger.start, far).min()), ledger.opened))
    drop = first - ledger.first
    index, weight = (x[:, drop:].clone() for x in (ledger.index, ledger.weight))
    return ledger._replace(index=index, weight=weight, first=first)


def _final(ledger: Ledger) -> Bool[Tensor, "B M"]:
    """Mark the groups that no longer change."""
    number = torch.arange(ledger.start.shape[1], device=ledger.start.device)
    return number < ledger.count[:, None]


def _numbers(ledger: Ledger, new: Groups) -> tuple[Int[Tensor, "B m"], int]:
    """The new groups' numbers in each sequence, and how many groups the longest one has."""
    there = new.there.expand(len(ledger.count), -1)
    count = max(1, int((ledger.count + there.sum(1)).max()))
    number = torch.arange(new.count, device=there.device)
    return (ledger.count[:, None] + number).where(there, count), count


def _memberships(
    ledger: Ledger, index: Int[Tensor, "B n S"], weight: Float[Tensor, "B n S"]
) -> tuple[Int[Tensor, "B m S"], Float[Tensor, "B m S"]]:
    """Memberships of all near tokens: those of complete groups stay as they were."""
    if not ledger.index.shape[1]:
        return index, weight
    old = ledger.opened - ledger.first
    place = torch.arange(ledger.opened, ledger.opened + index.shape[1], device=index.device)
    stays = (place < ledger.begins[:, None])[..., None]
    fill = index.shape[1] - (ledger.index.shape[1] - old)
    parts = []
    for before, now in ((ledger.index, index), (ledger.weight, weight.to(ledger.weight.dtype))):
        same = pad(before[:, old:], (0, 0, 0, fill))
        parts.append(torch.cat([before[:, :old], same.where(stays, now)], dim=1))
    return parts[0], parts[1]


def _fill(
    ledger: Ledger,
    features: Float[Tensor, "B n F"] | None,
    new: Groups,
    grouping: Grouping,
    begins: Int[Tensor, " B"],
    final: Int[Tensor, " B"],
) -> Float[Tensor, "B 1"]:
    """Fill of each sequence's open group before its first token begins (cif)."""
    if grouping.kind != "cif":
        return ledger.fill
    batch, tokens = len(begins), features.shape[1]
    at = (begins - ledger.opened).clamp(max=tokens - 1)[:, None]
    index = new.index[..., 0].expand(batch, -1).gather(1, at) + ledger.count[:, None]
    share = new.weight[..., 0].expand(batch, -1).gather(1, at)
    alpha = features[..., 0].gather(1, at).to(share.dtype)
    within = (index < final[:, None]) & (begins[:, None] < ledger.opened + tokens)
    return (1 - share * alpha).where(within, 0.0).to(ledger.fill.dtype)


def newest_complete(ledger: Ledger) -> Int[Tensor, "B 1 1 1"]:
    """The number of the newest group that is complete and does not change any more; 0 for none."""
    number = torch.arange(ledger.start.shape[1], device=ledger.start.device)
    newest = pad(number.where(ledger.complete & _final(ledger), 0), (1, 0)).amax(1)
    return newest[:, None, None, None]


def _at(ascending: Int[Tensor, "B M"], place: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """The number at each sequence's place; beyond the last one, one that comes never."""
    return pad(ascending, (0, 1), value=NEVER).gather(1, place[:, None])[:, 0]
