"""Multi-token attention on a GPU.

Head mixing joins all heads of a group, and what follows the softmax joins rows, so no tile stands
for itself as in flash attention. Instead the row blocks of tiled.py pass from one GPU kernel to the
next, by way of the second-level cache where they fit: library matrix products, with Triton between
them.

Tiles are `[B, H, rows, columns]`, contiguous, in the inputs' precision: what the published code
rounds to between its steps, and half the memory of fp32. The logits that enter the softmax are
fp32, and so are all sums, those over row blocks included. Every GPU kernel sees to
mask, missing rows and documents itself, so that no tile is padded or copied for it.
"""

from typing import Any, NamedTuple

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.precision import widen, without_autocast
from heedful.ops.common.tiles import Scope, Sight
from heedful.ops.impl import refuse_second_derivative
from heedful.ops.mta.convolution import Parameters, Softmax, TileSteps, grouped, mix
from heedful.ops.mta.fused.block_kernels import (
    WIDTH,
    blank_kernel,
    convolve_kernel,
    kernel_gradient_kernel,
    softmax_backward_kernel,
    softmax_kernel,
)
from heedful.ops.mta.tiled import (
    attend,
    gradients,
    gradients_fake,
    operands,
    output_dtype,
    save,
    where_given,
)
from heedful.ops.visibility import Visibility

TILE = 2**22  # entries per batch row; fewer would leave a GPU waiting for its launches
# Rows of a block: with fewer, most of the work would go into the rows around them that a
# convolution reads, and more would not fit beside q, k and v.
LEAST, MOST = 32, 64


class BlockLaunch(NamedTuple):
    """Block of a tile per program, its warps, and rows of a convolution's block."""

    rows: int
    columns: int
    warps: int
    convolved: int


def block_launch() -> BlockLaunch:
    """Blocks of 8 x 128: wide enough for whole cache lines, small enough for registers."""
    return BlockLaunch(8, 128, 4, 64)


