"""The steps of `blocks.Steps` on a GPU: library matrix products, Triton between them.

Tiles are fp32 `[B, H, rows, columns]`, contiguous; only the products run in the inputs' precision.
Every kernel reads and writes its tile once, whatever is around it: mask, halo, documents.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from heedful.ops.mta.fused_step_kernels import (
    convolve_kernel,
    kernel_gradient_kernel,
    softmax_backward_kernel,
    softmax_kernel,
)
from heedful.ops.mta.tile import mix_heads, mix_heads_backward
from heedful.ops.tiles import Field

TILE = 2**20  # entries per batch row: several tiles of 4 MiB stay in a GPU's second-level cache


class Launch(NamedTuple):
    """Block of a tile per program, and its warps."""

    rows: int
    columns: int
    warps: int


def steps_launch() -> Launch:
    """Blocks of 8 x 128: wide enough for whole cache lines, small enough for registers."""
    return Launch(8, 128, 4)


class TritonSteps:
    """The steps with products in `dtype` and everything between them in fp32."""

    def __init__(self, field: Field, dtype: torch.dtype) -> None:
        self.field, self.dtype = field, dtype
        segments = field.sight.segments
        self._segments = None if segments is None else segments.to(torch.int32).contiguous()

    def operand(self, x: Tensor) -> Tensor:
        return x

    def rows_per_block(self, heads: int) -> int:
        """16 to 128 rows, by the size of a tile; the batch has no say."""
        rows = TILE // (heads * min(self.field.keys, self.field.sight.window or self.field.keys))
        return max(16, min(128, 2 ** (max(rows, 1).bit_length() - 1)))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return (a.to(self.dtype) @ b.to(self.dtype)).to(torch.float32)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return self.product(q, k.mT).mul_(scale)

    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor:
        return self.field.hidden(rows, columns).fill(x, 0.0)

    def convolve(self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range) -> Tensor:
        outputs = above + x.shape[2] + below - kernel.shape[1] + 1
        y = x.new_empty(*x.shape[:2], outputs, x.shape[3])
        self._convolve(x, y, kernel, above, rows, transposed=False)
        return y

    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range
    ) -> tuple[Tensor, Tensor]:
        grad, dx = grad.contiguous(), torch.empty_like(x)
        self._convolve(grad, dx, kernel, above, rows, transposed=True)
        (batch, heads, inputs, columns), outputs = x.shape, grad.shape[2]
        at = steps_launch()
        across, down = triton.cdiv(columns, at.columns), triton.cdiv(outputs, at.rows)
        parts = x.new_empty(batch, heads, down, across, *kernel.shape[1:])
        kernel_gradient_kernel[(across, down, batch * heads)](
            grad, x, parts, self._segments, heads, inputs, outputs, columns, above, rows.start,
            *self._documents(), R=kernel.shape[1], C=kernel.shape[2], BM=at.rows, BN=at.columns,
            SEGMENTS=self.field.sight.documents, num_warps=at.warps,
        )  # fmt: skip
        return dx, parts.sum((0, 2, 3))

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        return mix_heads(x, weights)

    def mix_backward(self, grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return mix_heads_backward(grad, x, weights)

    def softmax(self, logits: Tensor, rows: range, columns: range) -> Tensor:
        logits = logits.contiguous()
        batch, heads, count, width = logits.shape
        at, sight = steps_launch(), self.field.sight
        softmax_kernel[(triton.cdiv(count, at.rows), batch * heads)](
            logits, self._segments, heads, count, width, rows.start, columns.start,
            *self._documents(), CAUSAL=sight.causal, WINDOW=sight.window or 0,
            SEGMENTS=self._segments is not None, BM=at.rows, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return logits

    def softmax_backward(self, grad: Tensor, p: Tensor) -> Tensor:
        grad = grad.contiguous()
        batch, heads, count, width = p.shape
        at = steps_launch()
        softmax_backward_kernel[(triton.cdiv(count, at.rows), batch * heads)](
            grad, p, count, width, BM=at.rows, BN=at.columns, num_warps=at.warps,
        )  # fmt: skip
        return grad

    def _convolve(
        self, x: Tensor, y: Tensor, kernel: Tensor, above: int, rows: range, *, transposed: bool
    ) -> None:
        (batch, heads, inputs, columns), outputs = x.shape, y.shape[2]
        at = steps_launch()
        grid = (triton.cdiv(columns, at.columns), triton.cdiv(outputs, at.rows), batch * heads)
        convolve_kernel[grid](
            x, y, kernel.contiguous(), self._segments, heads, inputs, outputs, columns, above,
            rows.start, *self._documents(), TRANSPOSED=transposed, R=kernel.shape[1],
            C=kernel.shape[2], BM=at.rows, BN=at.columns, SEGMENTS=self.field.sight.documents,
            num_warps=at.warps,
        )  # fmt: skip

    def _documents(self) -> tuple[int, int]:
        """Number of tokens, and the stride between the segments of batch rows (0: one for all)."""
        if self._segments is None or len(self._segments) == 1:
            return self.field.keys, 0
        return self.field.keys, self.field.keys
