"""Differential attention in memory linear in T: the maps of a pair as heads of one call."""

from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.few import few_outputs, few_queries, few_scores, few_weights, hidden_from
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
) -> Float[Tensor, "B P Tq Dv"]:
    """The operator of `differential_attention`; the difference is taken after the values."""
    if few_queries(q, k, (q, k, v, lam)):
        return _few(q, k, v, lam, visibility, scale)
    pairs, key_pairs = q.shape[1] // 2, k.shape[1] // 2
    group = pairs // key_pairs
    # Heads in the order (map, pair), so that every map's heads stand beside their key heads.
    q = q.unflatten(1, (pairs, 2)).transpose(1, 2).flatten(1, 2)
    k = k.unflatten(1, (key_pairs, 2)).repeat_interleave(group, dim=1).transpose(1, 2).flatten(1, 2)
    v = v.repeat_interleave(group, dim=1).repeat(1, 2, 1, 1)
    # In fp32, as the difference of two near-equal outputs magnifies what rounding leaves.
    both = multi_token_attention_tiled(
        q, k, v, conv=None, post_conv=None, mix=None, post_mix=None,
        visibility=visibility, scale=scale, wide=True,
    )  # fmt: skip
    first, second = both.chunk(2, dim=1)
    return (first - lam.to(both.dtype)[:, None, None] * second).to(q.dtype)


def _few(
    q: Tensor, k: Tensor, v: Tensor, lam: Tensor, visibility: Visibility, scale: float
) -> Tensor:
    """The same for a few queries, dense; here the difference is that of the maps."""
    key_pairs = k.shape[1] // 2
    hidden = hidden_from(visibility, q.shape[2], k.shape[2], q.device)
    # Heads in the order (key pair, map, pair of its group): each beside its key head.
    ordered = q.unflatten(1, (key_pairs, -1, 2)).transpose(2, 3).flatten(1, 3)
    weights = few_weights(few_scores(ordered, k, scale), hidden)
    first, second = weights.unflatten(1, (key_pairs, 2, -1)).unbind(2)
    lam = lam.to(weights.dtype).view(key_pairs, -1, 1, 1)
    return few_outputs((first - lam * second).flatten(1, 2), v).to(q.dtype)
