"""Eviction of the most hidden tokens in a form that has a gradient, for training."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

AGE = 1e-5  # of F, for each token by which a key is older: it decides between equals
SHARPNESS = 8.0  # at rank 2n a token has lost that many nats
_LEAST_SLOPE_WIDTH = 0.1  # of F between ranks n and 2n, in the gradient: many tie at zero


def soft_eviction(
    f: Float[Tensor, "B Hs Tq Tk"],
    visible: Bool[Tensor, "#B #Hs Tq Tk"],
    tokens: int,
    age: float = AGE,
    sinks: int = 4,
    recent: int = 8,
) -> Float[Tensor, "B Hs Tq Tk"]:
    r"""What to add to the logits so that each query attends to about its n least hidden tokens.

    $$ b_{ij} = -\mathrm{softplus}\left(a\,\frac{F_{ij} - F_{i(n)}}{F_{i(2n)} - F_{i(n)}}\right) $$

    where $F_{i(n)}$ is the n-th smallest F that query i sees, and a the sharpness. A token of rank
    n loses ln 2 nats, one of rank 2n about a: what a cache of n tokens would have evicted is gone.
    The two quantiles have no gradient, so that only the order of tokens can be learned, and not a
    scale that would make all of them equal.

    Arguments:
        f: how much each token is hidden.
        visible: who sees whom; what it hides does not count.
        tokens: n, of the cache that is imitated.
        age: added to F for each token by which a key is older. Without it a layer that hides
            nothing would evict nothing, where a cache of n tokens evicts all the same.
        sinks, recent: how many of the first and of the newest tokens that a query sees are kept
            whatever their F, as an eviction policy keeps them.
    """
    keys = f.shape[-1]
    if tokens >= keys:
        return torch.zeros_like(f)
    old = torch.arange(keys - 1, -1, -1, device=f.device, dtype=f.dtype)
    level = f.detach() + age * old
    first, last = visible.cumsum(-1) <= sinks, visible.flip(-1).cumsum(-1).flip(-1) <= recent
    level = level.masked_fill((first | last) & visible, -1.0)
    seen = level.masked_fill(~visible, torch.inf)
    threshold = seen.kthvalue(tokens, dim=-1, keepdim=True).values
    beyond = seen.kthvalue(min(2 * tokens, keys), dim=-1, keepdim=True).values
    most = level.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    # A query that sees no more than n tokens has no threshold, and loses none.
    full = threshold.isinf()
    threshold = threshold.masked_fill(full, 0)
    width = (beyond.minimum(most) - threshold).masked_fill(full, 1).clamp(min=1e-9)
    gap = (level - threshold) / width
    gap = gap + (f - f.detach()) / width.clamp(min=_LEAST_SLOPE_WIDTH)
    return -softplus(SHARPNESS * gap).masked_fill(full | first | last, 0)
