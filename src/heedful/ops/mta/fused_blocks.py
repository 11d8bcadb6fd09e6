"""Multi-token attention with head mixing, or with a convolution after the softmax, on a GPU.

Mixing joins all heads of a group and what follows the softmax joins rows, so no tile stands for
itself as in flash attention. The blocks of `blocks.py` stay in a GPU's second-level cache instead:
library matrix products, with Triton between them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.autocast import without_autocast
from heedful.ops.mta.blocks import Parameters, attend, attend_backward
from heedful.ops.mta.fused_steps import TritonSteps
from heedful.ops.tiles import Field, Sight, gather_heads, spread_heads
from heedful.ops.visibility import Visibility


def multi_token_attention_blocks(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    *,
    conv: Float[Tensor, "H cq ck"] | None,
    post_conv: Float[Tensor, "H cq2 ck2"] | None,
    mix: Float[Tensor, "n g g"] | None,
    post_mix: Float[Tensor, "n2 g2 g2"] | None,
    visibility: Visibility,
    scale: float,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `multi_token_attention`; peak memory O(B H T (D + rows per block))."""
    return _fused(
        q, k, v, conv, post_conv, mix, post_mix, visibility.segments(),
        visibility.documents is not None, visibility.causal, visibility.window, scale,
    )  # fmt: skip


@torch.library.custom_op("heedful::multi_token_attention_fused_blocks", mutates_args=())
def _fused(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, documents: bool,
    causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    heads, sight = q.shape[1], Sight(segments, documents, causal, window)
    steps = TritonSteps(Field(sight, q.shape[2], k.shape[2], q.device), q.dtype)
    parameters = _wide(conv, post_conv, mix, post_mix)
    out = attend(q, spread_heads(k, heads), spread_heads(v, heads), parameters, steps, scale)
    return out.to(q.dtype)


@_fused.register_fake
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("heedful::multi_token_attention_fused_blocks_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, documents: bool,
    causal: bool, window: int | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    inputs = (q, k, v, conv, post_conv, mix, post_mix)
    heads, sight = q.shape[1], Sight(segments, documents, causal, window)
    steps = TritonSteps(Field(sight, q.shape[2], k.shape[2], q.device), q.dtype)
    parameters = _wide(conv, post_conv, mix, post_mix)
    dq, dk, dv, sums = attend_backward(
        grad, q, spread_heads(k, heads), spread_heads(v, heads), parameters, steps, scale
    )
    grads = (dq, gather_heads(dk, k.shape[1]), gather_heads(dv, v.shape[1]), *sums)
    return [
        q.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
    ]


@_fused_backward.register_fake
def _(grad, q, k, v, conv, post_conv, mix, post_mix, *_):
    inputs = (q, k, v, conv, post_conv, mix, post_mix)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _wide(*parameters: Tensor | None) -> Parameters:
    return Parameters(*(None if x is None else x.to(torch.float32) for x in parameters))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    grads = without_autocast(_fused_backward)(grad, *tensors, *ctx.options)
    given = [None if x is None else g for x, g in zip(tensors[:7], grads, strict=True)]
    return *given, None, None, None, None, None


_fused.register_autograd(_backward, setup_context=_save)
