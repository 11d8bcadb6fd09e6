"""Multi-token attention by blocks of query rows, and its gradients by recomputing them.

A block owns its rows of the probabilities P. Before the softmax it reads `cq - 1` more rows of
queries above (halo); after it, its share of the convolved map reaches `cq2 - 1` rows below, so the
block adds to outputs there. Everything but the softmax is linear, so shares of blocks simply add.
How one tile is computed is in `steps`: plain torch, or Triton.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.mta.low_rank import LowRank
from heedful.ops.tiles import Field, row_blocks


class Parameters(NamedTuple):
    """Kernels and mixing in the precision of the sums."""

    conv: Float[Tensor, "H cq ck"] | None
    post_conv: Float[Tensor, "H cq2 ck2"] | None
    mix: Float[Tensor, "n g g"] | None
    post_mix: Float[Tensor, "n2 g2 g2"] | None

    @property
    def above(self) -> int:
        return 0 if self.conv is None else self.conv.shape[1] - 1

    @property
    def below(self) -> int:
        return 0 if self.post_conv is None else self.post_conv.shape[1] - 1

    @property
    def aside(self) -> int:
        return max(0 if x is None else x.shape[2] // 2 for x in (self.conv, self.post_conv))


@runtime_checkable
class Steps(Protocol):
    """The steps on a tile. `rows` and `columns` are tokens; `field` says what they see.

    A convolved tile stands between `above` and `below` rows of zeros that need not exist in memory.
    """

    field: Field

    def operand(self, x: Tensor) -> Tensor: ...
    def rows_per_block(self, heads: int) -> int: ...
    def product(self, a: Tensor, b: Tensor) -> Tensor: ...
    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor: ...
    def blank(self, x: Tensor, rows: range, columns: range) -> Tensor: ...
    def convolve(
        self, x: Tensor, kernel: Tensor, above: int, below: int, rows: range
    ) -> Tensor: ...
    def convolve_backward(
        self, grad: Tensor, x: Tensor, kernel: Tensor, above: int, below: int, rows: range
    ) -> tuple[Tensor, Tensor]: ...
    def mix(self, x: Tensor, weights: Tensor) -> Tensor: ...
    def mix_backward(self, grad: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]: ...
    def softmax(self, logits: Tensor, rows: range, columns: range) -> Tensor: ...
    def softmax_backward(self, grad: Tensor, p: Tensor) -> Tensor: ...


class _Block(NamedTuple):
    """Which rows and columns one block is about; rows count queries, columns count keys."""

    rows: range  # owned
    read: range  # owned with the halo above
    write: range  # owned with the rows below that the block adds to
    columns: range
    missing: int  # rows of the halo before the first query
    offset: int  # query i is token i + offset

    def tokens(self, rows: range) -> range:
        return range(self.offset + rows.start, self.offset + rows.stop)

    @property
    def cut(self) -> slice:
        return slice(self.columns.start, self.columns.stop)


class _Tile(NamedTuple):
    """One block before the product with the values."""

    z: Tensor | None  # Mask_0(S)
    c: Tensor | None  # Conv(Z) before mixing, where mixing follows
    p: Tensor


def attend(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B H Tk D"],
    v: Float[Tensor, "B H Tk Dv"],
    parameters: Parameters,
    steps: Steps,
    scale: float,
    wide: LowRank | None = None,
) -> Float[Tensor, "B H Tq Dv"]:
    """The output, in the precision of the sums."""
    out = _zeros(q, v.shape[3])
    for block in _blocks(q, parameters, steps):
        if wide is None:
            tile = _tile(q, k, parameters, steps, scale, block)._replace(z=None, c=None)
        else:
            tile = _wide_tile(parameters, steps, wide, block)
        a = _convolved(tile.p, parameters, steps, block)
        if parameters.post_mix is not None:
            a = steps.mix(a, parameters.post_mix)
        out[:, :, _cut(block.write)] += steps.product(a, v[:, :, block.cut])
        del tile, a  # before the next block's
    return out


def attend_backward(
    grad: Float[Tensor, "B H Tq Dv"],
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B H Tk D"],
    v: Float[Tensor, "B H Tk Dv"],
    parameters: Parameters,
    steps: Steps,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Parameters]:
    """Gradients of q, k, v and the parameters, in the precision of the sums."""
    dq, dk, dv = _zeros(q, q.shape[3]), _zeros(k, k.shape[3]), _zeros(v, v.shape[3])
    sums = Parameters(*(None if x is None else torch.zeros_like(x) for x in parameters))
    conv, post_conv, mix, post_mix = parameters
    for block in _blocks(q, parameters, steps):
        tile = _tile(q, k, parameters, steps, scale, block)
        out_grad = grad[:, :, _cut(block.write)]
        a = _convolved(tile.p, parameters, steps, block)
        mixed = a if post_mix is None else steps.mix(a, post_mix)
        dv[:, :, block.cut] += steps.product(mixed.mT, out_grad)
        del mixed  # tiles are what the peak is made of: each goes as soon as it is read
        d = steps.product(out_grad, v[:, :, block.cut].mT)  # dA
        if post_mix is not None:
            d, dweights = steps.mix_backward(d, a, post_mix)
            sums.post_mix.add_(dweights)
        del a
        if post_conv is not None:
            written = block.tokens(block.write)
            d = steps.blank(d, written, block.columns)
            halo = (parameters.below, len(block.write) - len(block.rows))
            d, dkernel = steps.convolve_backward(d, tile.p, post_conv, *halo, written)
            sums.post_conv.add_(dkernel)
        # Softmax: the row sum needs dP itself, rowsum(dO * O) no longer equals it.
        d = steps.softmax_backward(d, tile.p)
        if mix is not None:
            d, dweights = steps.mix_backward(d, tile.c, mix)
            sums.mix.add_(dweights)
        if conv is not None:
            owned = block.tokens(block.rows)
            d, dkernel = steps.convolve_backward(d, tile.z, conv, block.missing, 0, owned)
            d = steps.blank(d, block.tokens(block.read), block.columns)
            sums.conv.add_(dkernel)
        read = _cut(block.read)
        dq[:, :, read] += steps.product(d, k[:, :, block.cut])
        dk[:, :, block.cut] += steps.product(d.mT, q[:, :, read])
        del tile, d
    return dq.mul_(scale), dk.mul_(scale), dv, sums


def _blocks(q: Tensor, parameters: Parameters, steps: Steps) -> Iterator[_Block]:
    queries, field = q.shape[2], steps.field
    for start, stop in row_blocks(queries, steps.rows_per_block(q.shape[1])):
        owned = range(field.offset + start, field.offset + stop)
        yield _Block(
            rows=range(start, stop),
            read=range(max(0, start - parameters.above), stop),
            write=range(start, min(stop + parameters.below, queries)),
            columns=field.columns(owned, parameters.aside),
            missing=max(0, parameters.above - start),
            offset=field.offset,
        )


def _tile(
    q: Tensor, k: Tensor, parameters: Parameters, steps: Steps, scale: float, block: _Block
) -> _Tile:
    x = steps.scores(q[:, :, _cut(block.read)], k[:, :, block.cut], scale)
    owned = block.tokens(block.rows)
    z = c = None
    if parameters.conv is not None:
        z = steps.blank(x, block.tokens(block.read), block.columns)
        x = steps.convolve(z, parameters.conv, block.missing, 0, owned)
    if parameters.mix is not None:
        c = x
        x = steps.mix(c, parameters.mix)
    return _Tile(z, c, steps.softmax(x, owned, block.columns))


def _wide_tile(parameters: Parameters, steps: Steps, wide: LowRank, block: _Block) -> _Tile:
    x = wide.logits(block.rows, block.columns, block.offset)
    if parameters.mix is not None:
        x = steps.mix(x, parameters.mix)
    return _Tile(None, None, steps.softmax(x, block.tokens(block.rows), block.columns))


def _convolved(p: Tensor, parameters: Parameters, steps: Steps, block: _Block) -> Tensor:
    """The block's share of Mask_0(Conv(P)) on the rows that it writes (MTA eq. 6)."""
    if parameters.post_conv is None:
        return p
    written = block.tokens(block.write)
    below = len(block.write) - len(block.rows)
    share = steps.convolve(p, parameters.post_conv, parameters.below, below, written)
    return steps.blank(share, written, block.columns)


def _zeros(like: Tensor, width: int) -> Tensor:
    """Contiguous, whatever the strides of `like`: the layout that the fakes promise."""
    wide = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(*like.shape[:3], width, dtype=wide, device=like.device)


def _cut(rows: range) -> slice:
    return slice(rows.start, rows.stop)
