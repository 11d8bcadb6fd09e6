"""Differential attention as its definition reads: dense, any precision, slow.

Ye et al., "Differential Transformer" (arXiv 2410.05258), equation 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.standard import masked_softmax
from heedful.ops.common.terms import Terms


def differential_attention_reference(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Pk Tk Dv"],
    lam: Float[Tensor, " P"],
    terms: Terms,
) -> Float[Tensor, "B P Tq Dv"]:
    """The operator of `differential_attention`, one line per step of its definition."""
    visibility, scale, bias, softcap, sinks, dropout = terms
    pairs, group = q.shape[1] // 2, q.shape[1] // k.shape[1]
    visible = visibility.dense(q.shape[2], k.shape[2], q.device)[:, None, None]
    q = q.unflatten(1, (pairs, 2))
    k = k.unflatten(1, (-1, 2)).repeat_interleave(group, dim=1)
    logits = (q @ k.mT * scale).to(torch.promote_types(q.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        bias = bias.to(logits.dtype).expand(-1, 2 * pairs, -1, -1)
        logits = logits + bias.unflatten(1, (pairs, 2))
    if sinks is not None:
        sinks = sinks.view(pairs, 2, 1, 1)
    p = masked_softmax(logits, visible, sinks)
    if dropout is not None:  # on both maps
        p = dropout.applied(p.flatten(1, 2)).unflatten(1, (pairs, 2))
    p = p[:, :, 0] - lam.to(p.dtype)[:, None, None] * p[:, :, 1]
    return p.to(q.dtype) @ v.repeat_interleave(group, dim=1)
