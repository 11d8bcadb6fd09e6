"""Differential attention in memory linear in T: the maps of a pair as heads of one call."""

from jaxtyping import Float
from torch import Tensor

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
