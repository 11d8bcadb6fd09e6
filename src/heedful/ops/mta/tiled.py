"""Multi-token attention in memory linear in T, in plain torch: the custom operators."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.autocast import without_autocast
from heedful.ops.mta.blocks import Parameters, attend, attend_backward
from heedful.ops.mta.identity import identity_attention
from heedful.ops.mta.low_rank import low_rank
from heedful.ops.mta.tile import TorchSteps
from heedful.ops.tiles import Field, Sight, gather_heads, spread_heads, widen
from heedful.ops.visibility import Visibility


def multi_token_attention_tiled(
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
    return _tiled(
        q, k, v, conv, post_conv, mix, post_mix, visibility.segments(),
        visibility.documents is not None, visibility.causal, visibility.window, scale,
    )  # fmt: skip


@torch.library.custom_op("heedful::multi_token_attention_tiled", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, documents: bool,
    causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    sight = Sight(segments, documents, causal, window)
    out = identity_attention(q, k, v, (conv, post_conv), (mix, post_mix), sight, scale)
    if out is not None:
        return out
    x = _prepare(q, k, v, conv, post_conv, mix, post_mix)
    steps = TorchSteps(Field(sight, q.shape[2], k.shape[2], q.device))
    wide = None if conv is None else low_rank(x.q, x.k, x.parameters.conv, sight, scale)
    return attend(*x, steps, scale, wide).to(q.dtype)


@_tiled.register_fake
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("heedful::multi_token_attention_tiled_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, documents: bool,
    causal: bool, window: int | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    inputs = (q, k, v, conv, post_conv, mix, post_mix)
    x = _prepare(*inputs)
    sight = Sight(segments, documents, causal, window)
    steps = TorchSteps(Field(sight, q.shape[2], k.shape[2], q.device))
    dq, dk, dv, sums = attend_backward(widen(grad), *x, steps, scale)
    grads = (dq, gather_heads(dk, k.shape[1]), gather_heads(dv, v.shape[1]), *sums)
    return [
        q.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
    ]


@_tiled_backward.register_fake
def _(grad, q, k, v, conv, post_conv, mix, post_mix, *_):
    inputs = (q, k, v, conv, post_conv, mix, post_mix)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


class _Inputs(NamedTuple):
    """Widened, with key heads spread over query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    parameters: Parameters


def _prepare(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor | None) -> _Inputs:
    heads, q = q.shape[1], widen(q)
    k, v = spread_heads(widen(k), heads), spread_heads(widen(v), heads)
    return _Inputs(q, k, v, Parameters(*(None if x is None else x.to(q.dtype) for x in parameters)))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    grads = without_autocast(_tiled_backward)(grad, *tensors, *ctx.options)
    given = [None if x is None else g for x, g in zip(tensors[:7], grads, strict=True)]
    return *given, None, None, None, None, None


_tiled.register_autograd(_backward, setup_context=_save)
