"""Groups that a model learns: where they end (cif), or what they hold (slots).

What is learned comes in as one number or one vector per token; who predicts it is the layer's
business. Every token's number may depend on tokens up to it, never on later ones: then so do the
groups.
"""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.ops.common.checks import check_dense, shown
from heedful.ops.grouped.groups import (
    NEVER,
    NOBODY,
    Groups,
    Places,
    begin_and_last,
    check_length,
    count_of,
    places_of,
)
from heedful.ops.visibility import Visibility


def cif_groups(
    alpha: Float[Tensor, "#B T"], *, longest: int = 64, visibility: Visibility | None = None
) -> Groups:
    r"""Groups of equal weight: a token adds `alpha` to its group, and a full unit starts the next.

    $$ u_i = \sum_{l \le i} \alpha_l, \qquad
       A_{ij} = \left|[u_{i-1}, u_i] \cap [j, j + 1]\right| / \alpha_i $$

    (continuous integrate-and-fire). A token on the border belongs to two groups; the shares are
    piecewise linear in alpha, with exact gradients.

    Arguments:
        alpha: `[B, T]`, from `1 / longest` to 1; all ones are groups of one token.
        longest: so many tokens at least fill a group.
        visibility: documents and padding.

    Returns:
        The memberships, for `grouped_attention`; gradients reach `alpha`.

    Raises:
        ValueError: `alpha` is not `[B, T]`, or outside of its bounds.

    Source: Dong and Xu, "CIF: Continuous Integrate-and-Fire", arXiv 1905.11235, section 3.
    """
    _check_per_token("alpha", alpha, 2)
    check_length("longest", longest)
    _check_between("alpha", alpha, 1 / longest, 1, "1/longest + (1 - 1/longest) sigmoid(x) is")
    return cif_from(places_of(alpha.shape[1], visibility, alpha.device), alpha, longest)


def cif_from(
    places: Places,
    alpha: Float[Tensor, "#B T"],
    longest: int,
    begun: Float[Tensor, "#B T"] | None = None,
) -> Groups:
    """As `cif_groups`; `begun` is how full the open group of a token's document was before these.

    Sums are in fp64: in fp32 a long row's would have no digits left for the share on a border.
    """
    rows, tokens = alpha.shape
    real, first = places.real.expand(rows, -1), places.start.expand(rows, -1)
    token = torch.arange(tokens, device=alpha.device)
    each = alpha.double().where(real, 0)
    total = each.cumsum(1)
    u = total - (total - each).gather(1, first)  # from the first token of the document
    if begun is not None:
        u = u + begun
    before, level = (u - each).detach(), u.detach()
    # What rounding leaves of a unit is none: a group ends where its unit is full.
    now, full = before.add(1e-9).floor(), level.add(1e-9).floor()
    over = real & (full > now) & (level - full > 1e-9)  # its last part opens the next group
    newest = full.where(over | (full == now), full - 1).where(real, -1)
    previous = torch.nn.functional.pad(newest[:, :-1], (1, 0), value=-1).where(token > first, -1)
    opens = real & (newest > previous)
    number = opens.cumsum(1) - 1
    index = torch.stack([number - over.long(), number.where(over, NOBODY)], dim=-1)
    index = index.where(real[..., None], NOBODY)
    second = ((u - full) / each.where(real, 1)).where(over, 0)
    weight = torch.stack([(1 - second).where(real, 0), second], dim=-1)
    start, last = begin_and_last(opens, places)
    count = start.shape[1]
    end = torch.full((rows, count + 1), -1, device=alpha.device)
    for part in index.unbind(-1):
        at = part.where(part >= 0, count)
        end = end.scatter_reduce(1, at, token.expand(rows, -1), "amax")
    end = end[:, :count].where(start < NEVER, NEVER)
    filled = (full > now).gather(1, end.clamp(max=tokens - 1)) & ~_opened_at_its_end(index, end)
    complete = (end < last) | filled
    return Groups(index, weight, start, end, complete, min(longest + 1, tokens))


def _opened_at_its_end(
    index: Int[Tensor, "#B T 2"], end: Int[Tensor, "#B M"]
) -> Bool[Tensor, "#B M"]:
    """Whether the last token of a group is also its first, with a share in the one before."""
    second = index[..., 1].gather(1, end.clamp(max=index.shape[1] - 1))
    return second == torch.arange(end.shape[1], device=end.device)


