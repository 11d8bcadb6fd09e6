"""Multi-token attention in memory linear in T: blocks of query rows, recomputed in the backward.

A block owns its rows of the probabilities P. Before the softmax it reads `cq - 1` more rows of
queries above (halo); after it, its share of the convolved map reaches `cq2 - 1` rows below, so the
block adds to outputs there. Everything but the softmax is linear, so shares of blocks simply add.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.autocast import without_autocast
from heedful.ops.mta.identity import identity_attention
from heedful.ops.mta.low_rank import LowRank, low_rank
from heedful.ops.mta.tile import correlate, correlate_backward, mix_heads, mix_heads_backward
from heedful.ops.tiles import (
    Field,
    Hidden,
    Sight,
    gather_heads,
    row_blocks,
    softmax_,
    spread_heads,
    widen,
)
from heedful.ops.visibility import Visibility


def multi_token_attention_tiled(
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
    """The operator of `multi_token_attention`; peak memory O(B H T (D + rows per block))."""
    return _tiled(
        q, k, v, conv, post_conv, mix, post_mix, visibility.segments(),
        visibility.documents is not None, visibility.causal, visibility.window, scale,
    )  # fmt: skip


class _Kernels(NamedTuple):
    """Parameters in the computing precision."""

    conv: Tensor | None
    post_conv: Tensor | None
    mix: Tensor | None
    post_mix: Tensor | None

    @property
    def above(self) -> int:
        return 0 if self.conv is None else self.conv.shape[1] - 1

    @property
    def below(self) -> int:
        return 0 if self.post_conv is None else self.post_conv.shape[1] - 1

    @property
    def aside(self) -> int:
        return max(0 if x is None else x.shape[2] // 2 for x in (self.conv, self.post_conv))


class _Tile(NamedTuple):
    """One block before the softmax; rows count queries, columns count keys."""

    rows: range  # owned
    read: range  # owned with halo above
    write: range  # owned with the rows below that the block adds to
    columns: range
    hidden: Hidden  # of the owned rows
    z: Tensor | None  # Mask_0(S), with halo rows of zeros above the first query
    c: Tensor | None  # Conv(Z) before mixing, where mixing follows
    p: Tensor


def _forward_tile(
    q: Tensor, k: Tensor, kernels: _Kernels, wide: LowRank | None, field: Field, scale: float,
    rows: range,
) -> _Tile:  # fmt: skip
    """The tile without what only the backward needs."""
    if wide is None:
        return _tile(q, k, kernels, field, scale, rows)._replace(z=None, c=None)
    write = range(rows.start, min(rows.stop + kernels.below, q.shape[2]))
    owned = range(field.offset + rows.start, field.offset + rows.stop)
    columns = field.columns(owned, kernels.aside)
    hidden = field.hidden(owned, columns)
    x = wide.logits(rows, columns, field.offset)
    if kernels.mix is not None:
        x = mix_heads(x, kernels.mix)
    return _Tile(rows, rows, write, columns, hidden, None, None, softmax_(x, hidden))


def _tile(q: Tensor, k: Tensor, kernels: _Kernels, field: Field, scale: float, rows: range):
    queries, offset = q.shape[2], field.offset
    read = range(max(0, rows.start - kernels.above), rows.stop)
    write = range(rows.start, min(rows.stop + kernels.below, queries))
    seen = range(offset + read.start, offset + rows.stop)
    owned = range(offset + rows.start, offset + rows.stop)
    columns = field.columns(owned, kernels.aside)
    hidden = field.hidden(owned, columns)

    x = (q[:, :, read.start : read.stop] * scale) @ k[:, :, columns.start : columns.stop].mT
    z = c = None
    if kernels.conv is not None:
        field.hidden(seen, columns).fill(x, 0.0)
        missing = kernels.above - (rows.start - read.start)
        z = torch.nn.functional.pad(x, (0, 0, missing, 0)) if missing else x
        x = correlate(z, kernels.conv, field.row_documents(owned.start - kernels.above, owned.stop))
    if kernels.mix is not None:
        c = x
        x = mix_heads(c, kernels.mix)
    return _Tile(rows, read, write, columns, hidden, z, c, softmax_(x, hidden))


def _convolve_probabilities(tile: _Tile, kernels: _Kernels, field: Field):
    """The block's share of Conv(P) on its write rows, and what is invisible there (eq. 6)."""
    written = range(field.offset + tile.write.start, field.offset + tile.write.stop)
    hidden = field.hidden(written, tile.columns)
    below = tile.write.stop - tile.rows.stop
    padded = torch.nn.functional.pad(tile.p, (0, 0, kernels.below, below))
    documents = field.row_documents(written.start - kernels.below, written.stop)
    share = hidden.fill(correlate(padded, kernels.post_conv, documents), 0.0)
    return share, hidden, padded, documents


