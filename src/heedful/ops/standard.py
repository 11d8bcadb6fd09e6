"""Standard softmax attention: torch's own, where it needs no mask in memory."""

import torch
from jaxtyping import Float
from torch import Tensor


def standard_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    *,
    causal: bool,
    scale: float | None,
) -> Float[Tensor, "B H Tq Dv"] | None:
    """SDPA under causal order or none; `None` where that takes a mask of size Tq x Tk."""
    queries, keys = q.shape[2], k.shape[2]
    # SDPA's is_causal aligns unequal lengths at the top, a Visibility at the bottom.
    if causal and queries != keys and queries != 1:
        return None
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=causal if queries > 1 else False,  # a bool also where the length is symbolic
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
