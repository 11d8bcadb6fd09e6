"""The arithmetic of one tile of multi-token attention: masks, convolution, head mixing, softmax.

A tile is a row block of the map with the columns that it can reach, `[B, H, rows, columns]` in the
precision of the sums. `TileSteps` holds every step between the products with Q, K and V, each with
its backward; the functions below it do the work.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.precision import operand, product, scores
from heedful.ops.common.tiles import Scope, softmax_

_COLUMNS = 8  # output columns of a product in the kernel's gradient


class Parameters(NamedTuple):
    """Kernels and mixing weights of a call."""

    conv: Float[Tensor, "H cq ck"] | None
    post_conv: Float[Tensor, "H cq2 ck2"] | None
    mix: Float[Tensor, "n g g"] | None
    post_mix: Float[Tensor, "n2 g2 g2"] | None

    @property
    def above(self) -> int:
        """Rows above its own that a block reads."""
        return 0 if self.conv is None else self.conv.shape[1] - 1

    @property
    def below(self) -> int:
        """Rows below its own that a block writes."""
        return 0 if self.post_conv is None else self.post_conv.shape[1] - 1

    @property
    def aside(self) -> int:
        """Columns that a kernel reaches to either side."""
        return max(0 if x is None else x.shape[2] // 2 for x in (self.conv, self.post_conv))


class TileSteps:
    """The steps on a tile. `rows` and `columns` are tokens; `scope` says what they see.

    A tile to be convolved stands between `above` and `below` rows of zeros, which are not in it.
    `last` says that the result enters the softmax, and so must not be rounded; here nothing is.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    def operand(self, x: Tensor) -> Tensor:
        return operand(x)

    def rows_per_block(self, heads: int) -> int:
        return self.scope.rows_per_block(heads)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b)

    def tile(self, a: Tensor, b: Tensor) -> Tensor:
        """A product that is a tile."""
        return product(a, b)

    def scores(self, q: Tensor, k: Tensor, scale: float, *, last: bool) -> Tensor:
        return scores(q, k, scale)

    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor:
        """Zero where rows cannot see columns, in place."""
        return self.scope.hidden(rows, columns).fill(x, 0.0)

    def convolve(
        self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range, *, last: bool = False
    ) -> Tensor:
        """`rows` are the tokens of the result."""
        return convolve(_padded(x, above, below), kernel, self._documents(kernel, rows))

    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range
    ) -> tuple[Tensor, Tensor]:
        documents = self._documents(kernel, rows)
        dx, dkernel = convolve_backward(grad, _padded(x, above, below), kernel, documents)
        return dx[:, :, above : above + x.shape[2]], dkernel

    def mix(self, x: Tensor, weights: Tensor, *, last: bool = False) -> Tensor:
        return mix(x, weights)

    def mix_backward(self, grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return mix_backward(grad, x, weights)

    def softmax(self, logits: Tensor, rows: range, columns: range) -> Tensor:
        return softmax_(logits, self.scope.hidden(rows, columns))

    def softmax_backward(self, grad: Tensor, p: Tensor) -> Tensor:
        return torch._softmax_backward_data(grad, p, -1, grad.dtype)

    def _documents(self, kernel: Tensor, rows: range) -> Tensor | None:
        return self.scope.row_documents(rows.start - kernel.shape[1] + 1, rows.stop)


def _padded(x: Tensor, above: int, below: int) -> Tensor:
    return pad(x, (0, 0, above, below)) if above or below else x


def convolve(
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    documents: Int[Tensor, "#B M"] | None,
) -> Float[Tensor, "B H N C"]:
    """Cross-correlation over the rows that are there, with zeros beside the keys (MTA eq. 5).

    With `documents` of the rows, a row takes nothing from rows of another document.
    """
    x, weight = _channels_last(x, kernel, documents)
    padding = (0, kernel.shape[2] // 2)
    return torch.conv2d(x, weight, None, 1, padding, 1, len(kernel)).contiguous()


def convolve_backward(
    grad: Float[Tensor, "B H N C"],
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    documents: Int[Tensor, "#B M"] | None,
) -> tuple[Float[Tensor, "B H M C"], Float[Tensor, "H cq ck"]]:
    """Gradients of `convolve` in `x` and `kernel`."""
    dkernel = _kernel_gradient(grad, x, kernel, documents)
    heads, rows, columns = kernel.shape
    padding = (rows - 1, columns // 2)
    grad_last = grad.contiguous(memory_format=torch.channels_last)
    if documents is None:
        turned = kernel.flip(1, 2)[:, None]
        dx = torch.conv2d(grad_last, turned, None, 1, padding, 1, heads).contiguous()
    else:  # one row of the kernel at a time, as channels
        turned = kernel.flip(2).reshape(heads * rows, 1, 1, columns)
        parts = torch.conv2d(grad_last, turned, None, 1, (0, padding[1]), 1, heads)
        parts = parts.unflatten(1, (heads, rows))
        outputs, dx = grad.shape[2], torch.zeros_like(x, memory_format=torch.contiguous_format)
        for r in range(rows):
            dx[:, :, r : r + outputs] += parts[:, :, r] * _same(documents, r, outputs, rows)
    return dx, dkernel


def _kernel_gradient(
    grad: Float[Tensor, "B H N C"],
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    documents: Int[Tensor, "#B M"] | None,
) -> Float[Tensor, "H cq ck"]:
    """sum_{n, j} grad[n, j] x[n + r, j + c - ck//2]: three times as fast as torch's own.

    A product pairs each of a few output columns with every input column in their reach; the sums
    over equal distances are the gradient.
    """
    heads, rows, columns = kernel.shape
    batch, _, outputs, width = grad.shape
    count, reach = -(-width // _COLUMNS), _COLUMNS + columns - 1
    fill = count * _COLUMNS - width
    grad = pad(grad, (0, fill)).reshape(batch, heads, outputs * count, _COLUMNS)
    around = pad(x, (columns // 2, columns // 2 + fill)).unfold(3, reach, _COLUMNS)
    around = around.flatten(2, 3)  # b h (m block) reach: the only copy
    pairs = x.new_empty(heads, rows, _COLUMNS, reach)
    for r in range(rows):
        part = around[:, :, r * count : (r + outputs) * count]
        if documents is not None:
            same = _same(documents, r, outputs, rows)
            part = (part.unflatten(2, (outputs, count)) * same[..., None]).flatten(2, 3)
        pairs[:, r] = torch.matmul(grad.mT, part).sum(0)
    # Entry (c, t) of this view is pairs[t, t + c].
    return pairs.as_strided(
        (heads, rows, columns, _COLUMNS), (*pairs.stride()[:2], 1, reach + 1)
    ).sum(-1)


def mix(x: Float[Tensor, "B H N C"], weights: Float[Tensor, "n g g"]) -> Float[Tensor, "B H N C"]:
    """`y[group, out] = sum_in weights[group, out, in] x[group, in]` (eq. 7)."""
    groups, size, _ = weights.shape
    heads_last = x.unflatten(1, (groups, size)).flatten(3)
    return torch.matmul(weights, heads_last).reshape(x.shape)


def mix_backward(
    grad: Float[Tensor, "B H N C"], x: Float[Tensor, "B H N C"], weights: Float[Tensor, "n g g"]
) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "n g g"]]:
    """Gradients of `mix` in `x` and `weights`."""
    groups, size, _ = weights.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped_grad = grad.unflatten(1, (groups, size)).flatten(3)
    grouped = x.unflatten(1, (groups, size)).flatten(3)
    return mix(grad, weights.mT), torch.matmul(grouped_grad, grouped.mT).sum(0, dtype=wide)


def _channels_last(x: Tensor, kernel: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    # Channels-last is two to five times faster for these depthwise kernels on a CPU.
    if documents is None:
        return x.contiguous(memory_format=torch.channels_last), kernel[:, None]
    rows = kernel.shape[1]
    outputs = x.shape[2] - rows + 1
    lifted = [x[:, :, r : r + outputs] * _same(documents, r, outputs, rows) for r in range(rows)]
    stacked = torch.stack(lifted, dim=2).flatten(1, 2)
    return stacked.contiguous(memory_format=torch.channels_last), kernel[:, :, None]


def _same(documents: Tensor, r: int, outputs: int, rows: int) -> Tensor:
    current = documents[:, rows - 1 : rows - 1 + outputs]
    return (documents[:, r : r + outputs] == current)[:, None, :, None]