@torch.library.custom_op("heedful::multi_token_attention_tiled", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, documents: bool,
    causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    dtype, heads = q.dtype, q.shape[1]
    sight = Sight(segments, documents, causal, window)
    out = identity_attention(q, k, v, (conv, post_conv), (mix, post_mix), sight, scale)
    if out is not None:
        return out
    q, k, v = widen(q), spread_heads(widen(k), heads), spread_heads(widen(v), heads)
    kernels = _as_kernels(q, conv, post_conv, mix, post_mix)
    field = Field(sight, q.shape[2], k.shape[2], q.device)
    wide = None if conv is None else low_rank(q, k, kernels.conv, field.sight, scale)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for start, stop in row_blocks(q.shape[2], field.rows_per_block(heads)):
        tile = _forward_tile(q, k, kernels, wide, field, scale, range(start, stop))
        a = tile.p
        if post_conv is not None:
            a = _convolve_probabilities(tile, kernels, field)[0]
        if post_mix is not None:
            a = mix_heads(a, kernels.post_mix)
        values = v[:, :, tile.columns.start : tile.columns.stop]
        out[:, :, tile.write.start : tile.write.stop] += a @ values
    return out.to(dtype)


@_tiled.register_fake
def _(q, k, v, *_):
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("heedful::multi_token_attention_tiled_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, segments: Tensor | None, documents: bool,
    causal: bool, window: int | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    inputs = (q, k, v, conv, post_conv, mix, post_mix)
    heads = q.shape[1]
    grad, q = widen(grad), widen(q)
    k, v = spread_heads(widen(k), heads), spread_heads(widen(v), heads)
    kernels = _as_kernels(q, conv, post_conv, mix, post_mix)
    field = Field(Sight(segments, documents, causal, window), q.shape[2], k.shape[2], q.device)
    # Contiguous, whatever the inputs' strides: the layout that the fake below promises.
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    dconv, dpost_conv, dmix, dpost_mix = (
        None if x is None else x.new_zeros(x.shape) for x in kernels
    )
    for start, stop in row_blocks(q.shape[2], field.rows_per_block(heads)):
        tile = _tile(q, k, kernels, field, scale, range(start, stop))
        columns = slice(tile.columns.start, tile.columns.stop)
        out_grad = grad[:, :, tile.write.start : tile.write.stop]
        a = tile.p
        if post_conv is not None:
            a, written, padded, row_documents = _convolve_probabilities(tile, kernels, field)
        mixed = a if post_mix is None else mix_heads(a, kernels.post_mix)
        dv[:, :, columns] += mixed.mT @ out_grad
        del mixed  # tiles are what the peak is made of: each goes as soon as it is read
        d = out_grad @ v[:, :, columns].mT  # dA
        if post_mix is not None:
            d, dweights = mix_heads_backward(d, a, kernels.post_mix)
            dpost_mix += dweights
        del a
        if post_conv is not None:
            written.fill(d, 0.0)
            d, dkernel = correlate_backward(d, padded, kernels.post_conv, row_documents)
            d = d[:, :, kernels.below : kernels.below + len(tile.rows)]
            dpost_conv += dkernel
            del padded
        # Softmax: the row sum needs dP itself, rowsum(dO * O) no longer equals it.
        d = torch._softmax_backward_data(d, tile.p, -1, d.dtype)
        if mix is not None:
            d, dweights = mix_heads_backward(d, tile.c, kernels.mix)
            dmix += dweights
        if conv is not None:
            first, last = field.offset + start - kernels.above, field.offset + stop
            row_documents = field.row_documents(first, last)
            d, dkernel = correlate_backward(d, tile.z, kernels.conv, row_documents)
            d = d[:, :, kernels.above - (start - tile.read.start) :]
            seen = range(field.offset + tile.read.start, last)
            field.hidden(seen, tile.columns).fill(d, 0.0)
            dconv += dkernel
        d = d.mul_(scale)
        read = slice(tile.read.start, tile.read.stop)
        dq[:, :, read] += d @ k[:, :, columns]
        dk[:, :, columns] += d.mT @ q[:, :, read]
    dk, dv = gather_heads(dk, inputs[1].shape[1]), gather_heads(dv, inputs[2].shape[1])
    grads = (dq, dk, dv, dconv, dpost_conv, dmix, dpost_mix)
    return [
        q.new_empty(0) if x is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)
    ]


@_tiled_backward.register_fake
def _(grad, q, k, v, conv, post_conv, mix, post_mix, *_):
    inputs = (q, k, v, conv, post_conv, mix, post_mix)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _as_kernels(like: Tensor, *parameters: Tensor | None) -> _Kernels:
    return _Kernels(*(None if x is None else x.to(like.dtype) for x in parameters))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:8])
    ctx.options = inputs[8:]


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    grads = without_autocast(_tiled_backward)(grad, *tensors, *ctx.options)
    given = [None if x is None else g for x, g in zip(tensors[:7], grads, strict=True)]
    return *given, None, None, None, None, None


_tiled.register_autograd(_backward, setup_context=_save)
