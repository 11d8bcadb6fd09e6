"""Differential attention, fused: the maps of a pair as heads of one flash kernel."""

from jaxtyping import Float
from torch import Tensor

from heedful.ops.mta.fused.flash import flash
from heedful.ops.visibility import Visibility


def differential_attention_fused(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Pk Tk Dv"],
    lam: Float[Tensor, " P"],
    *,
    visibility: Visibility,
    scale: float,
) -> Float[Tensor, "B P Tq Dv"]:
    """The operator of `differential_attention` in Triton; the difference follows the values."""
    # Heads in the order (map, pair): the heads of a map stand beside their key heads, and both
    # key heads of a pair meet its values, which are never copied.
    q = q.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    k = k.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    # In fp32, as the difference of two near-equal outputs magnifies what rounding leaves.
    both = flash(q, k, v, None, visibility, scale, wide=True)
    first, second = both.chunk(2, dim=1)
    return (first - lam.to(both.dtype)[:, None, None] * second).to(q.dtype)
