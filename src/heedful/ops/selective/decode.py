"""Selective attention of a few new queries, as in cached decoding: one product more than standard.

One query is torch's own attention with -F as its mask; what it masks is one row more. Several
queries see what the ones before them in the same call have masked, so their map is dense.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.few import few_outputs, few_scores, few_weights, masked_from
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import cap_
from heedful.ops.selective.reference import may_mask


def selective_attention_few(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    selector_q: Float[Tensor, "B Hs Tq Ds"],
    selector_k: Float[Tensor, "B Hs Tk Ds"],
    state: Float[Tensor, "B Hs Ts"] | None,
    terms: Terms,
    *,
    tau: float | None,
    protect_first: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of `selective_attention`."""
    visibility, scale, bias, softcap, sinks, _ = terms
    queries, keys = q.shape[2], k.shape[2]
    masked = masked_from(visibility, queries, keys, q.device)
    masking = few_scores(selector_q, selector_k, scale).clamp_(min=0)
    if visibility.plain and queries == 1:
        masking[..., -1] = 0  # the token itself
        if protect_first:
            masking[..., 0] = 0
    else:
        masking.masked_fill_(~may_mask(protect_first, visibility, queries, keys, q)[:, None], 0)
    if state is None:
        state = masking.new_zeros(masking.shape[0], masking.shape[1], keys)
    elif state.shape[2] < keys:
        state = pad(state, (0, keys - state.shape[2]))
    if queries == 1:
        f = state[:, :, None]
        last = state + masking[:, :, 0]
    else:
        f = state[:, :, None] + masking.cumsum(2).sub_(masking)
        last = state + masking.sum(2)
    less = f if bias is None else f - bias
    plain = softcap is None and sinks is None
    if plain and queries == 1 and masked is None and scale > 0:
        output = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=(-less).to(q.dtype), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        logits = cap_(few_scores(q, k, scale), softcap)
        weights = few_weights(logits.sub_(less), masked, sinks)
        output = few_outputs(weights, v).to(q.dtype)
    memory = None
    if tau is not None:
        terms = f.clamp(max=tau)
        terms = terms if masked is None else masked.fill(terms, 0)
        memory = terms.sum((1, 3)) / f.shape[1]
    return output, last, memory
