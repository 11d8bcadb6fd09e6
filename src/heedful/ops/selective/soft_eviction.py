"""Eviction of the most hidden tokens in a form that has a gradient, for training."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import softplus

SHARPNESS = 5.0  # at rank 2n a token has lost that many nats
_LEAST_SPREAD = 0.05  # of F between ranks n and 2n: where many tie, slopes stay finite


def soft_eviction(
    f: Float[Tensor, "B Hs Tq Tk"], visible: Bool[Tensor, "#B #Hs Tq Tk"], tokens: int
) -> Float[Tensor, "B Hs Tq Tk"]:
    r"""What to add to the logits so that each query attends to about its n least hidden tokens.

    $$ b_{ij} = -\mathrm{softplus}\left(a\,\frac{F_{ij} - F_{i(n)}}{F_{i(2n)} - F_{i(n)}}\right) $$

    where $F_{i(n)}$ is the n-th smallest F that query i sees, and a the sharpness. A token of rank
    n loses ln 2 nats, one of rank 2n about a, one that a cache of n tokens surely keeps nothing.
    The two quantiles have no gradient, so that only the order of tokens can be learned, and not a
    scale that would make all of them equal.

    Arguments:
        f: how much each token is hidden.
        visible: who sees whom; what it hides does not count.
        tokens: n, of the cache that is imitated.
    """
    keys = f.shape[-1]
    seen = f.detach().masked_fill(~visible, torch.inf)
    if tokens >= keys:
        return torch.zeros_like(f)
    threshold = seen.kthvalue(tokens, dim=-1, keepdim=True).values
    most = f.detach().masked_fill(~visible, 0).amax(-1, keepdim=True)
    beyond = seen.kthvalue(min(2 * tokens, keys), dim=-1, keepdim=True).values.minimum(most)
    spread = (beyond - threshold).clamp(min=_LEAST_SPREAD)
    # A query that sees no more than n tokens has no threshold, and loses none.
    full = threshold.isinf()
    gap = (f - threshold.masked_fill(full, 0)) / spread
    return -softplus(SHARPNESS * gap).masked_fill(full, 0)