def slot_groups(
    z: Float[Tensor, "#B T C"],
    *,
    block: int = 64,
    slots: int = 4,
    spread: float = 1.0,
    temperature: float = 1.0,
    rounds: int = 2,
    visibility: Visibility | None = None,
) -> Groups:
    r"""Soft clusters of the tokens of a block: equal parts of it at first, then means of `z`.

    $$ A_{ik} = \mathrm{softmax}_k\left(-\mu\,(p_i - k)^2 - |z_i - c_k|^2 / \tau\right), \qquad
       c_k = \sum_i A_{ik} z_i / \sum_i A_{ik} $$

    `rounds` times, the first A without z; $p_i$ runs from 0 to `slots - 1` over the block. A
    block's groups end with the block.

    Arguments:
        z: what is clustered, `[B, T, C]`.
        block: tokens that are clustered together.
        slots: groups of a block; one of one token each is no grouping at all.
        spread: $\mu$, how strongly place decides; 0 or more.
        temperature: $\tau$, above 0.
        rounds: how often the means are taken.
        visibility: documents and padding.

    Returns:
        The memberships, for `grouped_attention`.

    Raises:
        ValueError: `z` is not `[B, T, C]`, a number is out of range, more slots than tokens.
    """
    _check_per_token("z", z, 3)
    check_length("block", block)
    check_length("slots", slots)
    check_length("rounds", rounds, 0)
    for name, x, fits in (
        ("spread", spread, 0 <= spread < math.inf),
        ("temperature", temperature, 0 < temperature < math.inf),
    ):
        if not fits:
            least = "at least" if name == "spread" else "above"
            raise UserError(f"{name} must be a finite number of {least} 0, got {x}")
    if slots > block:
        raise UserError(f"slots must be at most the block's {block} tokens, got {slots}")
    places = places_of(z.shape[1], visibility, z.device)
    return slots_from(places, z, block, slots, spread, temperature, rounds)


def slots_from(
    places: Places,
    z: Float[Tensor, "#B T C"],
    block: int,
    slots: int,
    spread: float,
    temperature: float,
    rounds: int,
) -> Groups:
    """As `slot_groups`, where the tokens' places are known."""
    rows, tokens, _ = z.shape
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    real, position = (x.expand(rows, -1) for x in (places.real, places.position))
    opens = real & (position % block == 0)
    number = opens.cumsum(1) - 1  # of the block
    start, last = begin_and_last(opens, places, count_of(places, block))
    end = torch.minimum(start + block - 1, last).where(start < NEVER, NEVER)
    complete = end - start == block - 1

    place = torch.arange(min(block, tokens), device=z.device)
    at = (start[..., None] + place).clamp(max=tokens - 1)
    inside = (start[..., None] + place <= end[..., None]) & (start < NEVER)[..., None]
    members = z.gather(1, at.flatten(1)[..., None].expand(-1, -1, z.shape[2])).unflatten(
        1, at.shape[1:]
    )
    members = members.masked_fill(~inside[..., None], 0)
    slot = torch.arange(slots, device=z.device)
    # The token's place on the slots' scale: equal parts have their middle at whole numbers.
    prior = (place + 0.5) * slots / block - 0.5
    prior = -spread * (prior[:, None] - slot).square().to(z.dtype)
    share = prior.softmax(-1).expand(*at.shape, -1)
    for _ in range(rounds):
        weight_inside = share * inside[..., None]
        mean = (
            weight_inside.mT
            @ members
            / weight_inside.sum(-2)[..., None].clamp(min=torch.finfo(z.dtype).tiny)
        )
        apart = (members[..., None, :] - mean[..., None, :, :]).square().sum(-1)
        share = (prior - apart / temperature).softmax(-1)
    inner = number.clamp(min=0) * share.shape[2] + (position % block).clamp(max=share.shape[2] - 1)
    weight = share.flatten(1, 2).gather(1, inner[..., None].expand(-1, -1, slots))
    index = (number[..., None] * slots + slot).where(real[..., None], NOBODY)
    start, end, complete = (x.repeat_interleave(slots, dim=1) for x in (start, end, complete))
    weight = weight.masked_fill(~real[..., None], 0)
    return Groups(index, weight, start, end, complete, min(block, tokens))


def _check_per_token(name: str, x: object, ndim: int) -> None:
    what = "[B, T]" if ndim == 2 else "[B, T, C]"
    check_dense(name, x, what)
    if x.ndim != ndim or not x.is_floating_point():
        raise UserError(f"{name} must be a floating-point tensor {what}, got {shown(x)}")


def _check_between(name: str, x: Tensor, least: float, most: float, way_out: str) -> None:
    """Raise unless all numbers lie between these, to rounding; where a look is free."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or not x.numel():
        return
    low, high = x.detach().amin().item(), x.detach().amax().item()
    if not (low >= least - 1e-6 and high <= most + 1e-6):  # NaN is neither
        raise UserError(
            f"{name} must be from {least:.4g} to {most:.4g}, got {low:.4g} to {high:.4g}; {way_out}"
        )
