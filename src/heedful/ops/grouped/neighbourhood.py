"""Reach of a query: groups attended to as summaries, tokens one by one, in plain numbers.

Groups stand in the order of their ends, so that what a query sees of them is a run, or two with a
gap where its own neighbourhood lies. `neighbourhood_of` finds where these begin and end;
`reference.py` has the same as a definition.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.ops.common.tiles import segment_bounds
from heedful.ops.grouped.groups import Groups
from heedful.ops.grouped.summaries import Summaries
from heedful.ops.visibility import Visibility


class Neighbourhood(NamedTuple):
    """Of every query; all `[B or 1, Tq]`.

    first, near, after, last: it sees the summaries `first .. near - 1` and `after .. last - 1`;
        groups from `near` to `after - 1` it sees by their tokens.
    start, stop: these tokens are among `start .. stop - 1`, as k counts them.
    asks: the group whose query stands for this one where groups ask; -1 for none.
    """

    first: Int[Tensor, "#B Tq"]
    near: Int[Tensor, "#B Tq"]
    after: Int[Tensor, "#B Tq"]
    last: Int[Tensor, "#B Tq"]
    start: Int[Tensor, "#B Tq"]
    stop: Int[Tensor, "#B Tq"]
    asks: Int[Tensor, "#B Tq"]

    def stacked(self) -> Int[Tensor, "#B 7 Tq"]:
        """In one tensor, the form that crosses a custom operator's boundary."""
        return torch.stack(torch.broadcast_tensors(*self), dim=1)


class GroupedCall(NamedTuple):
    """Arguments of a call of the operator beside queries, keys and values, checked.

    log_size: bias on the logits of the summaries.
    bias, group_bias: on those of tokens, and of the summaries by their members' means.
    """

    groups: Groups
    summaries: Summaries
    query_groups: Groups | None
    window: int
    log_size: Float[Tensor, "B H M"]
    bias: Float[Tensor, "#B #H Tq Tk"] | None
    group_bias: Float[Tensor, "#B #H Tq M"] | None
    local: bool
    visibility: Visibility
    scale: float

    def reach(self, queries: int, keys: int) -> Neighbourhood:
        """The reach of the queries; without `local` of no token but their own."""
        sizes = (queries, keys, self.window, self.query_groups)
        reach = neighbourhood_of(self.groups, self.visibility, *sizes)
        if self.local or self.visibility.queries is not None:
            return reach
        own = torch.arange(keys - queries, keys, device=reach.start.device)
        start = torch.maximum(reach.start, own)
        return reach._replace(start=start, stop=reach.stop.minimum(own + 1).maximum(start))


def neighbourhood_of(
    groups: Groups,
    visibility: Visibility,
    queries: int,
    keys: int,
    window: int,
    query_groups: Groups | None = None,
) -> Neighbourhood:
    """The reach of the last `queries` of `keys` tokens, or of a cross-attention's own queries."""
    asking = groups if query_groups is None else query_groups
    device = groups.start.device
    crossing = visibility.queries is not None
    count = groups.there.sum(1, keepdim=True)
    of_queries = visibility.query_segments(queries)
    if crossing:
        token = torch.arange(queries, device=device)[None]
        zero = torch.zeros_like(token)
        own = Visibility(padding=None if of_queries is None else of_queries >= 0)
        asks = _newest(asking, own, token, queries)
        everything = Neighbourhood(zero, count, count, count, zero, zero, asks)
        return _without_padding(everything, of_queries)

    token = groups.first + torch.arange(keys - queries, keys, device=device)[None]
    segments = visibility.segments()
    if visibility.documents is None:
        first, last = torch.zeros_like(count), count
    else:
        begin, stop = (x[:, keys - queries :] for x in segment_bounds(segments))
        first, last = _below(groups.start, begin), _below(groups.start, stop)
    near = torch.maximum(_below(groups.end, token - window + 1), first)
    if visibility.causal:
        after, stop = torch.full_like(near, groups.count), token + 1
        last = after
    else:
        after = torch.minimum(_below(groups.start, token + window), last)
        stop = _at(groups.end, after - 1) + 1
    start = _at(groups.start, near)
    if visibility.window is not None:
        # A summary holds all of its tokens: it goes when the first of them leaves the window.
        oldest = token - visibility.window + 1
        first, start = torch.maximum(first, _below(groups.start, oldest)), start.maximum(oldest)
        if not visibility.causal:
            newest = token + visibility.window
            last, stop = torch.minimum(last, _below(groups.end, newest)), stop.minimum(newest)
    start, stop = start - groups.first, stop - groups.first
    if visibility.causal:
        asks = _newest(asking, visibility, token, keys)
    else:
        asks = _own(groups, keys - queries)
    return _without_padding(Neighbourhood(first, near, after, last, start, stop, asks), of_queries)


