"""What a composed row block hides: from the selector's products to a bias in two launches.

As single operations the scale, the ReLU, two masks, sums and rounding pass over the selector's tile
a dozen times in fp32. Here a first step sums chunks of rows, and a second one, which has the sum
over the chunks before its own, goes from the products to the bias; the same in the backward. So no
sum runs over more rows than a launch keeps at hand. The steps are compiled, see compiled.py; they
take tiles as `[B, Hs, chunks, columns, rows]`, since a compiled sum wants its rows last.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.compiled import form

CHUNK = 64  # rows
HIDDEN = -1e30  # finite, as a row of -inf is NaN; to its power e is zero beside any logit


class SelectorTile(NamedTuple):
    """Logits of a selector before their scale, and which of them can hide."""

    products: Float[Tensor, "B Hs R C"]
    hidden: Bool[Tensor, "B 1 R columns"]  # of the last columns; the others are visible
    later: Bool[Tensor, "B 1 R C"] | None  # entries that are not earlier than their query
    diagonal: int  # above which they are not, where there is no such mask
    scale: float

    def sums(self) -> Float[Tensor, "B Hs chunks C"]:
        """Of what each chunk of rows hides."""
        return _sums_of_chunks(*self)

    def passed_on(
        self,
        base: Float[Tensor, "B Hs C"],
        sums: Float[Tensor, "B Hs chunks C"],
        dtype: torch.dtype,
        bias: bool,
    ) -> Float[Tensor, "B Hs R C"]:
        """F of each row, with `base` of the rows before the tile; or -F as a `bias`."""
        # Without a chunk's own sum, not less it: its rounding would tell rows of later ones.
        before = pad(sums[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
        carry = base[:, :, None] + before
        return _passed_on(*self, carry, dtype, bias)

    def gradient(
        self,
        grad: Float[Tensor, "B Hs R C"],
        later: Float[Tensor, "B Hs C"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "B Hs R C"]:
        """That of the scaled logits, from that of -F; `later` is of F in the rows below.

        To which those of the tile are added, in place.
        """
        sums = _chunks(grad).sum(3, dtype=later.dtype)
        carry = later[:, :, None] - sums.flip(2).cumsum(2).flip(2)
        later.copy_(carry[:, :, 0])
        return _gradient(*self, grad, carry, dtype)


def _chunks(x: Tensor) -> Tensor:
    """`[..., chunks, rows, columns]`; one chunk, where rows are no whole number of them."""
    return x.unflatten(-2, (-1, CHUNK if x.shape[-2] % CHUNK == 0 else x.shape[-2]))


def _on_end(x: Tensor | None) -> Tensor | None:
    return None if x is None else _chunks(x).mT


@torch.library.custom_op("heedful::selector_sums", mutates_args=())
def _sums_of_chunks(
    products: Tensor, hidden: Tensor, later: Tensor | None, diagonal: int, scale: float
) -> Tensor:
    step = form(_sum_step, products, as_written=True)
    return step(*map(_on_end, (products, hidden, later)), diagonal, scale)


@_sums_of_chunks.register_fake
def _(products, hidden, later, diagonal, scale):
    chunks = _chunks(products)
    return products.new_empty(*chunks.shape[:3], chunks.shape[4])


@torch.library.custom_op("heedful::selector_passed_on", mutates_args=())
def _passed_on(
    products: Tensor, hidden: Tensor, later: Tensor | None, diagonal: int, scale: float,
    carry: Tensor, dtype: torch.dtype, bias: bool,
) -> Tensor:  # fmt: skip
    out = products.new_empty(products.shape, dtype=dtype)
    step = form(_bias_step if bias else _f_step, products, as_written=True)
    step(*map(_on_end, (products, hidden, later)), diagonal, scale, carry, _on_end(out))
    return out


@_passed_on.register_fake
def _(products, hidden, later, diagonal, scale, carry, dtype, bias):
    return products.new_empty(products.shape, dtype=dtype)


@torch.library.custom_op("heedful::selector_gradient", mutates_args=())
def _gradient(
    products: Tensor, hidden: Tensor, later: Tensor | None, diagonal: int, scale: float,
    grad: Tensor, carry: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    out = products.new_empty(products.shape, dtype=dtype)
    step = form(_gradient_step, products, as_written=True)
    tiles = map(_on_end, (products, hidden, later, grad))
    step(*tiles, diagonal, scale, carry, _on_end(out))
    return out


@_gradient.register_fake
def _(products, hidden, later, diagonal, scale, grad, carry, dtype):
    return products.new_empty(products.shape, dtype=dtype)


def _sum_step(products, hidden, later, diagonal, scale):
    return _selected(products, hidden, later, diagonal, scale).sum(-1)


def _f_step(products, hidden, later, diagonal, scale, carry, out) -> None:
    s = _selected(products, hidden, later, diagonal, scale)
    out.copy_(carry[..., None] + (s.cumsum(-1) - s))


def _bias_step(products, hidden, later, diagonal, scale, carry, out) -> None:
    s = _selected(products, hidden, later, diagonal, scale)
    f = carry[..., None] + (s.cumsum(-1) - s)
    out.copy_((-f).masked_fill(_whole(hidden, products), HIDDEN))


def _gradient_step(products, hidden, later, grad, diagonal, scale, carry, out) -> None:
    ds = carry[..., None] + grad.to(carry.dtype).cumsum(-1)
    # At zero the slope of the ReLU is one, as in reference.py; a logit that is NaN hides nothing.
    # One by one, for a mask that is made of others the compiler would write to memory.
    logits = products * scale
    ds = ds.masked_fill(logits < 0, 0.0).masked_fill(logits.isnan(), 0.0)
    ds = ds.masked_fill(_whole(hidden, products), 0.0)
    out.copy_(ds.masked_fill(_not_earlier(products, later, diagonal), 0.0))


def _selected(products, hidden, later, diagonal, scale):
    """S; nothing is hidden but earlier tokens that a query sees, and NaN hides nothing."""
    logits = products * scale
    s = torch.where(logits > 0, logits, 0.0).masked_fill(_whole(hidden, products), 0.0)
    return s.masked_fill(_not_earlier(products, later, diagonal), 0.0)


def _whole(hidden, products):
    """The mask of all columns; compiled, it is never written."""
    return pad(hidden, (0, 0, products.shape[-2] - hidden.shape[-2], 0))


def _not_earlier(products, later, diagonal):
    if later is not None:
        return later
    chunks, columns, rows = products.shape[-3:]
    row, column, chunk = (torch.arange(n, device=products.device) for n in (rows, columns, chunks))
    return column[:, None] - (row + (chunk * rows)[:, None, None]) > diagonal
