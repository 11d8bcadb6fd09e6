"""Groups that a model learns by where they end (cif).

What is learned comes in as one number per token; who predicts it is the layer's business. Every
token's number may depend on tokens up to it, never on later ones: then so do the groups.
"""

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
    check_dense("alpha", alpha, "[B, T]")
    if alpha.ndim != 2 or not alpha.is_floating_point():
        raise UserError(f"alpha must be a floating-point tensor [B, T], got {shown(alpha)}")
    check_length("longest", longest)
    if alpha.device.type == "cpu" and alpha.numel() and not torch.compiler.is_compiling():
        low, high = alpha.detach().amin().item(), alpha.detach().amax().item()
        if not (low >= 1 / longest - 1e-6 and high <= 1 + 1e-6):  # NaN is neither
            raise UserError(
                f"alpha must be from {1 / longest:.4g} to 1, got {low:.4g} to {high:.4g}; "
                "1/longest + (1 - 1/longest) sigmoid(x) is"
            )
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
    """Test whether the last token of a group is also its first, with a share in the one before."""
    second = index[..., 1].gather(1, end.clamp(max=index.shape[1] - 1))
    return second == torch.arange(end.shape[1], device=end.device)
