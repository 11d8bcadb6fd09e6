"""Selective attention as its definition reads: dense, any precision, slow.

Leviathan, Kalman, Matias, "Selective Attention Improves Transformer" (arXiv 2410.02703).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.ops.common.standard import masked_softmax
from heedful.ops.common.terms import Terms
from heedful.ops.visibility import Visibility

_ROWS = 64  # query rows whose products are in memory at once


def selective_attention_reference(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    selector_q: Float[Tensor, "B Hs Tq Ds"],
    selector_k: Float[Tensor, "B Hs Tk Ds"],
    state: Float[Tensor, "B Hs Tk"] | None,
    terms: Terms,
    *,
    tau: float | None,
    protect_first: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of `selective_attention`, one line per step of its definition."""
    visibility, scale, bias, softcap, sinks, dropout = terms
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    visible = visibility.dense(queries, keys, q.device)[:, None]
    masking = selection(selector_q, selector_k, protect_first, visibility, scale)
    before = 0 if state is None else state[:, :, None]
    f = before + masking.cumsum(2) - masking  # F counts strictly earlier queries, section 3

    logits = q @ k.repeat_interleave(heads // k.shape[1], dim=1).mT * scale
    f_less_bias = f if bias is None else f - bias.to(f.dtype)
    logits = logits.to(f.dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    sinks = None if sinks is None else sinks[:, None, None]
    p = masked_softmax(logits - f_less_bias, visible, sinks).to(q.dtype)
    p = p if dropout is None else dropout.applied(p)
    output = p @ v.repeat_interleave(heads // v.shape[1], dim=1)
    memory = None
    if tau is not None:
        memory = f.masked_fill(f > tau, tau).masked_fill(~visible, 0).sum((1, 3)) / f.shape[1]
    last = masking.sum(2)
    return output, last if state is None else state + last, memory


def selection(
    selector_q: Float[Tensor, "B Hs Tq Ds"],
    selector_k: Float[Tensor, "B Hs Tk Ds"],
    protect_first: bool,
    visibility: Visibility,
    scale: float,
) -> Float[Tensor, "B Hs Tq Tk"]:
    """S: how much query p masks key j from later queries (fp32 at least), never below zero.

    The ReLU comes after the visibility mask; the first token of each document and the token
    itself stay unhidden. At zero the slope of the ReLU is taken as 1, so that a selector that
    starts at zero can learn. (That of `clamp` is 1 in torch until 2.13 and 0 since.)
    """
    queries, keys = selector_q.shape[2], selector_k.shape[2]
    allowed = may_mask(protect_first, visibility, queries, keys, selector_q)
    logits = selector_q @ selector_k.mT * scale
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).masked_fill((logits < 0) | ~allowed[:, None], 0)


@torch.no_grad()
def mask_sums(
    selector_q: Float[Tensor, "B Hs Tq Ds"],
    selector_k: Float[Tensor, "B Hs Tk Ds"],
    protect_first: bool,
    visibility: Visibility,
    scale: float,
) -> Float[Tensor, "B Hs Tk"]:
    """The sum of `selection` over the queries: what they add to F. In blocks, without a gradient.

    The blocks end where the keys that they see do, so that a causal half is left out.
    """
    queries, keys = selector_q.shape[2], selector_k.shape[2]
    wide = torch.promote_types(selector_q.dtype, torch.float32)
    if queries <= _ROWS or visibility.queries is not None:
        return selection(selector_q, selector_k, protect_first, visibility, scale).sum(2)
    sums = selector_q.new_zeros(*selector_k.shape[:3], dtype=wide)
    for start in range(0, queries, _ROWS):
        stop = min(queries, start + _ROWS)
        seen = keys - queries + stop
        rows, part = selector_q[:, :, start:stop], visibility.part(0, seen)
        masking = selection(rows, selector_k[:, :, :seen], protect_first, part, scale)
        sums[:, :, :seen] += masking.sum(2)
    return sums


def may_mask(
    protect_first: bool, visibility: Visibility, queries: int, keys: int, like: Tensor
) -> Bool[Tensor, "B Tq Tk"]:
    """Mark where token p may mask j: p sees j, j is earlier, and not a protected first token."""
    allowed = visibility.dense(queries, keys, like.device)
    allowed = allowed & visibility.earlier(queries, keys, like.device)
    if protect_first:
        allowed = allowed & ~visibility.first_tokens(keys, like.device)[:, None]
    return allowed
