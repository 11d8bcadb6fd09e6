"""Differential attention in memory linear in T: the maps of a pair as heads of one call."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.dropout import Dropout
from heedful.ops.common.few import few_outputs, few_queries, few_scores, few_weights, hidden_from
from heedful.ops.common.precision import widen
from heedful.ops.common.standard import standard_attention
from heedful.ops.common.tiles import cap_
from heedful.ops.mta.tiled import multi_token_attention_tiled
from heedful.ops.visibility import Visibility


def differential_attention_tiled(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Pk Tk Dv"],
    lam: Float[Tensor, " P"],
    *,
    visibility: Visibility,
    scale: float,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: Dropout | None = None,
    composed: bool = False,
) -> Float[Tensor, "B P Tq Dv"]:
    """The operator of `differential_attention`; the difference is taken after the values.

    If `composed` by torch's own attention where that serves, else in a GPU's blocks; if not, in a
    CPU's.
    """
    if dropout is None and few_queries(q, k, (q, k, v, lam, bias, sinks)):
        return _few(q, k, v, lam, visibility, scale, bias, softcap, sinks)
    impl = "composed" if composed else "tiled"
    if bias is not None and bias.shape[1] > 1:
        return _map_by_map(q, k, v, lam, visibility, scale, bias, softcap, sinks, dropout, impl)
    if composed and bias is softcap is sinks is dropout is None and _plain(q, k, v, visibility):
        return _by_sdpa(q, k, v, lam, visibility.causal, scale)
    pairs, key_pairs = q.shape[1] // 2, k.shape[1] // 2
    group = pairs // key_pairs
    q = _by_map(q)
    k = _by_map(k.unflatten(1, (-1, 2)).repeat_interleave(group, dim=1).flatten(1, 2))
    v = v.repeat_interleave(group, dim=1).repeat(1, 2, 1, 1)
    sinks = None if sinks is None else torch.cat([sinks[0::2], sinks[1::2]])
    if dropout is not None:
        head = torch.arange(2 * pairs, device=q.device)
        dropout = dropout.of_heads(torch.cat([head[0::2], head[1::2]]))
    # In fp32, as the difference of two near-equal outputs magnifies what rounding leaves.
    both = multi_token_attention_tiled(
        q, k, v, conv=None, post_conv=None, mix=None, post_mix=None,
        visibility=visibility, scale=scale, bias=bias, softcap=softcap, sinks=sinks,
        dropout=dropout, impl=impl, wide=True,
    )  # fmt: skip
    first, second = both.chunk(2, dim=1)
    return (first - lam.to(both.dtype)[:, None, None] * second).to(q.dtype)


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
    first, second = widen(torch.cat(parts, dim=3)).chunk(2, dim=1)
    return (first - lam.to(first.dtype)[:, None, None] * second).to(q.dtype)


def _by_map(x: Float[Tensor, "B H T D"]) -> Float[Tensor, "B H T D"]:
    """Heads in the order (map, pair), so that every map's heads stand beside their key heads."""
    return x.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def _map_by_map(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, visibility: Visibility, scale: float,
    bias: Tensor, softcap: float | None, sinks: Tensor | None, dropout: Dropout | None,
    impl: str,
) -> Tensor:  # fmt: skip
    """The same in a call for each map: a bias per head, as large as all maps, is never copied."""
    first, second = (
        multi_token_attention_tiled(
            q[:, i::2], k[:, i::2], v, conv=None, post_conv=None, mix=None, post_mix=None,
            visibility=visibility, scale=scale, bias=bias[:, i::2], softcap=softcap,
            sinks=None if sinks is None else sinks[i::2], impl=impl, wide=True,
            dropout=None if dropout is None else dropout.of_heads(slice(i, None, 2)),
        )
        for i in (0, 1)
    )  # fmt: skip
    return (first - lam.to(first.dtype)[:, None, None] * second).to(q.dtype)


def _few(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, visibility: Visibility, scale: float,
    bias: Tensor | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same for a few queries, dense; here the difference is that of the maps."""
    key_pairs = k.shape[1] // 2
    hidden = hidden_from(visibility, q.shape[2], k.shape[2], q.device)
    # Heads in the order (key pair, map, pair of its group): each beside its key head.
    logits = cap_(few_scores(_by_key_pair(q, key_pairs), k, scale), softcap)
    if bias is not None:
        logits += bias if bias.shape[1] == 1 else _by_key_pair(bias, key_pairs)
    sinks = None if sinks is None else _by_key_pair(sinks[None], key_pairs)[0]
    weights = few_weights(logits, hidden, sinks)
    first, second = weights.unflatten(1, (key_pairs, 2, -1)).unbind(2)
    lam = lam.to(weights.dtype).view(key_pairs, -1, 1, 1)
    return few_outputs((first - lam * second).flatten(1, 2), v).to(q.dtype)


def _by_key_pair(x: Float[Tensor, "B H ..."], key_pairs: int) -> Float[Tensor, "B H ..."]:
    """Heads in the order (key pair, map, pair of its group)."""
    return x.unflatten(1, (key_pairs, -1, 2)).transpose(2, 3).flatten(1, 3)
