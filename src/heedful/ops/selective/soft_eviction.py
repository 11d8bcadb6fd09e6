"""Contents of a cache that evicts the most masked tokens, in differentiable form."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

AGE = 1e-5  # of F, for each token by which a key is older: it decides between equals
_WIDTH = 0.3  # of the sigmoid that evicts, in standard deviations of F
_LEAST_WIDTH = 30 * AGE
_HALVINGS = 26


def cached_shares(
    f: Float[Tensor, "N C T"],
    visible: Bool[Tensor, "N C T"],
    tokens: int,
    sinks: int = 4,
    recent: int = 8,
) -> Float[Tensor, "N C T"]:
    r"""Share of each token that is still in a cache that evicts after each of C chunks.

    $$ a_{cj} = \min\Big(a_{c-1,j}, \sigma\Big(\frac{\theta_c - F_{cj}}{w_c}\Big)\Big),
       \qquad \sum_j a_{cj} = n $$

    with $w_c$ 0.3 of F's standard deviation over the tokens that are still there. The threshold
    $\theta_c$ follows from the sum and has its gradient: one token stays at the cost of others, so
    that an order is learned and no scale. The gradient's tails are heavier than the sigmoid's: a
    token that should have stayed is often far from the threshold. As in a cache, what has been
    evicted does not come back, of equals the oldest go, and the first and the newest tokens stay.

    Arguments:
        f: how strongly each token is masked after each chunk.
        visible: which tokens the last query of each chunk sees.
        tokens: n.
        sinks, recent: how many of the first and of the newest visible tokens stay whatever their F.

    Returns:
        The shares: 1 for a token that is cached, 0 for one that has been evicted.
    """
    age = AGE * torch.arange(f.shape[2] - 1, -1, -1, device=f.device, dtype=f.dtype)
    cached, shares = torch.ones_like(f[:, 0]), []
    for level, view in zip((f + age).unbind(1), visible.unbind(1), strict=True):
        full = view.sum(-1, keepdim=True) > tokens
        if full.any():
            oldest, newest = view.cumsum(-1), view.flip(-1).cumsum(-1).flip(-1)
            free = view & (oldest > sinks) & (newest > recent) & full
            room = (tokens - (view & ~free).sum(-1, keepdim=True)).clamp(min=0)
            lowest = _lowest(level, cached.detach(), free, room)
            cached = torch.where(free, cached.minimum(lowest), cached)
        shares.append(cached)
    return torch.stack(shares, 1)


@torch.no_grad()
def cached_tokens(
    f: Float[Tensor, "N C T"],
    visible: Bool[Tensor, "N C T"],
    tokens: int,
    sinks: int = 4,
    recent: int = 8,
) -> Bool[Tensor, "N C T"]:
    """Mark the tokens in a cache that evicts after each of C chunks, without a gradient.

    Arguments as for `cached_shares`, whose shares these are where the sigmoid is a step.
    """
    age = AGE * torch.arange(f.shape[2] - 1, -1, -1, device=f.device, dtype=f.dtype)
    cached, states = torch.ones_like(visible[:, 0]), []
    for level, view in zip((f + age).unbind(1), visible.unbind(1), strict=True):
        oldest, newest = view.cumsum(-1), view.flip(-1).cumsum(-1).flip(-1)
        stays = (oldest <= sinks) | (newest <= recent)
        level = level.masked_fill(stays, -torch.inf)
        level = level.masked_fill(~(view & cached), torch.inf)
        lowest = level.sort(dim=-1, stable=True).indices.argsort(dim=-1) < tokens
        cached = torch.where(view, cached & lowest, cached)
        states.append(cached)
    return torch.stack(states, 1)


def _lowest(
    level: Float[Tensor, "N T"],
    cached: Float[Tensor, "N T"],
    free: Bool[Tensor, "N T"],
    room: Int[Tensor, "N 1"],
) -> Float[Tensor, "N T"]:
    """A sigmoid that is high where the level is low, so that `room` of the free tokens stay."""
    with torch.no_grad():
        weight = cached * free
        count = weight.sum(-1, keepdim=True).clamp(min=1)
        mean = (level * weight).sum(-1, keepdim=True) / count
        spread = ((level - mean) ** 2 * weight).sum(-1, keepdim=True).div(count).sqrt()
        width = (_WIDTH * spread).clamp(min=_LEAST_WIDTH)
        z = level / width
        low, high = z.amin(-1, keepdim=True) - 30, z.amax(-1, keepdim=True) + 30
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            over = (torch.sigmoid(middle - z).minimum(cached) * free).sum(-1, keepdim=True) > room
            low, high = torch.where(over, low, middle), torch.where(over, middle, high)
        threshold = (low + high) / 2
        share = torch.sigmoid(threshold - z)
        slope = _slope(threshold - z)
        part = slope * free * (share < cached)
        part = part / part.sum(-1, keepdim=True).clamp(min=1e-9)
    change = (level - level.detach()) / width  # zero, with the gradient of z
    return share + slope * ((part * change).sum(-1, keepdim=True) - change)


def _slope(z: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """In place of the sigmoid's: also a token far behind the threshold can be learned to stay."""
    return 0.25 / (1 + z.abs() / 2) ** 2
