"""The steps of multi-token attention on one tile: convolution and head mixing, with gradients."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.products import operand, product, scores
from heedful.ops.tiles import Field, softmax_

_COLUMNS = 8  # output columns of a product in the kernel's gradient


class TorchSteps:
    """The steps of `blocks.Steps` in torch."""

    def __init__(self, field: Field) -> None:
        self.field = field

    def operand(self, x: Tensor) -> Tensor:
        return operand(x)

    def rows_per_block(self, heads: int) -> int:
        return self.field.rows_per_block(heads)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return scores(q, k, scale)

    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor:
        """Zero where rows cannot see columns, in place."""
        return self.field.hidden(rows, columns).fill(x, 0.0)

    def convolve(self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range) -> Tensor:
        """`rows` are the tokens of the result."""
        return correlate(_padded(x, above, below), kernel, self._documents(kernel, rows))

    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range
    ) -> tuple[Tensor, Tensor]:
        documents = self._documents(kernel, rows)
        dx, dkernel = correlate_backward(grad, _padded(x, above, below), kernel, documents)
        return dx[:, :, above : above + x.shape[2]], dkernel

    def mix(self, x: Tensor, weights: Tensor) -> Tensor:
        return mix_heads(x, weights)

    def mix_backward(self, grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        return mix_heads_backward(grad, x, weights)

    def softmax(self, logits: Tensor, rows: range, columns: range) -> Tensor:
        return softmax_(logits, self.field.hidden(rows, columns))

    def softmax_backward(self, grad: Tensor, p: Tensor) -> Tensor:
        return torch._softmax_backward_data(grad, p, -1, grad.dtype)

    def _documents(self, kernel: Tensor, rows: range) -> Tensor | None:
        return self.field.row_documents(rows.start - kernel.shape[1] + 1, rows.stop)


def _padded(x: Tensor, above: int, below: int) -> Tensor:
    return pad(x, (0, 0, above, below)) if above or below else x


def correlate(
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    documents: Int[Tensor, "#B M"] | None,
) -> Float[Tensor, "B H N C"]:
    """Cross-correlation, valid over rows (the halo stands above), zero-padded over keys (eq. 5).

    With `documents` of the rows, a row takes nothing from rows of another document.
    """
    x, weight = _operands(x, kernel, documents)
    padding = (0, kernel.shape[2] // 2)
    return torch.conv2d(x, weight, None, 1, padding, 1, len(kernel)).contiguous()


def correlate_backward(
    grad: Float[Tensor, "B H N C"],
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    documents: Int[Tensor, "#B M"] | None,
) -> tuple[Float[Tensor, "B H M C"], Float[Tensor, "H cq ck"]]:
    """Gradients of `correlate` in `x` and `kernel`."""
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


def mix_heads(
    x: Float[Tensor, "B H N C"], weights: Float[Tensor, "n g g"]
) -> Float[Tensor, "B H N C"]:
    """`y[group, out] = sum_in weights[group, out, in] x[group, in]` (eq. 7)."""
    groups, size, _ = weights.shape
    heads_last = x.unflatten(1, (groups, size)).flatten(3)
    return torch.matmul(weights, heads_last).reshape(x.shape)


def mix_heads_backward(
    grad: Float[Tensor, "B H N C"], x: Float[Tensor, "B H N C"], weights: Float[Tensor, "n g g"]
) -> tuple[Float[Tensor, "B H N C"], Float[Tensor, "n g g"]]:
    """Gradients of `mix_heads` in `x` and `weights`."""
    groups, size, _ = weights.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    grouped_grad = grad.unflatten(1, (groups, size)).flatten(3)
    grouped = x.unflatten(1, (groups, size)).flatten(3)
    return mix_heads(grad, weights.mT), torch.matmul(grouped_grad, grouped.mT).sum(0, dtype=wide)


def _operands(x: Tensor, kernel: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
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
