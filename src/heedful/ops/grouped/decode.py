"""Grouped attention of a few new queries, as in cached decoding: dense over the few rows."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.few import few_outputs, few_scores, few_weights
from heedful.ops.common.tiles import Masked
from heedful.ops.grouped.neighbourhood import GroupedCall, Neighbourhood


def grouped_attention_few(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    call: GroupedCall,
    reach: Neighbourhood,
) -> Float[Tensor, "B H Tq Dv"]:
    """As the tiled form, without blocks; there is no bias."""
    groups, summaries, log_size, scale = call.groups, call.summaries, call.log_size, call.scale
    first, near, after, last, start, stop, asks = (x[..., None] for x in reach)
    asking = q
    if summaries.q is not None:
        at = asks.clamp(min=0)[:, None].expand(len(q), q.shape[1], -1, q.shape[3])
        asking = summaries.q.gather(2, at).where(asks[:, None] >= 0, q)
    number = torch.arange(groups.count, device=q.device)
    far = ((number >= first) & (number < near)) | ((number >= after) & (number < last))
    of_groups = few_scores(asking, summaries.k, scale).add_(log_size[:, :, None])

    token = torch.arange(k.shape[2], device=q.device)
    here = (token >= start) & (token < stop)
    of_tokens = few_scores(q, k, scale)
    index = groups.index[:, None]
    if groups.hard:
        here = here & (index[..., 0] >= 0)
    else:
        uncovered = (index >= near[..., None]) & (index < after[..., None])
        whole = (uncovered | (index < 0)).all(-1) & (index >= 0).any(-1)
        remainder = (uncovered * groups.weight[:, None].to(log_size.dtype)).sum(-1)
        remainder = remainder.masked_fill(whole, 1)
        here = here & (remainder > 0)
        of_tokens.add_(remainder.where(here, 1).log()[:, None])
    rows = max(len(far), len(here))
    visible = torch.cat([far.expand(rows, -1, -1), here.expand(rows, -1, -1)], dim=-1)
    logits = torch.cat([of_groups, of_tokens], dim=-1)
    masked = None if bool(visible.all()) else Masked(0, ~visible[:, None])
    weights = few_weights(logits, masked)
    far_weights, near_weights = weights.split([groups.count, k.shape[2]], dim=-1)
    return (few_outputs(far_weights, summaries.v) + few_outputs(near_weights, v)).to(q.dtype)