class TritonSteps(TileSteps):
    """The steps of convolution.py with tiles in the inputs' precision, `dtype`."""

    def __init__(self, scope: Scope, dtype: torch.dtype) -> None:
        super().__init__(scope)
        self._dtype = dtype
        segments, sight = scope.sight.segments, scope.sight
        self._segments = None if segments is None else segments.to(torch.int32).contiguous()
        several = segments is not None and len(segments) > 1
        self._tokens = {"tokens": scope.keys, "row_stride": scope.keys if several else 0}
        self._mask = {"CAUSAL": sight.causal, "WINDOW": sight.window or 0}
        self._mask |= {"SEGMENTS": segments is not None} | self._tokens

    def operand(self, x: Tensor) -> Tensor:
        return x

    def folded(self, parameters: Parameters, scale: float) -> tuple[Parameters, float]:
        return parameters, scale

    def rows_per_block(self, heads: int) -> int:
        """32 or 64, by the size of a tile; the batch has no say."""
        entries = heads * min(self.scope.keys, self.scope.sight.window or self.scope.keys)
        return MOST if MOST * entries <= TILE else LEAST

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """Rounded nowhere: a GPU's library adds up in fp32 anyway, and writes what it has."""
        if a.is_cuda and a.element_size() == 2:
            flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
            return flat.unflatten(0, a.shape[:2])
        return widen(a) @ widen(b)

    def add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        out.add_(self.product(a, b))

    def tile(self, a: Tensor, b: Tensor, *, mixed: bool = False) -> Tensor:
        return a @ b

    def scores(self, q: Tensor, k: Tensor, scale: float, *, last: bool) -> Tensor:
        if last:
            return self.product(q, k.mT).mul_(scale)
        x = q.new_empty(*q.shape[:3], k.shape[2])
        flat = x.flatten(0, 1)  # the factor costs nothing inside the product
        torch.baddbmm(flat, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale, out=flat)
        return x

    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor:
        at = block_launch()
        batch, heads, count, width = x.shape
        grid = (triton.cdiv(width, at.columns), triton.cdiv(count, at.rows), batch * heads)
        blank_kernel[grid](
            x, self._segments, heads, count, width, rows.start, columns.start, **self._mask,
            BM=at.rows, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return x

    def convolve(
        self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range, *, last: bool = False
    ) -> Tensor:
        outputs = above + x.shape[2] + below - kernel.shape[1] + 1
        dtype = kernel.dtype if last else x.dtype
        y = x.new_empty(*x.shape[:2], outputs, x.shape[3], dtype=dtype)
        self._convolve(x, y, kernel, above, rows, transposed=False)
        return y

    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range, *,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dx = torch.empty_like(x)
        self._convolve(grad, dx, kernel, above, rows, transposed=True)
        (batch, heads, inputs, columns), outputs = x.shape, grad.shape[2]
        at = block_launch()
        across, down = triton.cdiv(columns, at.columns), triton.cdiv(outputs, at.convolved)
        parts = kernel.new_empty(batch, heads, down, across, *kernel.shape[1:])
        kernel_gradient_kernel[(across, down, batch * heads)](
            grad, x, parts, self._segments, heads, inputs, outputs, columns, above, rows.start,
            **self._inside(kernel), BM=at.convolved, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return dx, parts.sum((0, 2, 3))

    def mix(self, x: Tensor, weights: Tensor, *, last: bool = False) -> Tensor:
        narrow = weights.to(x.dtype)
        if not last:
            return mix(x, narrow)
        heads_last = grouped(x, weights)
        return self.product(narrow.expand(len(x), -1, -1, -1), heads_last).reshape(x.shape)

    def mix_backward(
        self, grad: Tensor, x: Tensor, weights: Tensor, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        dweights = self.product(grouped(grad, weights), grouped(x, weights).mT).sum(0)
        return mix(grad, weights.mT.to(grad.dtype)), dweights

    def softmax(self, logits: Tensor, sinks: Tensor | None, rows: range, columns: range) -> Softmax:
        batch, heads, count, width = logits.shape
        at = block_launch()
        p = logits if logits.dtype == self._dtype else torch.empty_like(logits, dtype=self._dtype)
        softmax_kernel[(triton.cdiv(count, at.rows), batch * heads)](
            logits, p, self._segments, heads, count, width, rows.start, columns.start, **self._mask,
            BM=at.rows, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return Softmax(p)  # it serves no sinks

    def softmax_backward(
        self, grad: Tensor, soft: Softmax, *, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, heads, count, width = grad.shape
        at = block_launch()
        softmax_backward_kernel[(triton.cdiv(count, at.rows), batch * heads)](
            grad, soft.p, count, width, BM=at.rows, BN=at.columns, num_warps=at.warps
        )
        return grad, None

    def _convolve(
        self, x: Tensor, y: Tensor, kernel: Tensor, above: int, rows: range, *, transposed: bool
    ) -> None:
        (batch, heads, inputs, columns), outputs = x.shape, y.shape[2]
        at = block_launch()
        grid = (
            triton.cdiv(columns, WIDTH.value),
            triton.cdiv(outputs, at.convolved),
            batch * heads,
        )
        convolve_kernel[grid](
            x, y, kernel.contiguous(), self._segments, heads, inputs, outputs, columns, above,
            rows.start, **self._inside(kernel), TRANSPOSED=transposed, BM=at.convolved,
            num_warps=at.warps,
        )  # fmt: skip

    def _inside(self, kernel: Tensor) -> dict[str, Any]:
        """The options of a convolution's kernel; padding alone does not cut it."""
        _, rows, columns = kernel.shape
        documents = self.scope.sight.documents
        return self._tokens | {"R": rows, "C": columns, "SEGMENTS": documents}


def multi_token_attention_fused(
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
    """The operator of `multi_token_attention` in Triton."""
    return _fused(
        q, k, v, conv, post_conv, mix, post_mix, visibility.segments(), visibility.mutual,
        visibility.documents is not None, visibility.causal, visibility.window, scale, False,
    )  # fmt: skip


@torch.library.custom_op("heedful::multi_token_attention_fused", mutates_args=())
def _fused(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, mutual: Tensor | None,
    documents: bool, causal: bool, window: int | None, scale: float, wide: bool,
) -> Tensor:  # fmt: skip
    sight = Sight(segments, documents, causal, window, mutual)
    scope = Scope(sight, q.shape[2], k.shape[2], q.device, composed=True)
    steps = TritonSteps(scope, q.dtype)
    parameters = Parameters(conv, post_conv, mix, post_mix)
    with torch.cuda.device_of(q):
        out = attend(operands(q, k, v, parameters, scale, steps), steps)
    return out.to(output_dtype(q, wide))


@_fused.register_fake
def _(q, k, v, *options):
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=output_dtype(q, options[-1]))


@torch.library.custom_op("heedful::multi_token_attention_fused_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, mutual: Tensor | None,
    documents: bool, causal: bool, window: int | None, scale: float, wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sight = Sight(segments, documents, causal, window, mutual)
    scope = Scope(sight, q.shape[2], k.shape[2], q.device, composed=True)
    steps = TritonSteps(scope, q.dtype)
    with torch.cuda.device_of(q):
        grads = gradients(grad, (q, k, v, conv, post_conv, mix, post_mix, None, None), scale, steps)
    return grads[:7]  # it takes no bias and no sinks


_fused_backward.register_fake(lambda grad, *inputs: gradients_fake(inputs[:7]))
refuse_second_derivative(_fused_backward, "multi_token_attention")


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    grads = without_autocast(_fused_backward)(grad, *tensors, *ctx.options)
    return where_given(tensors, grads, len(ctx.options))


_fused.register_autograd(_backward, setup_context=save)
