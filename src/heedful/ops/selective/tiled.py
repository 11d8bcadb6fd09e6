"""Selective attention in memory linear in T: blocks of query rows, recomputed in the backward.

F is a sum over earlier queries. Between blocks it travels as one fp32 number per key; inside a
block the missing part is a product with a strictly triangular matrix of ones. The running totals at
each block's start are kept for the backward: T^2 / 64 numbers per selector, a twelfth of what q, k
and v of eight 64-wide heads take at T = 8192.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.autocast import without_autocast
from heedful.ops.products import operand, product, scores
from heedful.ops.standard import standard_attention
from heedful.ops.tiles import (
    ROWS,
    Field,
    Hidden,
    Sight,
    gather_heads,
    row_blocks,
    softmax_,
    spread_heads,
)
from heedful.ops.visibility import Visibility


def selective_attention_tiled(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    selector_q: Float[Tensor, "B Hs Tq Ds"],
    selector_k: Float[Tensor, "B Hs Tk Ds"],
    *,
    state: Float[Tensor, "B Hs Tk"] | None,
    tau: float | None,
    protect_first: bool,
    visibility: Visibility,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of `selective_attention`, in blocks of query rows."""
    first = visibility.first_tokens(k.shape[2], k.device) if protect_first else None
    output, last, memory, _ = _tiled(
        q, k, v, selector_q, selector_k, state, visibility.segments(), first,
        visibility.window, tau, scale,
    )  # fmt: skip
    return output, last, memory if tau is not None else None


class _Tile(NamedTuple):
    """One block before the product with the values; `p` is the softmax, `f` what is hidden."""

    columns: range
    hidden: Hidden
    active: Tensor  # where S has a slope
    s: Tensor
    f: Tensor
    p: Tensor


