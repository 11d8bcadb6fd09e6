"""Standard softmax attention: torch's own, where it needs no mask in memory."""

import torch
from jaxtyping import Bool, Float
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
    if scale is not None and not scale > 0:
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


def masked_softmax(
    logits: Float[Tensor, "*lead Tq Tk"],
    visible: Bool[Tensor, "*#lead Tq Tk"],
    sinks: Float[Tensor, "*#heads 1 1"] | None,
) -> Float[Tensor, "*lead Tq Tk"]:
    """Softmax over what is visible, and over a sink if there is one, whose weight is dropped.

    Rows that see nothing become zero.
    """
    logits = logits.masked_fill(~visible, float("-inf"))
    logits = torch.where(visible.any(-1, keepdim=True), logits, 0)
    if sinks is None:
        return logits.softmax(-1).masked_fill(~visible, 0)
    sinks = sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1)
    return weights[..., :-1].masked_fill(~visible, 0)


def with_positive_scale(
    q: Float[Tensor, "B H Tq D"], scale: float
) -> tuple[Float[Tensor, "B H Tq D"], float]:
    """Queries and scale of the same logits, for torch's kernels.

    They mask before they scale: minus infinity times zero or less would mask nothing.
    """
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
