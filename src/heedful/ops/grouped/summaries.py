"""Summary of a group: its keys and values in one, by attention inside the group.

Two steps, both optional. A token may first look at the other members of its group, and then each
group is the weighted mean of its members. A token of two groups looks at each of them apart: a
copy that has seen the later group must not go into the earlier one's summary.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import check_dense, shown
from heedful.ops.common.precision import widen
from heedful.ops.common.tiles import in_blocks
from heedful.ops.grouped.groups import Groups


class Summaries(NamedTuple):
    """One key and one value per group, and one query where groups attend.

    k: `[B, Hk, M, D]`, rotated to the group's place where the model rotates.
    v: `[B, Hk, M, Dv]`.
    q: `[B, H, M, D]`; `None` with token queries.
    """

    k: Float[Tensor, "#B Hk M D"]
    v: Float[Tensor, "#B Hk M Dv"]
    q: Float[Tensor, "#B H M D"] | None = None


def gather_members(x: Float[Tensor, "#B T D"], groups: Groups) -> Float[Tensor, "#B M L D"]:
    """The rows of every group's members; of some token, or zero, where a group has fewer."""
    if groups.even:
        return in_blocks(x.mT, groups.longest, 0).movedim(1, -1)
    at = groups.members.at
    rows = max(len(x), len(at))
    flat = at.expand(rows, -1, -1).flatten(1)[..., None].expand(-1, -1, x.shape[2])
    return x.expand(rows, -1, -1).gather(1, flat).unflatten(1, at.shape[1:])


def gather_heads(x: Float[Tensor, "#B H T D"], groups: Groups) -> Float[Tensor, "#B M L H D"]:
    """The rows of every group's members, of every head."""
    rows = x.transpose(1, 2)
    return gather_members(rows.flatten(2), groups).unflatten(-1, rows.shape[2:])


def member_weights(
    groups: Groups, logits: Float[Tensor, "#B M L Hk"] | None = None
) -> Float[Tensor, "#B M L"] | Float[Tensor, "#B M L Hk"]:
    r"""Weight of each member: $w_{ij} = A_{ij} e^{z_{ij}} / \sum_i A_{ij} e^{z_{ij}}$.

    Arguments:
        groups: the memberships A.
        logits: z, per key head; `None` is 0.

    Returns:
        The weights, in the shape of the logits; zero in a group that is not there.
    """
    share = widen(groups.members.share)
    if logits is None:
        total = share.sum(-1, keepdim=True)
        return share / total.masked_fill(total == 0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    share = share.to(logits.dtype)[..., None]
    there = share > 0
    # A member of no share gets no weight, and no NaN on the way back through the logarithm.
    shifted = (logits + share.where(there, 1).log()).masked_fill(~there, float("-inf"))
    shifted = shifted.masked_fill(~there.any(2, keepdim=True), 0)
    return shifted.softmax(2).masked_fill(~there, 0)


def pooled(
    x: Float[Tensor, "#B M L H D"],
    weights: Float[Tensor, "#B M L"] | Float[Tensor, "#B M L Hk"],
) -> Float[Tensor, "#B H M D"]:
    """The weighted mean of every group's members; weights of each key head, or of all heads."""
    if weights.ndim == 4 and weights.shape[3] != x.shape[3]:
        weights = weights.repeat_interleave(x.shape[3] // weights.shape[3], dim=3)
    weights = weights.reshape(*weights.shape, *(1,) * (x.ndim - weights.ndim))
    out = (widen(x) * weights.to(torch.promote_types(x.dtype, torch.float32))).sum(2)
    return out.to(x.dtype).transpose(1, 2)


def summarise(
    k: Float[Tensor, "#B Hk T D"],
    v: Float[Tensor, "#B Hk T Dv"],
    groups: Groups,
    *,
    logits: Float[Tensor, "#B Hk T"] | None = None,
    q: Float[Tensor, "#B H T D"] | None = None,
) -> Summaries:
    r"""Every group's keys and values in one: the mean of its members, by learned weights.

    $$ \bar k_j = \sum_i w_{ij} k_i, \qquad
       w_{ij} = A_{ij} e^{z_i} / \sum_i A_{ij} e^{z_i} $$

    and the same for values, and for queries with group queries.

    Arguments:
        k, v: keys and values, `[B, Hk, T, D]` and `[B, Hk, T, Dv]`, before the rotary embedding
            where there is one: means of rotated keys would lose the fast frequencies.
        groups: the memberships A.
        logits: z, one number per key head and token; `None` is the mean.
        q: queries; pooled by the weights of their key head.

    Returns:
        `Summaries(k, v, q)`.

    Raises:
        ValueError: a shape does not fit.
    """
    if logits is not None:
        check_dense("logits", logits, "[B, Hk, T]")
        if logits.shape != k.shape[:3]:
            raise UserError(f"logits must be {list(k.shape[:3])}, got {shown(logits)}")
    groups.check(k.shape[0], k.shape[2])
    of_members = None if logits is None else gather_members(logits.mT, groups)
    weights = member_weights(groups, of_members)
    pool = [None if x is None else pooled(gather_heads(x, groups), weights) for x in (k, v, q)]
    return Summaries(*pool)


def member_attention(
    q: Float[Tensor, "#B T A"],
    k: Float[Tensor, "#B T A"],
    v: Float[Tensor, "#B T A"],
    groups: Groups,
) -> Float[Tensor, "#B M L A"]:
    r"""Attention output of each member inside its group, less its own value.

    $$ \Delta_{ij} = \sum_l p^{(j)}_{il} v_l - v_i, \qquad
       p^{(j)}_{i\cdot} = \mathrm{softmax}_l(q_i k_l^\top / \sqrt A + \log A_{lj}) $$

    The difference makes a group of one member nothing at all, whatever the parameters are. Both
    ways inside a group: its summary is out only when the group is complete.

    Arguments:
        q, k, v: small projections of every token, `[B, T, A]`.
        groups: the memberships.

    Returns:
        `[B, M, L, A]`, for every pair of a token and its group.
    """
    q, k, v = (gather_members(x, groups) for x in (q, k, v))
    share = widen(groups.members.share)
    there = share > 0
    logits = widen(q @ k.mT) * q.shape[-1] ** -0.5
    share = share.to(logits.dtype)
    logits = logits + share.where(there, 1).log()[..., None, :]
    logits = logits.masked_fill(~there[..., None, :], float("-inf"))
    logits = logits.masked_fill(~there.any(-1)[..., None, None], 0)
    received = logits.softmax(-1).to(v.dtype) @ v - v
    return received.masked_fill(~there[..., None], 0)