class _Inputs(NamedTuple):
    """Widened inputs with key heads spread over query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    selector_q: Tensor
    selector_k: Tensor
    field: Field
    first: Tensor | None
    scale: float


def _prepare(q, k, v, selector_q, selector_k, segments, first, window, scale) -> _Inputs:
    heads = q.shape[1]
    field = Field(Sight(segments, False, True, window), q.shape[2], k.shape[2], q.device)
    return _Inputs(
        operand(q), spread_heads(operand(k), heads), spread_heads(operand(v), heads),
        operand(selector_q), operand(selector_k), field, first, scale,
    )  # fmt: skip


def _tile(
    x: _Inputs, base: Float[Tensor, "B Hs Tk"], rows: range, room: Tensor | None = None
) -> _Tile:
    """`room`: a buffer for the logits of any block."""
    owned = range(x.field.offset + rows.start, x.field.offset + rows.stop)
    columns = x.field.columns(owned)
    cut = slice(columns.start, columns.stop)
    hidden = x.field.hidden(owned, columns)

    own = slice(rows.start, rows.stop)
    logits = scores(x.selector_q[:, :, own], x.selector_k[:, :, cut], x.scale)
    active = hidden.fill(logits >= 0, False)
    active.diagonal(owned.start - columns.start, 2, 3).fill_(False)
    if x.first is not None:
        active &= ~x.first[:, None, None, cut]
    s = logits.masked_fill_(~active, 0.0)
    f = base[:, :, None, cut] + _earlier(len(rows), s) @ s

    logits = scores(x.q[:, :, own], x.k[:, :, cut], x.scale, room)
    return _Tile(columns, hidden, active, s, f, softmax_(logits.sub_(f), hidden))


def _earlier(rows: int, like: Tensor) -> Tensor:
    """Strictly lower triangle of ones: row i sums what stands above it."""
    return torch.ones(rows, rows, dtype=like.dtype, device=like.device).tril(-1)


@torch.library.custom_op("heedful::selective_attention_tiled", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, selector_k: Tensor, state: Tensor | None,
    segments: Tensor | None, first: Tensor | None, window: int | None, tau: float | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, selectors, queries, _ = selector_q.shape
    blocks = -(-queries // ROWS)
    whole = segments is None and (window is None or window >= k.shape[2])
    if whole and state is None and tau is None:
        out = _nothing_selected(q, k, v, selector_q, selector_k, scale)
        if out is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            base = q.new_zeros(batch, selectors, k.shape[2], dtype=wide)
            return out, base, base.new_zeros(batch, 0), base.repeat(blocks, 1, 1, 1)
    x = _prepare(q, k, v, selector_q, selector_k, segments, first, window, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    base = q.new_zeros(batch, selectors, k.shape[2], dtype=wide)
    if state is not None:
        base += state
    out = q.new_empty(*q.shape[:3], v.shape[3])
    memory = base.new_zeros(batch, queries if tau is not None else 0)
    bases = base.new_empty(blocks, *base.shape)
    # From the first block to the last tiles grow, and none would find room where another stood.
    room = base.new_empty(batch * q.shape[1] * min(ROWS, queries) * k.shape[2])
    for start, stop in row_blocks(queries, ascending=True):
        bases[start // ROWS] = base
        tile = _tile(x, base, range(start, stop), room)
        cut = slice(tile.columns.start, tile.columns.stop)
        out[:, :, start:stop] = product(tile.p, x.v[:, :, cut])
        base[:, :, cut] += tile.s.sum(2)
        if tau is not None:
            kept = tile.hidden.fill(tile.f.clamp(max=tau), 0.0)
            memory[:, start:stop] = kept.sum((1, 3)) / selectors
            del kept
        del tile
    return out, base, memory, bases


def _nothing_selected(q, k, v, selector_q, selector_k, scale: float) -> Tensor | None:
    """Standard attention, to the last bit, while a selector initialised to zero is untrained.

    Not on a GPU, where this look at the selector would stall the stream.
    """
    if q.is_cuda or v.shape[3] != q.shape[3]:
        return None
    if bool(selector_q.any()) and bool(selector_k.any()):
        return None
    out = standard_attention(q, k, v, causal=True, scale=scale)
    return None if out is None else out.contiguous()


@_tiled.register_fake
def _(q, k, v, selector_q, selector_k, state, segments, first, window, tau, scale):
    batch, selectors, queries, _ = selector_q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    blocks = -(-queries // ROWS)
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(batch, selectors, k.shape[2], dtype=wide),
        q.new_empty(batch, queries if tau is not None else 0, dtype=wide),
        q.new_empty(blocks, batch, selectors, k.shape[2], dtype=wide),
    )


@torch.library.custom_op("heedful::selective_attention_tiled_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, grad_state: Tensor, grad_memory: Tensor, bases: Tensor, q: Tensor, k: Tensor,
    v: Tensor, selector_q: Tensor, selector_k: Tensor, segments: Tensor | None,
    first: Tensor | None, window: int | None, tau: float | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    x = _prepare(q, k, v, selector_q, selector_k, segments, first, window, scale)
    grad, selectors = operand(grad), selector_q.shape[1]
    # Contiguous, whatever the inputs' strides: the layout that the fake below promises.
    dq, dk, dv, dsq, dsk = (
        torch.zeros(t.shape, dtype=bases.dtype, device=t.device)
        for t in (x.q, x.k, x.v, x.selector_q, x.selector_k)
    )
    # The sum of dF over the queries of later blocks.
    later = grad_state.clone(memory_format=torch.contiguous_format)
    for start, stop in row_blocks(q.shape[2]):
        tile = _tile(x, bases[start // ROWS], range(start, stop))
        cut = slice(tile.columns.start, tile.columns.stop)
        out_grad = grad[:, :, start:stop]
        dv[:, :, cut] += product(tile.p.mT, out_grad)
        dp = product(out_grad, x.v[:, :, cut].mT)
        dlogits = torch._softmax_backward_data(dp, tile.p, -1, dp.dtype)
        del dp  # tiles are what the peak is made of

        df = -(dlogits.sum(1, keepdim=True) if selectors == 1 else dlogits)
        if tau is not None:
            counted = tile.hidden.fill(tile.f <= tau, False)
            df += counted * (grad_memory[:, None, start:stop, None] / selectors)
        ds = later[:, :, None, cut] + _earlier(stop - start, df).mT @ df
        later[:, :, cut] += df.sum(2)
        ds = ds.masked_fill_(~tile.active, 0.0).mul_(scale)
        dsq[:, :, start:stop] = product(ds, x.selector_k[:, :, cut])
        dsk[:, :, cut] += product(ds.mT, x.selector_q[:, :, start:stop])

        dlogits.mul_(scale)
        dq[:, :, start:stop] = product(dlogits, x.k[:, :, cut])
        dk[:, :, cut] += product(dlogits.mT, x.q[:, :, start:stop])
        del tile, dlogits, df, ds
    dk, dv = gather_heads(dk, k.shape[1]), gather_heads(dv, v.shape[1])
    inputs = (q, k, v, selector_q, selector_k)
    grads = [g.to(i.dtype) for g, i in zip((dq, dk, dv, dsq, dsk), inputs, strict=True)]
    return [*grads, later]


@_tiled_backward.register_fake
def _(grad, grad_state, grad_memory, bases, q, k, v, selector_q, selector_k, *_):
    inputs = (q, k, v, selector_q, selector_k, grad_state)
    return [x.new_empty(x.shape) for x in inputs]


def _save(ctx, inputs, output) -> None:
    q, k, v, selector_q, selector_k, state, segments, first, window, tau, scale = inputs
    bases = output[3]
    ctx.mark_non_differentiable(bases)
    ctx.save_for_backward(bases, q, k, v, selector_q, selector_k, segments, first)
    ctx.options = (window, tau, scale)
    ctx.state_dtype = None if state is None else state.dtype


def _backward(ctx, grad, grad_state, grad_memory, _):
    *grads, later = without_autocast(_tiled_backward)(
        grad, grad_state, grad_memory, *ctx.saved_tensors, *ctx.options
    )
    state = None if ctx.state_dtype is None else later.to(ctx.state_dtype)
    return *grads, state, None, None, None, None, None


_tiled.register_autograd(_backward, setup_context=_save)
