"""Grouped attention as its definition reads: dense, any precision, slow."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.ops.grouped.groups import Groups
from heedful.ops.grouped.neighbourhood import GroupedCall
from heedful.ops.visibility import Visibility


def grouped_attention_reference(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    call: GroupedCall,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `grouped_attention`, one line per step of its definition."""
    groups, summaries, log_size = call.groups, call.summaries, call.log_size
    visibility, scale = call.visibility, call.scale
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    shared = heads // k.shape[1]
    a = memberships(groups).to(log_size.dtype)
    visible, published = visible_groups(groups, visibility, queries, keys, call.window)
    visible, published = visible[:, None], published[:, None]

    asking = q
    if summaries.q is not None:
        newest = asking_group(call.query_groups or groups, visibility, queries, keys, a)
        at = newest.clamp(min=0)[:, None, :, None].expand(len(q), heads, -1, q.shape[3])
        asking = torch.where((newest >= 0)[:, None, :, None], summaries.q.gather(2, at), q)
    spread_k, spread_v = (x.repeat_interleave(shared, dim=1) for x in (summaries.k, summaries.v))
    s = (asking @ spread_k.mT * scale).to(log_size.dtype) + log_size[:, :, None]
    s = s if call.group_bias is None else s + call.group_bias
    s = s.masked_fill(~visible, float("-inf"))

    # r_i(t): what no visible summary holds of token i; one where none holds any of it.
    covered = published.to(a.dtype) @ (a > 0).to(a.dtype).mT[:, None] > 0
    remainder = torch.where(
        covered, (~published).to(a.dtype) @ a.mT[:, None], (a.sum(-1) > 0)[:, None, None]
    )
    near = visibility.dense(queries, keys, q.device)[:, None] & (remainder > 0)
    if visibility.queries is not None:
        near = torch.zeros_like(near)  # of the source there are no tokens one by one
    elif not call.local:
        token = torch.arange(keys, device=q.device)
        near = near & (token == token[keys - queries :, None])
    t = (q @ k.repeat_interleave(shared, dim=1).mT * scale).to(log_size.dtype)
    t = t if call.bias is None else t + call.bias
    t = (t + remainder.where(near, 1).log()).masked_fill(~near, float("-inf"))

    logits = torch.cat([s, t], dim=-1)
    blind = logits.isneginf().all(-1, keepdim=True)
    p = logits.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0).to(q.dtype)
    values = torch.cat([spread_v, v.repeat_interleave(shared, dim=1)], dim=2)
    return p @ values


def memberships(groups: Groups) -> Float[Tensor, "B T M"]:
    """A, dense."""
    rows = max(len(groups.index), len(groups.weight))
    index = groups.index.expand(rows, -1, -1)
    a = groups.weight.new_zeros(rows, index.shape[1], groups.count)
    return a.scatter_add(2, index.clamp(min=0), groups.weight.expand(rows, -1, -1))


def visible_groups(
    groups: Groups, visibility: Visibility, queries: int, keys: int, window: int
) -> tuple[Bool[Tensor, "B Tq M"], Bool[Tensor, "B Tq M"]]:
    """V(t), and which groups stand for their tokens; these differ under a window of the model's.

    A group is out of a query's neighbourhood when its last token is `window` or more tokens back,
    or, where later tokens are seen, when its first one is as far ahead.
    """
    device = groups.start.device
    there = groups.there[:, None]
    real = visibility.query_segments(queries)
    real = True if real is None else (real >= 0)[..., None]
    if visibility.queries is not None:
        visible = (there & real).expand(-1, queries, -1)
        return visible, visible
    token = groups.first + torch.arange(keys - queries, keys, device=device)[:, None]
    start, end = groups.start[:, None], groups.end[:, None]
    far = end <= token - window
    if not visibility.causal:
        far = far | (start >= token + window)
    if visibility.documents is not None:
        of_tokens = visibility.segments()
        of_tokens = of_tokens.expand(max(len(of_tokens), len(start)), -1)
        of_group = of_tokens.gather(1, groups.start.clamp(max=keys - 1).expand(len(of_tokens), -1))
        far = far & (of_group[:, None] == of_tokens[:, keys - queries :, None])
    far = far & there & real
    if visibility.window is None:
        return far, far
    inside = start > token - visibility.window
    if not visibility.causal:
        inside = inside & (end < token + visibility.window)
    return far & inside, far


def asking_group(
    groups: Groups, visibility: Visibility, queries: int, keys: int, a: Float[Tensor, "B T M"]
) -> Tensor:
    """J(t): the newest group that is complete at t, of t's document; -1 for none.

    Where later tokens are seen it is the one that holds most of the token, the first of equals.
    """
    number = torch.arange(groups.count, device=groups.start.device)
    if not visibility.causal and visibility.queries is None:
        own = a[:, keys - queries :]
        return torch.where(own.sum(-1) > 0, own.argmax(-1), -1)
    crossing = visibility.queries is not None
    total = queries if crossing else keys
    token = groups.first + torch.arange(total - queries, total, device=number.device)[:, None]
    complete = (groups.there & groups.complete)[:, None] & (groups.end[:, None] <= token)
    if not crossing and visibility.documents is not None:
        segments = visibility.segments()
        segments = segments.expand(max(len(segments), len(groups.start)), -1)
        start = groups.start.clamp(max=keys - 1).expand(len(segments), -1)
        complete = complete & (segments.gather(1, start)[:, None] == segments[:, -queries:, None])
    real = visibility.query_segments(queries)
    if real is not None:
        complete = complete & (real >= 0)[..., None]
    return torch.where(complete, number, -1).amax(-1)
