"""Multi-token attention while its parameters are the identity: standard attention, bit for bit."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.standard import standard_attention
from heedful.ops.common.tiles import Sight
from heedful.ops.mta.convolution import Parameters


def identity_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    sight: Sight,
    scale: float,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    two_sided: bool = False,
) -> Float[Tensor, "B H Tq Dv"] | None:
    """Attention by torch's own kernel; `None` where a parameter is no longer the identity.

    So a freshly converted model gives the very logits that it gave before. `None` too where the
    visibility needs a mask, and anywhere but on a CPU: there this look would stall the stream.
    """
    window = sight.window is not None and sight.window < k.shape[2]
    apart = (sight.segments, sight.mutual, sight.places)
    if q.device.type != "cpu" or window or any(x is not None for x in apart):
        return None
    if v.shape[3] != q.shape[3]:  # torch would take its dense path
        return None
    conv, post_conv, mix, post_mix = parameters
    if not all(x is None or _is_identity_kernel(x, two_sided) for x in (conv, post_conv)):
        return None
    if not all(x is None or bool((x == torch.eye(x.shape[1])).all()) for x in (mix, post_mix)):
        return None
    out = standard_attention(q, k, v, causal=sight.causal, scale=scale, bias=bias)
    return None if out is None else out.contiguous()


def _is_identity_kernel(kernel: Float[Tensor, "H cq ck"], two_sided: bool) -> bool:
    rows, columns = kernel.shape[1:]
    identity = torch.zeros(rows, columns)
    identity[rows // 2 if two_sided else -1, columns // 2] = 1
    return bool((kernel == identity).all())
