"""Multi-token attention by blocks as a custom operator: what `tiled` and the fused form share."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.autocast import without_autocast
from heedful.ops.impl import refuse_second_derivative
from heedful.ops.mta.blocks import Parameters, Steps, attend_backward
from heedful.ops.tiles import Field, Sight, gather_heads, spread_heads
from heedful.ops.visibility import Visibility


class Call(NamedTuple):
    """What the operator is called with."""

    q: Float[Tensor, "B H Tq D"]
    k: Float[Tensor, "B Hk Tk D"]
    v: Float[Tensor, "B Hk Tk Dv"]
    parameters: Parameters
    sight: Sight
    scale: float
    wide: bool  # the output in the precision of the sums, not in q's

    def field(self) -> Field:
        return Field(self.sight, self.q.shape[2], self.k.shape[2], self.q.device)


class Operands(NamedTuple):
    """As the blocks take them: key heads spread over query heads, parameters in fp32 or fp64."""

    q: Float[Tensor, "B H Tq D"]
    k: Float[Tensor, "B H Tk D"]
    v: Float[Tensor, "B H Tk Dv"]
    parameters: Parameters


def operands(call: Call, steps: Steps) -> Operands:
    """The call's tensors in the precisions in which these steps take them."""
    heads, wide = call.q.shape[1], torch.promote_types(call.q.dtype, torch.float32)
    q, k, v = (steps.operand(x) for x in call[:3])
    parameters = Parameters(*(None if x is None else x.to(wide) for x in call.parameters))
    return Operands(q, spread_heads(k, heads), spread_heads(v, heads), parameters)


def _output_dtype(q: Tensor, wide: bool) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32) if wide else q.dtype


def define(
    name: str,
    forward: Callable[[Call], Float[Tensor, "B H Tq Dv"]],
    steps_of: Callable[[Call], Steps],
) -> Callable[..., Float[Tensor, "B H Tq Dv"]]:
    """The custom operator `heedful::name` with its gradients, as the function that calls it.

    Arguments:
        forward: the output, contiguous.
        steps_of: the steps by which the backward recomputes the blocks.
    """

    @torch.library.custom_op(f"heedful::{name}", mutates_args=())
    def operator(
        q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
        mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None,
        mutual: Tensor | None, documents: bool, causal: bool, window: int | None, scale: float,
        wide: bool,
    ) -> Tensor:  # fmt: skip
        parameters = Parameters(conv, post_conv, mix, post_mix)
        sight = Sight(segments, documents, causal, window, mutual)
        out = forward(Call(q, k, v, parameters, sight, scale, wide))
        return out.to(_output_dtype(q, wide))

    @torch.library.custom_op(f"heedful::{name}_backward", mutates_args=())
    def backward_operator(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None,
        post_conv: Tensor | None, mix: Tensor | None, post_mix: Tensor | None,
        segments: Tensor | None, mutual: Tensor | None, documents: bool, causal: bool,
        window: int | None, scale: float, wide: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        parameters = Parameters(conv, post_conv, mix, post_mix)
        sight = Sight(segments, documents, causal, window, mutual)
        call = Call(q, k, v, parameters, sight, scale, wide)
        steps = steps_of(call)
        x = operands(call, steps)
        dq, dk, dv, sums = attend_backward(steps.operand(grad.to(q.dtype)), *x, steps, scale)
        grads = (dq, gather_heads(dk, k.shape[1]), gather_heads(dv, v.shape[1]), *sums)
        inputs = (q, k, v, *parameters)
        return tuple(
            q.new_empty(0) if x is None else g.to(x.dtype)
            for g, x in zip(grads, inputs, strict=True)
        )

    @operator.register_fake
    def _(q, k, v, *rest):
        return q.new_empty(*q.shape[:3], v.shape[3], dtype=_output_dtype(q, rest[-1]))

    @backward_operator.register_fake
    def _(grad, *inputs):
        empty = inputs[0].new_empty
        return tuple(empty(0) if x is None else x.new_empty(x.shape) for x in inputs[:7])

    refuse_second_derivative(backward_operator, "multi_token_attention")

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[:9])
        ctx.options = inputs[9:]

    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        grads = without_autocast(backward_operator)(grad, *tensors, *ctx.options)
        given = [None if x is None else g for x, g in zip(tensors[:7], grads, strict=True)]
        return *given, *[None] * 7

    operator.register_autograd(backward, setup_context=save)

    def run(
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
        wide: bool = False,
    ) -> Float[Tensor, "B H Tq Dv"]:
        """The operator of `multi_token_attention`; peak memory O(B H T (D + rows per block))."""
        return operator(
            q, k, v, conv, post_conv, mix, post_mix, visibility.segments(), visibility.mutual,
            visibility.documents is not None, visibility.causal, visibility.window, scale,
            wide,
        )  # fmt: skip

    return run
