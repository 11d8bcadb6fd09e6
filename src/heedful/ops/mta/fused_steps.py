"""The steps of `blocks.Steps` on a GPU: library matrix products, Triton between them.

Tiles are `[B, H, rows, columns]`, contiguous, in the inputs' precision: what the published code
rounds to between its steps, and half the memory of fp32. Sums are fp32. Every kernel sees to mask,
halo and documents itself, so that no tile is padded or copied for it.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from heedful.ops.mta.fused_step_kernels import (
    WIDTH,
    blank_kernel,
    convolve_kernel,
    kernel_gradient_kernel,
    softmax_backward_kernel,
    softmax_kernel,
)
from heedful.ops.mta.tile import mix_heads, mix_heads_backward
from heedful.ops.tiles import Field

TILE = 2**22  # entries per batch row; fewer would leave a GPU waiting for its launches
LEAST, MOST = 32, 64  # rows: fewer would mostly be halo, more would not fit beside q, k and v


class Launch(NamedTuple):
    """Block of a tile per program, its warps, and rows of a convolution's block."""

    rows: int
    columns: int
    warps: int
    convolved: int


def steps_launch() -> Launch:
    """Blocks of 8 x 128: wide enough for whole cache lines, small enough for registers."""
    return Launch(8, 128, 4, 64)


class TritonSteps:
    """The steps with tiles in the inputs' precision."""

    def __init__(self, field: Field) -> None:
        self.field = field
        segments, sight = field.sight.segments, field.sight
        self._segments = None if segments is None else segments.to(torch.int32).contiguous()
        several = segments is not None and len(segments) > 1
        self._tokens = {"tokens": field.keys, "row_stride": field.keys if several else 0}
        self._seen = {"CAUSAL": sight.causal, "WINDOW": sight.window or 0}
        self._seen |= {"SEGMENTS": segments is not None} | self._tokens

    def operand(self, x: Tensor) -> Tensor:
        return x

    def rows_per_block(self, heads: int) -> int:
        """32 or 64, by the size of a tile; the batch has no say."""
        entries = heads * min(self.field.keys, self.field.sight.window or self.field.keys)
        return MOST if MOST * entries <= TILE else LEAST

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        x = q.new_empty(*q.shape[:3], k.shape[2])
        flat = x.flatten(0, 1)  # the factor costs nothing inside the product
        torch.baddbmm(flat, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=scale, out=flat)
        return x

    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor:
        at = steps_launch()
        batch, heads, count, width = x.shape
        grid = (triton.cdiv(width, at.columns), triton.cdiv(count, at.rows), batch * heads)
        blank_kernel[grid](
            x, self._segments, heads, count, width, rows.start, columns.start, **self._seen,
            BM=at.rows, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return x

    def convolve(self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range) -> Tensor:
        outputs = above + x.shape[2] + below - kernel.shape[1] + 1
        y = x.new_empty(*x.shape[:2], outputs, x.shape[3])
        self._convolve(x, y, kernel, above, rows, transposed=False)
        return y

    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range
    ) -> tuple[Tensor, Tensor]:
        dx = torch.empty_like(x)
        self._convolve(grad, dx, kernel, above, rows, transposed=True)
        (batch, heads, inputs, columns), outputs = x.shape, grad.shape[2]
        at = steps_launch()
        across, down = triton.cdiv(columns, at.columns), triton.cdiv(outputs, at.convolved)
        parts = kernel.new_empty(batch, heads, down, across, *kernel.shape[1:])
        kernel_gradient_kernel[(across, down, batch * heads)](
            grad, x, parts, self._segments, heads, inputs, outputs, columns, above, rows.start,
            **self._inside(kernel), BM=at.convolved, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return dx, parts.sum((0, 2, 3))

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        return mix_heads(x, weights.to(x.dtype))

    def mix_backward(self, grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return mix_heads_backward(grad, x, weights.to(x.dtype))

    def softmax(self, logits: Tensor, rows: range, columns: range) -> Tensor:
        batch, heads, count, width = logits.shape
        at = steps_launch()
        softmax_kernel[(triton.cdiv(count, at.rows), batch * heads)](
            logits, self._segments, heads, count, width, rows.start, columns.start, **self._seen,
            BM=at.rows, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return logits

    def softmax_backward(self, grad: Tensor, p: Tensor) -> Tensor:
        batch, heads, count, width = p.shape
        at = steps_launch()
        softmax_backward_kernel[(triton.cdiv(count, at.rows), batch * heads)](
            grad, p, count, width, BM=at.rows, BN=at.columns, num_warps=at.warps
        )
        return grad

    def _convolve(
        self, x: Tensor, y: Tensor, kernel: Tensor, above: int, rows: range, *, transposed: bool
    ) -> None:
        (batch, heads, inputs, columns), outputs = x.shape, y.shape[2]
        at = steps_launch()
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
        """What a convolution is told about itself; padding alone does not cut it."""
        _, rows, columns = kernel.shape
        documents = self.field.sight.documents
        return self._tokens | {"R": rows, "C": columns, "SEGMENTS": documents}