def _newest(
    groups: Groups, visibility: Visibility, token: Int[Tensor, "#B Tq"], keys: int
) -> Int[Tensor, "#B Tq"]:
    """The newest complete group of the token's document; -1 for none."""
    number = torch.arange(groups.count, device=token.device)
    complete = number.where(groups.complete & groups.there, -1).cummax(1).values
    complete = torch.nn.functional.pad(complete, (1, 0), value=-1)
    newest = _at(complete, _below(groups.end, token + 1))
    if visibility.documents is None:
        return newest
    begin = segment_bounds(visibility.segments())[0][:, keys - token.shape[1] :]
    return newest.where(newest >= _below(groups.start, begin), -1)


def _own(groups: Groups, skipped: int) -> Int[Tensor, "#B n"]:
    """The group that holds most of a token, the first of equals; -1 for padding."""
    index, weight = torch.broadcast_tensors(groups.index[:, skipped:], groups.weight[:, skipped:])
    most = (weight == weight.amax(-1, keepdim=True)) & (index >= 0)
    own = index.where(most, groups.count).amin(-1)
    return own.where(own < groups.count, -1)


def _without_padding(reach: Neighbourhood, segments: Int[Tensor, "#B Tq"] | None) -> Neighbourhood:
    """Padded queries reach nothing."""
    if segments is None:
        return reach
    real = segments >= 0
    return Neighbourhood(*(x.where(real, 0) for x in reach[:6]), reach.asks.where(real, -1))


def _below(ascending: Int[Tensor, "#B M"], x: Int[Tensor, "#B n"]) -> Int[Tensor, "#B n"]:
    """Count the numbers below each x."""
    rows = max(len(ascending), len(x))
    ascending, x = ascending.expand(rows, -1).contiguous(), x.expand(rows, -1).contiguous()
    return torch.searchsorted(ascending, x)


def _at(ascending: Int[Tensor, "#B M"], place: Int[Tensor, "#B n"]) -> Int[Tensor, "#B n"]:
    rows = max(len(ascending), len(place))
    place = place.clamp(0, ascending.shape[1] - 1).expand(rows, -1)
    return ascending.expand(rows, -1).gather(1, place)


def score_pairs(
    groups: Groups,
    *,
    window: int,
    visibility: Visibility | None = None,
    queries: int | None = None,
    asking: bool = False,
) -> Int[Tensor, " B"]:
    """Count the pairs of a query and a key or summary that one head scores, of each sequence.

    Arguments:
        groups: of whole rows.
        window, visibility: as for `grouped_attention`.
        queries: of a cross-attention; by default the tokens ask.
        asking: groups ask: rows with the same query and the same summaries are one.

    Returns:
        one number per row, or a single one where all rows have the same groups.
    """
    tokens = groups.index.shape[1]
    visibility = Visibility() if visibility is None else visibility
    reach = neighbourhood_of(groups, visibility, queries or tokens, tokens, window)
    far = (reach.near - reach.first).clamp(min=0) + (reach.last - reach.after).clamp(min=0)
    index = groups.index[:, None]
    near, after = (x[..., None, None] for x in (reach.near, reach.after))
    uncovered = ((index >= near) & (index < after)).any(-1)
    token = torch.arange(tokens, device=uncovered.device)
    uncovered = uncovered & (token >= reach.start[..., None]) & (token < reach.stop[..., None])
    if asking:
        same = torch.stack(torch.broadcast_tensors(*reach[:4], reach.asks), 1).diff(dim=2) == 0
        far = far.expand(len(same), -1).clone()
        far[:, 1:] *= ~same.all(1)
    return far.sum(1) + uncovered.flatten(1).sum(1)
