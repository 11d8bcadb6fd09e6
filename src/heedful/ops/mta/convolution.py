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

from heedful.ops.common.precision import add_product_, operand, product, scores
from heedful.ops.common.softmax import tile_softmax, tile_softmax_backward
from heedful.ops.common.tiles import Scope, sunk_softmax_
from heedful.ops.mta.low_rank import LowRank

_HEADS = 4  # whose windows are laid out at a time
_PATCH_ROWS = 8  # of a map's gradient, which a product pairs with all that a kernel relates them to


class Parameters(NamedTuple):
    """Kernels and mixing weights of a call; `conv` may be factors, where nothing is in tiles."""

    conv: Float[Tensor, "H cq ck"] | LowRank | None = None
    post_conv: Float[Tensor, "H cq2 ck2"] | None = None
    mix: Float[Tensor, "n g g"] | None = None
    post_mix: Float[Tensor, "n2 g2 g2"] | None = None

    @property
    def aside(self) -> int:
        """Columns that a kernel reaches to either side."""
        return max(0 if x is None else x.shape[2] // 2 for x in (self.conv, self.post_conv))


class Reach(NamedTuple):
    """Number of a kernel's rows before and after the one at the current query."""

    before: int
    after: int


def reach_of(kernel: Float[Tensor, "H cq ck"] | None, two_sided: bool) -> Reach:
    """Kernels look back, or to both sides of the query."""
    if kernel is None:
        return Reach(0, 0)
    after = kernel.shape[1] // 2 if two_sided else 0
    return Reach(kernel.shape[1] - 1 - after, after)


class Softmax(NamedTuple):
    """The map of a block, and what its backward takes."""

    p: Float[Tensor, "B H R C"]  # as what follows takes it: if composed rounded, half the bytes
    sunk: Float[Tensor, "B H R 1"] | None = None  # what of each row goes to the sink, if any
    origin: tuple[Tensor, Tensor, Tensor] | None = None  # where p is rounded: what makes it again


class TileSteps:
    """The steps on a tile. `rows` and `columns` are tokens; `scope` says what they see.

    A tile to be convolved stands between `above` and `below` rows of zeros, which are not in it.
    `last` says that the result enters the softmax, and so must not be rounded; here nothing is.
    """

    def __init__(self, scope: Scope, two_sided: bool = False) -> None:
        self.scope, self._two_sided = scope, two_sided
        self._rooms: dict[str, Tensor] = {}
        self._narrow: torch.dtype | None = None

    def reach(self, kernel: Tensor | None) -> Reach:
        return reach_of(kernel, self._two_sided)

    def operand(self, x: Tensor) -> Tensor:
        x = operand(x)
        self._narrow = x.dtype
        return x

    def folded(self, parameters: Parameters, scale: float) -> tuple[Parameters, float]:
        """The factor of the logits in what is linear in them: a tile is passed over once less."""
        first = "conv" if parameters.conv is not None else "mix"
        if not self.scope.composed or getattr(parameters, first) is None:
            return parameters, scale
        return parameters._replace(**{first: getattr(parameters, first) * scale}), 1.0

    def add_product(self, out: Tensor, a: Tensor, b: Tensor) -> None:
        """`out += a @ b`; for a CPU a part of a larger `out` is no place for a product."""
        if self.scope.composed:
            add_product_(out, a, b)
        else:
            out.add_(product(a, b))

    def narrowed(self, x: Tensor) -> Tensor:
        """A tile as products with operands take it, for more than one of these."""
        return x.to(self._operand_dtype(x))

    def _operand_dtype(self, x: Tensor) -> torch.dtype:
        narrow = self._narrow is not None and self._narrow.itemsize < x.itemsize
        return self._narrow if narrow else x.dtype

    def tile(self, a: Tensor, b: Tensor, *, mixed: bool = False) -> Tensor:
        """A product of operands that is a tile; it stands until the next one is made.

        Composed, it has their precision if it is `mixed` next, as the product that does so takes
        it.
        """
        if mixed and self.scope.composed:
            return a @ b
        return scores(a, b.mT, 1.0, self._room("tile", a, b.shape[3]))

    def scores(self, q: Tensor, k: Tensor, scale: float, *, last: bool) -> Tensor:
        """`scale q k^T`; it stands until the next one is made."""
        return scores(q, k, scale, self._room("scores", q, k.shape[2]))

    def _room(self, name: str, rows: Tensor, columns: int) -> Tensor | None:
        """Memory for a tile of these rows, the same for all blocks: new pages would cost time.

        `None` if composed: a GPU's allocator has no pages.
        """
        if self.scope.composed:
            return None
        size = rows.shape[:3].numel() * columns
        if name not in self._rooms or self._rooms[name].numel() < size:
            wide = torch.promote_types(rows.dtype, torch.float32)
            self._rooms[name] = rows.new_empty(size, dtype=wide)
        return self._rooms[name]

    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor:
        """Zero where rows cannot see columns, in place."""
        return self.scope.masked(rows, columns).fill(x, 0.0)

    def convolve(
        self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range, *, last: bool = False
    ) -> Tensor:
        """`rows` are the tokens of the result."""
        documents, before = self._documents(kernel, rows), self.reach(kernel).before
        return convolve(x, kernel.to(x.dtype), above, below, documents, before)

    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range, *,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients in `x` and `kernel`; with `last` the first meets nothing but products."""
        documents, before = self._documents(kernel, rows), self.reach(kernel).before
        if documents is not None:
            x = x.to(kernel.dtype)
        elif last and self.scope.composed:
            grad = self.narrowed(grad)
        patches = (self._narrow or x.dtype) if self.scope.composed else None
        dkernel = kernel_gradient(grad, x, kernel, above, below, documents, before, patches)
        return self.input_gradient(grad, x.shape[2], kernel, above, below, rows), dkernel

    def input_gradient(
        self, grad: Tensor, inputs: int, kernel: Tensor, above: int, below: int, rows: range
    ) -> Tensor:
        """Of `convolve`, for so many rows of `inputs`."""
        documents, before = self._documents(kernel, rows), self.reach(kernel).before
        return input_gradient(grad, inputs, kernel, above, below, documents, before)

    def mix(self, x: Tensor, weights: Tensor, *, last: bool = False) -> Tensor:
        """It stands, as does the gradient in `x`, until the next one of the same `last`."""
        return mix(x, weights.to(x.dtype), self._mixed(x, last))

    def mix_backward(
        self, grad: Tensor, x: Tensor, weights: Tensor, *, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Gradients in `x`, where `mix` of the same `last` has put its result, and in `weights`."""
        dweights = mix_weights_gradient(grad, x, weights, by_rows=self.scope.composed)
        if grad.dtype != weights.dtype:
            turned = weights.mT.expand(len(grad), -1, -1, -1)
            return product(turned, grouped(grad, weights)).reshape(grad.shape), dweights
        return mix(grad, weights.mT, self._mixed(x, last)), dweights

    def _mixed(self, x: Tensor, last: bool) -> Tensor | None:
        return self._room("logits" if last else "mixed", x, x.shape[3])

    def softmax(self, logits: Tensor, sinks: Tensor | None, rows: range, columns: range) -> Softmax:
        logits, masked = logits.contiguous(), self.scope.masked(rows, columns)
        if not self.scope.composed:
            return Softmax(*sunk_softmax_(logits, masked, sinks))
        p, log_sum = self._map(logits, masked.mask, sinks, self._operand_dtype(logits))
        sunk = None if sinks is None else (sinks - log_sum).exp()
        return Softmax(p, sunk, (logits, log_sum, masked.mask))

    def softmax_backward(
        self, grad: Tensor, soft: Softmax, *, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The gradient of the logits, and with a sink per row the sum of P dP.

        The sum no longer equals that of O dO, as in flash attention. With `last` the gradient meets
        nothing but products and a convolution.
        """
        grad = grad.contiguous()
        if soft.origin is None:
            total = None if soft.sunk is None else (soft.p * grad).sum(-1, keepdim=True)
            # In place: every row is summed up before it is written.
            return torch._softmax_backward_data(
                grad, soft.p, -1, grad.dtype, grad_input=grad
            ), total
        last = last and not self.scope.sight.documents  # a convolution there is in fp32
        return self._map_backward(
            grad, *soft.origin, self._operand_dtype(grad) if last else grad.dtype
        )

    _map, _map_backward = staticmethod(tile_softmax), staticmethod(tile_softmax_backward)

    def _documents(self, kernel: Tensor, rows: range) -> Tensor | None:
        before, after = self.reach(kernel)
        return self.scope.row_documents(rows.start - before, rows.stop + after)


def convolve(
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    above: int,
    below: int,
    documents: Int[Tensor, "#B around"] | None,
    before: int,
) -> Float[Tensor, "B H N C"]:
    """Cross-correlation of the rows with zeros around them (MTA eq. 5), heads last on a CPU.

    So many rows of zeros stand `above` and `below`. With `documents` of all these rows, a row takes
    nothing from rows of another document; it is met by the kernel's row `before`.
    """
    _, rows, columns = kernel.shape
    if documents is None:
        around = max(above, below)
        y = _conv2d(x, kernel[:, None], (around, columns // 2))
        first, outputs = around - above, above + x.shape[2] + below - rows + 1
        return y[:, :, first : first + outputs]
    x = pad(x, (0, 0, above, below))
    outputs = x.shape[2] - rows + 1
    lifted = [x[:, :, r : r + outputs] * _same(documents, r, outputs, before) for r in range(rows)]
    return _conv2d(torch.stack(lifted, dim=2).flatten(1, 2), kernel[:, :, None], (0, columns // 2))


def _conv2d(
    x: Float[Tensor, "B HC M C"], kernels: Float[Tensor, "HO c rows columns"], padding: tuple
) -> Float[Tensor, "B HO N C"]:
    """Every head by itself: `c` channels of the input for each group of kernels."""
    groups = x.shape[1] // kernels.shape[1]
    if x.device.type == "cpu":  # two to five times faster with heads last
        x = x.contiguous(memory_format=torch.channels_last)
        return torch.conv2d(x, kernels, None, 1, padding, 1, groups)
    cudnn = torch.backends.cudnn
    allowed, cudnn.allow_tf32 = cudnn.allow_tf32, False  # it would round logits to ten bits
    try:
        return torch.conv2d(x.contiguous(), kernels, None, 1, padding, 1, groups)
    finally:
        cudnn.allow_tf32 = allowed


def kernel_gradient(
    grad: Float[Tensor, "B H N C"],
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    above: int,
    below: int,
    documents: Int[Tensor, "#B around"] | None,
    before: int,
    patches: torch.dtype | None = None,
) -> Float[Tensor, "H cq ck"]:
    """Gradient of `convolve` in `kernel`; in few launches if `patches`.

    Then it is made of products in this dtype, without documents of patches. Else it is
    sum_{n, j} grad[n, j] x[n + r - above, j + c - ck//2], three times as fast as torch's own: a
    product pairs each of a few output columns with every input column in their reach, and the sums
    over equal distances are the gradient.
    """
    if documents is None and patches is not None:
        return _kernel_gradient_in_patches(grad, x, kernel, above, patches)
    heads, rows, columns = kernel.shape
    at_once = _HEADS if patches is None else heads  # whose windows are laid out at a time
    batch, _, outputs, width = grad.shape
    # Products with a multiple of 16 columns leave no lane of a CPU's vectors idle.
    few = 16 - (columns - 1) % 16
    few += 16 * (few < 4)
    count, reach = -(-width // few), few + columns - 1
    fill = count * few - width
    grad = (pad(grad, (0, fill)) if fill else grad).reshape(batch, heads, outputs * count, few)
    aside = (columns // 2, columns // 2 + fill)
    pairs = x.new_empty(rows, batch, heads, few, reach)
    for first in range(0, heads, at_once):  # `around` is three tiles' worth of memory
        these = slice(first, first + at_once)
        around = pad(x[:, these], (*aside, above, below)).unfold(3, reach, few).flatten(2, 3)
        for r in range(rows):
            part = around[:, :, r * count : (r + outputs) * count]
            if documents is not None:
                same = _same(documents, r, outputs, before)
                part = (part.unflatten(2, (outputs, count)) * same[..., None]).flatten(2, 3)
            if at_once == heads:
                torch.matmul(grad.mT, part, out=pairs[r])
            else:
                pairs[r, :, these] = torch.matmul(grad[:, these].mT, part)
    pairs = pairs.sum(1).transpose(0, 1).contiguous()
    # Entry (c, t) of this view is pairs[t, t + c].
    return pairs.as_strided((heads, rows, columns, few), (*pairs.stride()[:2], 1, reach + 1)).sum(
        -1
    )


def input_gradient(
    grad: Float[Tensor, "B H N C"],
    inputs: int,
    kernel: Float[Tensor, "H cq ck"],
    above: int,
    below: int,
    documents: Int[Tensor, "#B around"] | None,
    before: int,
) -> Float[Tensor, "B H {inputs} C"]:
    """Gradient of `convolve` in `x`, which has so many rows."""
    heads, rows, columns = kernel.shape
    inside = slice(above, above + inputs)
    if documents is None:
        flipped, known = turned(kernel.to(grad.dtype))[:, None], min(above, below)
        padding = (rows - 1 - known, columns // 2)
        dx = _conv2d(grad, flipped, padding)
        return dx[:, :, above - known : above - known + inputs].contiguous()
    # One row of the kernel at a time, as channels.
    flipped = kernel.flip(2).reshape(heads * rows, 1, 1, columns)
    parts = _conv2d(grad, flipped, (0, columns // 2))
    parts = parts.unflatten(1, (heads, rows))
    outputs = grad.shape[2]
    dx = grad.new_zeros(*grad.shape[:2], above + inputs + below, grad.shape[3])
    for r in range(rows):
        dx[:, :, r : r + outputs].add_(parts[:, :, r] * _same(documents, r, outputs, before))
    return dx[:, :, inside]


def turned(kernel: Float[Tensor, "H cq ck"]) -> Float[Tensor, "H cq ck"]:
    """The kernel that takes a gradient back from outputs to inputs."""
    return kernel.flip(1, 2)


def _kernel_gradient_in_patches(
    grad: Float[Tensor, "B H N C"],
    x: Float[Tensor, "B H M C"],
    kernel: Float[Tensor, "H cq ck"],
    above: int,
    dtype: torch.dtype,
) -> Float[Tensor, "H cq ck"]:
    """The same by one product per map, for a GPU, where bytes and launches cost more than sums.

    It pairs each entry of a patch of the gradient with each entry of `x` in reach of the patch; the
    sums over equal distances, down and across, are the gradient.
    """
    heads, rows, columns = kernel.shape
    tall, wide = _PATCH_ROWS + rows - 1, -(-(columns + 15) // 32) * 32
    few = wide - columns + 1
    step = _PATCH_ROWS, few
    count = tuple(-(-n // s) for n, s in zip(grad.shape[2:], step, strict=True))
    patches = _windows(grad, count, step, step, (0, 0), dtype)
    around = _windows(x, count, (tall, wide), step, (above, columns // 2), dtype)
    patches, around = (t.flatten(2, 3).flatten(3) for t in (patches, around))
    pairs = product(patches.mT, around).sum(0).contiguous()
    # Entry (r, c, a, t) of this view is row a + r, column t + c beside row a, column t of a patch.
    size = tall * wide
    view = pairs.as_strided(
        (heads, rows, columns, _PATCH_ROWS, few),
        (pairs.stride(0), wide, 1, few * size + wide, size + 1),
    )
    return view.sum((3, 4))


def _windows(
    x: Float[Tensor, "B H M C"],
    count: tuple[int, int],
    size: tuple[int, int],
    step: tuple[int, int],
    before: tuple[int, int],
    dtype: torch.dtype,
) -> Float[Tensor, "B H down across height width"]:
    """Windows of the tile from so many zeros before it, each `step` from the last, in `dtype`.

    The tile is read once: windows within it are copied as they are, and only the strips of those at
    its edges are padded.
    """
    out = x.new_empty(*x.shape[:2], *count, *size, dtype=dtype)
    (top, bottom), (left, right) = (
        (first := min(n, -(-zeros // s)), max(first, min(n, (length + zeros - whole) // s + 1)))
        for n, whole, s, zeros, length in zip(count, size, step, before, x.shape[2:], strict=True)
    )
    down, across = count
    for parts in (
        ((top, bottom), (left, right)),
        ((0, top), (0, across)),
        ((bottom, down), (0, across)),
        ((top, bottom), (0, left)),
        ((top, bottom), (right, across)),
    ):
        if any(first == end for first, end in parts):
            continue
        cuts, zeros = [], []
        for axis, (first, end) in enumerate(parts):
            start = first * step[axis] - before[axis]
            stop = (end - 1) * step[axis] - before[axis] + size[axis]
            cuts.append(slice(max(0, start), stop))
            zeros.append((max(0, -start), max(0, stop - x.shape[2 + axis])))
        part = x[:, :, cuts[0], cuts[1]]
        if zeros != [(0, 0), (0, 0)]:
            part = pad(part, (*zeros[1], *zeros[0]))
        part = part.unfold(2, size[0], step[0]).unfold(3, size[1], step[1])
        (rows, columns) = (slice(*x) for x in parts)
        out[:, :, rows, columns].copy_(part)
    return out


def mix(
    x: Float[Tensor, "B H N C"],
    weights: Float[Tensor, "n g g"],
    room: Float[Tensor, " size"] | None = None,
) -> Float[Tensor, "B H N C"]:
    """`y[group, out] = sum_in weights[group, out, in] x[group, in]` (eq. 7).

    The result stands at the start of `room`, if that is given.
    """
    x_groups = grouped(x, weights)
    out = None if room is None else room[: x.numel()].view(x_groups.shape)
    return torch.matmul(weights, x_groups, out=out).reshape(x.shape)


def mix_weights_gradient(
    grad: Float[Tensor, "B H N C"],
    x: Float[Tensor, "B H N C"],
    weights: Float[Tensor, "n g g"],
    *,
    by_rows: bool,
) -> Float[Tensor, "n g g"]:
    """Gradient of `mix` in `weights`; of one group `by_rows`."""
    if by_rows and len(weights) == 1:
        # A batch of rows, as one product over all entries would leave most of a GPU idle.
        parts = [
            product(g.transpose(0, 1), y.permute(1, 2, 0)) for g, y in zip(grad, x, strict=True)
        ]
        return torch.stack(parts).sum((0, 1))[None]
    return product(grouped(grad, weights), grouped(x, weights).mT).sum(0)


def grouped(x: Tensor, weights: Tensor) -> Tensor:
    """A tile as `[B, groups, heads of a group, entries]`; one group alone may have heads last."""
    (groups, size, _), (batch, _, rows, columns) = weights.shape, x.shape
    x = x if groups == 1 else x.contiguous()
    return x.reshape(batch, groups, size, rows * columns)


def _same(documents: Tensor, r: int, outputs: int, before: int) -> Tensor:
    current = documents[:, before : before + outputs]
    return (documents[:, r : r + outputs] == current)[:, None, :, None]
