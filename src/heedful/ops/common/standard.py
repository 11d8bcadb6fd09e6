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
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
) -> Float[Tensor, "B H Tq Dv"] | None:
    """SDPA under causal order or none; `None` where that takes a mask of size Tq x Tk.

    With a bias, which is of that size, SDPA's mask is that bias.
    """
    queries, keys = q.shape[2], k.shape[2]
    # SDPA's is_causal aligns unequal lengths at the top, a Visibility at the bottom.
    if causal and queries != keys and queries != 1:
        return None
    if scale is not None:
        q, scale = with_positive_scale(q, scale)
    if bias is not None:
        bias = bias.to(q.dtype)
        if causal and queries > 1:
            token = torch.arange(keys, device=q.device)
            bias = bias.masked_fill(token > token[:, None], float("-inf"))
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return torch.nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        is_causal=causal if queries > 1 else False,  # a bool also where the length is symbolic
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def with_positive_scale(
    q: Float[Tensor, "B H Tq D"], scale: float
) -> tuple[Float[Tensor, "B H Tq D"], float]:
    """Queries and scale of the same logits, for torch's kernels.

    They mask before they scale: minus infinity times zero or less would hide nothing.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
