"""The steps on a tile of multi-token attention, with its convolution and softmax in Triton."""

from typing import NamedTuple

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.tiles import Scope
from heedful.ops.mta.convolution import TileSteps, turned
from heedful.ops.mta.fused.convolve_kernel import ASIDE, REST, WIDTH, convolve_kernel
from heedful.ops.mta.fused.softmax_kernels import softmax_backward_kernel, softmax_kernel


class ConvolutionLaunch(NamedTuple):
    """Rows of a program's block, its warps and the stages of its loop."""

    rows: int = 64
    warps: int = 4
    stages: int = 2


LAUNCH = ConvolutionLaunch()


class Band(NamedTuple):
    """A kernel as band matrices, and where the numbers begin that their rounding left."""

    kernel: Tensor  # that it was made of
    entries: Float[Tensor, "parts H cq window width"]
    low: int


class FusedSteps(TileSteps):
    """As composed, but for what torch does slowly on a GPU: the convolution of maps, and a compiled
    softmax, whose call costs the host more than the step."""

    def __init__(self, scope: Scope, two_sided: bool = False) -> None:
        super().__init__(scope, two_sided)
        self._bands: dict[tuple[int, bool, torch.dtype], Band] = {}
        # Tokens with positions have no segments, and no convolution either.
        cut = scope.sight.segments if scope.sight.documents else None
        self._segments = None if cut is None else cut.to(torch.int32).contiguous()

    def convolve(
        self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range, *, last: bool = False
    ) -> Tensor:
        outputs = above + x.shape[2] + below - kernel.shape[1] + 1
        before = self.reach(kernel).before
        return self._launch(x, kernel, outputs, above, before, rows.start, turn=False)

    def input_gradient(
        self, grad: Tensor, inputs: int, kernel: Tensor, above: int, below: int, rows: range
    ) -> Tensor:
        before, last = self.reach(kernel).before, kernel.shape[1] - 1
        first = rows.start + above - before
        return self._launch(grad, kernel, inputs, last - above, last - before, first, turn=True)

    def _map(
        self, logits: Tensor, mask: Tensor, sinks: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As `tile_softmax`."""
        p = torch.empty_like(logits, dtype=dtype)
        log_sums = logits.new_empty(*logits.shape[:3], 1)
        grid, sizes = _rows_of(logits, mask)
        with torch.cuda.device_of(logits):
            softmax_kernel[grid](
                logits, mask, sinks, p, log_sums, *sizes, SINKS=sinks is not None
            )  # fmt: skip
        return p, log_sums

    def _map_backward(
        self, grad: Tensor, logits: Tensor, log_sums: Tensor, mask: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As `tile_softmax_backward`."""
        out, totals = torch.empty_like(grad, dtype=dtype), torch.empty_like(log_sums)
        grid, sizes = _rows_of(logits, mask)
        with torch.cuda.device_of(grad):
            softmax_backward_kernel[grid](grad, logits, log_sums, mask, out, totals, *sizes)
        return out, totals

    def _launch(
        self, x: Tensor, kernel: Tensor, outputs: int, above: int, before: int, first: int, *,
        turn: bool,
    ) -> Tensor:  # fmt: skip
        x = x.contiguous()
        batch, heads, inputs, columns = x.shape
        band = self._band(kernel, turn, x.dtype)
        y = x.new_empty(batch, heads, outputs, columns)
        grid = (triton.cdiv(columns, WIDTH.value), triton.cdiv(outputs, LAUNCH.rows), batch * heads)
        stride = 0 if self._segments is None or len(self._segments) == 1 else self.scope.keys
        with torch.cuda.device_of(x):
            convolve_kernel[grid](
                x, y, band.entries, self._segments, heads, inputs, outputs, columns, above, before,
                first, self.scope.keys, stride, band.low, R=kernel.shape[1],
                SPLIT=len(band.entries) > 1, SEGMENTS=self._segments is not None, BM=LAUNCH.rows,
                num_warps=LAUNCH.warps, num_stages=LAUNCH.stages,
            )  # fmt: skip
        return y

    def _band(self, kernel: Tensor, turn: bool, dtype: torch.dtype) -> Band:
        """Made once per call; in two parts where the tile is wider than what the products take."""
        key = id(kernel), turn, dtype
        if key not in self._bands:
            columns, width = kernel.shape[2], WIDTH.value
            line = torch.arange(width + REST.value, device=kernel.device)
            c = line[:, None] - line[:width] - (ASIDE.value - columns // 2)
            inside = (c >= 0) & (c < columns)
            source = turned(kernel) if turn else kernel
            whole = source[:, :, c.clamp(0, columns - 1)] * inside
            narrow = dtype if self._narrow is None else self._narrow
            high = whole.to(narrow)
            parts = [high, (whole - high).to(narrow)] if narrow != dtype else [high]
            self._bands[key] = Band(kernel, torch.stack(parts), high.numel())
        return self._bands[key]


def _rows_of(logits: Tensor, mask: Tensor) -> tuple[tuple[int, int], tuple[int, ...]]:
    """A program per row, and the sizes that the kernels of the softmax take."""
    batch, heads, rows, columns = logits.shape
    stride = mask[0].numel() if len(mask) > 1 else 0
    return (rows, batch * heads), (heads, rows, columns, columns - mask.shape[3], stride)
