"""Differential attention in memory linear in T: the maps of a pair as heads of one call."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.few import few_outputs, few_queries, few_scores, few_weights, masked_from
from heedful.ops.common.precision import widen
from heedful.ops.common.standard import standard_attention
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import cap_
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.tiled import multi_token_attention_tiled
from heedful.ops.visibility import Visibility


def differential_attention_tiled(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Pk Tk Dv"],
    lam: Float[Tensor, " P"],
    terms: Terms,
    *,
    composed: bool = False,
) -> Float[Tensor, "B P Tq Dv"]:
    """The operator of `differential_attention`; the difference is taken after the values.

    If `composed` by torch's own attention where that serves, else in a GPU's blocks; if not, in a
    CPU's.
    """
    if terms.dropout is None and few_queries(q, k, (q, k, v, lam, *terms.learned)):
        return _few(q, k, v, lam, terms)
    # In fp32, as the difference of two near-equal outputs magnifies what rounding leaves.
    options = {"impl": "composed" if composed else "tiled", "wide": True}
    if terms.bias is not None and terms.bias.shape[1] > 1:
        # In a call for each map: a bias per head, as large as all maps, is never copied.
        first, second = (
            multi_token_attention_tiled(
                q[:, i::2], k[:, i::2], v, Parameters(), _of_heads(terms, slice(i, None, 2)),
                **options,
            )
            for i in (0, 1)
        )  # fmt: skip
        return _difference(first, second, lam).to(q.dtype)
    if composed and terms.plain and _plain(q, k, v, terms.visibility):
        return _by_sdpa(q, k, v, lam, terms.visibility.causal, terms.scale)
    pairs, key_pairs = q.shape[1] // 2, k.shape[1] // 2
    group = pairs // key_pairs
    q = _by_map(q)
    k = _by_map(k.unflatten(1, (-1, 2)).repeat_interleave(group, dim=1).flatten(1, 2))
    v = v.repeat_interleave(group, dim=1).repeat(1, 2, 1, 1)
    if terms.sinks is not None or terms.dropout is not None:
        terms = _of_heads(terms, torch.arange(2 * pairs, device=q.device).view(-1, 2).mT.flatten())
    both = multi_token_attention_tiled(q, k, v, Parameters(), terms, **options)
    return _difference(*both.chunk(2, dim=1), lam).to(q.dtype)


def _difference(first: Tensor, second: Tensor, lam: Tensor) -> Float[Tensor, "B P Tq Dv"]:
    return first - lam.to(first.dtype)[:, None, None] * second


def _of_heads(terms: Terms, order: slice | Tensor) -> Terms:
    """Terms of some of the heads, or of all in another order."""
    bias, sinks, dropout = terms.bias, terms.sinks, terms.dropout
    return terms._replace(
        bias=bias if bias is None or bias.shape[1] == 1 else bias[:, order],
        sinks=None if sinks is None else sinks[order],
        dropout=None if dropout is None else dropout._replace(heads=dropout.heads[order]),
    )


def _plain(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> bool:
    """Test whether torch's own attention computes these maps without a mask in memory."""
    dim = q.shape[3]
    aligned = dim * q.element_size() % 16 == 0 and v.shape[3] % dim == 0
    return visibility.plain and aligned and (q.shape[2] == k.shape[2] or not visibility.causal)


def _by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, causal: bool, scale: float
) -> Float[Tensor, "B P Tq Dv"]:
    """The same by torch's own attention, whose fast kernels want values as wide as keys."""
    q, k, v = _by_map(q), _by_map(k), v.repeat(1, 2, 1, 1)
    parts = [
        standard_attention(q, k, part, causal=causal, scale=scale)
        for part in v.split(q.shape[3], dim=3)
    ]
    return _difference(*widen(torch.cat(parts, dim=3)).chunk(2, dim=1), lam).to(q.dtype)


def _by_map(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Heads in the order (map, pair), so that every map's heads stand beside their key heads."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _few(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, terms: Terms) -> Tensor:
    """The same for a few queries, dense; here the difference is that of the maps."""
    visibility, scale, bias, softcap, sinks, _ = terms
    key_pairs = k.shape[1] // 2
    masked = masked_from(visibility, q.shape[2], k.shape[2], q.device)
    # Heads in the order (key pair, map, pair of its group): each beside its key head.
    logits = cap_(few_scores(_by_key_pair(q, key_pairs), k, scale), softcap)
    if bias is not None:
        logits += bias if bias.shape[1] == 1 else _by_key_pair(bias, key_pairs)
    sinks = None if sinks is None else _by_key_pair(sinks[None], key_pairs)[0]
    weights = few_weights(logits, masked, sinks)
    first, second = weights.unflatten(1, (key_pairs, 2, -1)).unbind(2)
    lam = lam.to(weights.dtype).view(key_pairs, -1, 1, 1)
    return few_outputs((first - lam * second).flatten(1, 2), v).to(q.dtype)


def _by_key_pair(x: Float[Tensor, "B H ..."], key_pairs: int) -> Float[Tensor, "B H ..."]:
    """Heads in the order (key pair, map, pair of its group)."""
    return x.unflatten(1, (key_pairs, -1, 2)).transpose(2, 3).flatten(1, 3)
