"""Multi-token attention of low rank as torch's own flash kernel for CPUs, and the band beside it.

Where the causal edge does not reach, the logits are those of ordinary attention (`wide`), and keys
at least a band's width back are a causal map again. Its output and the few logits of the band are
two shares of one softmax, each weighted by what it holds of the whole sum.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from heedful.ops.mta.low_rank import LowRank
from heedful.ops.mta.wide import near_values
from heedful.ops.products import widen
from heedful.ops.standard import with_positive_scale
from heedful.ops.tiles import Sight


def flash_attention(
    wide: LowRank, v: Float[Tensor, "B H Tk Dv"], sight: Sight
) -> Float[Tensor, "B H Tq Dv"] | None:
    """softmax(Conv(Mask_0(S))) V in the precision of the sums, without a tile in memory.

    `None` where torch has no such kernel: on other devices, for heads whose keys and values differ
    in width, and where visibility is more than causal order over as many queries as keys.
    """
    (queries, width), keys, band = wide.q.shape[2:], wide.k.shape[2], wide.band.width
    plain = sight.causal and sight.segments is None and sight.window is None and queries == keys
    if not plain or v.device.type != "cpu" or width != v.shape[3] or band >= keys:
        return None
    back = keys - band
    q, scale = with_positive_scale(wide.q[:, :, band:], wide.scale)
    far, far_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, wide.k[:, :, :back], v[:, :, :back], 0.0, True, scale=scale
    )  # and the logarithm of the sum of exponentials
    if band == 0:
        return widen(far).contiguous()
    far_sum = F.pad(widen(far_sum), (band, 0), value=float("-inf"))[..., None]  # b h i 1
    token = torch.arange(band, device=v.device)
    near = wide.band_logits.clone()
    near[:, :, :band].masked_fill_(token > token[:, None], float("-inf"))  # before the first key
    total = torch.logaddexp(near.logsumexp(-1, keepdim=True), far_sum)
    out = near_values((near - total).exp(), v)
    out[:, :, band:] += widen(far) * (far_sum - total)[:, :, band:].exp()
    return out
