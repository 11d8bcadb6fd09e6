"""Selective attention in memory linear in T: blocks of query rows, recomputed in the backward.

F is a sum over earlier queries. Between blocks it travels as one running total per key; inside a
block the missing part is a product with a strictly triangular matrix of ones. The backward goes
from the last block to the first and takes from the total what the forward added to it, so nothing
is kept of the blocks between. For that the total is held exactly enough: see sums.py.

The file goes from the outside in: the function that is called, the loop over row blocks, what one
block does, its backward, and at the end the custom operator around all of it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.dropout import Dropout
from heedful.ops.common.few import few_queries
from heedful.ops.common.precision import operand, product, scores, without_autocast
from heedful.ops.common.softmax import tile_softmax
from heedful.ops.common.standard import standard_attention
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import (
    ROWS,
    ROWS_COMPOSED,
    Masked,
    Scope,
    Sight,
    cap_,
    cap_slope,
    finished,
    row_blocks,
    sink_gradient,
    spread_heads,
    sunk_softmax_,
)
from heedful.ops.impl import refuse_second_derivative
from heedful.ops.selective.decode import selective_attention_few
from heedful.ops.selective.sums import RunningTotal, above, below


def selective_attention_tiled(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    selector_q: Float[Tensor, "B Hs Tq Ds"],
    selector_k: Float[Tensor, "B Hs Tk Ds"],
    state: Float[Tensor, "B Hs Tk"] | None,
    terms: Terms,
    *,
    tau: float | None,
    protect_first: bool,
    composed: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of `selective_attention`, in blocks of query rows; dense where these are few.

    The blocks are a GPU's if `composed`, see `Scope`, else a CPU's.
    """
    tensors = (q, k, v, selector_q, selector_k, state)
    if terms.dropout is None and few_queries(q, k, (*tensors, *terms.learned)):
        return selective_attention_few(*tensors, terms, tau=tau, protect_first=protect_first)
    visibility, scale, bias, softcap, sinks, dropout = terms
    first = visibility.first_tokens(k.shape[2], k.device) if protect_first else None
    sight = visibility.tensors(q.shape[2], k.shape[2], q.device)
    p, drop = dropout or (0.0, None)
    output, last, memory, _ = _tiled(
        *tensors, bias, sinks, drop, *sight, first, visibility.window, tau, scale, softcap, p,
        composed,
    )  # fmt: skip
    return output, last, memory if tau is not None else None


class Operands(NamedTuple):
    """A call's tensors as its blocks take them, with key heads spread over query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    selector_q: Tensor
    selector_k: Tensor
    state: Tensor | None
    bias: Tensor | None
    sinks: Float[Tensor, "H 1 1"] | None
    scope: Scope
    first: Tensor | None
    scale: float
    softcap: float | None
    dropout: Dropout | None

    @property
    def rows(self) -> int:
        """Of a block of queries."""
        if not self.scope.composed:
            return ROWS
        return self.scope.most_rows(self.q.shape[1], ROWS_COMPOSED)

    def dropout_factor(self, block: "RowBlock") -> Float[Tensor, "B H R C"] | None:
        """Dropout's factor on the block's probabilities; `None` without dropout."""
        if self.dropout is None:
            return None
        return self.dropout.of_block(self.q, self.k.shape[2], block.rows, block.cut)


def operands(
    q, k, v, selector_q, selector_k, state, bias, sinks, drop, segments, mutual, places, first,
    window, scale, softcap, dropout_p, composed,
) -> Operands:  # fmt: skip
    """The call's tensors as its blocks take them, and its visibility.

    Keys that nobody masks are zero in `selector_k`, and so is what they select.
    """
    heads, selector_k = q.shape[1], operand(selector_k)
    if first is not None:
        selector_k = selector_k.masked_fill(first[:, None, :, None], 0.0)
    sight = Sight(segments, False, True, window, mutual, places)
    scope = Scope(sight, q.shape[2], k.shape[2], q.device, composed=composed)
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(q.dtype, torch.float32))[:, None, None]
    return Operands(
        operand(q), spread_heads(operand(k), heads), spread_heads(operand(v), heads),
        operand(selector_q), selector_k, state, bias, sinks, scope, first, scale,
        softcap, None if drop is None else Dropout(dropout_p, drop),
    )  # fmt: skip


class Outputs(NamedTuple):
    """Outputs of the loop over the blocks: the output, the memory, and the running total's pair."""

    output: Float[Tensor, "B H Tq Dv"]
    memory: Float[Tensor, "B Tq"]
    pair: Float[Tensor, "2 B Hs Tk"]


def attend(x: Operands, tau: float | None, out: Outputs) -> None:
    """Fills the outputs, from the first block to the last."""
    total = RunningTotal(out.pair)
    (batch, heads, queries, _), (_, selectors, keys, _) = x.q.shape, x.selector_k.shape
    room = None
    if not x.scope.composed:
        # From first to last tiles grow, and none would find room where another stood.
        room = out.pair.new_empty(batch * heads * min(ROWS, queries) * keys)
    for start, stop in row_blocks(queries, x.rows, ascending=True):
        block = _row_block(x, start, stop)
        f = _masking(x, block, total)
        p = _maps(x, block, f, room=room).p
        if (factor := x.dropout_factor(block)) is not None:
            p.mul_(factor)
            del factor
        output = product(p, x.v[:, :, block.cut])
        del p
        out.output[:, :, start:stop] = output
        if tau is not None:
            terms = block.masked.fill(f.clamp(max=tau), 0.0)
            out.memory[:, start:stop] = terms.sum((1, 3)) / selectors
            del terms
        del block, f, output


class RowBlock(NamedTuple):
    """Block of queries, for the tokens that it masks from later ones."""

    rows: slice
    cut: slice  # of the keys
    masked: Masked
    diagonal: int  # of the tile: an entry above it is not earlier than its query
    later: Tensor | None  # which entries are not, for tokens with places: no diagonal parts them
    logits: Tensor  # of the selector

    def only_active(self, x: Float[Tensor, "B Hs R C"]) -> Float[Tensor, "B Hs R C"]:
        """Zero where nothing can be masked, in place: whatever stood there, NaN included.

        Nothing is masked but earlier tokens: not the token itself, nor a later one that it sees.
        """
        if self.later is None:
            edge = max(0, self.diagonal + 1)  # the first column with an entry above the diagonal
            x[..., edge:].tril_(self.diagonal - edge)
        else:
            x.masked_fill_(self.later, 0.0)
        return self.masked.fill(x, 0.0)


def _row_block(x: Operands, start: int, stop: int) -> RowBlock:
    owned = range(x.scope.offset + start, x.scope.offset + stop)
    columns = x.scope.columns(owned)
    rows, cut = slice(start, stop), slice(columns.start, columns.stop)
    masked = x.scope.masked(owned, columns)
    logits = scores(x.selector_q[:, :, rows], x.selector_k[:, :, cut], x.scale)
    later = None if x.scope.sight.places is None else ~x.scope.earlier(owned, columns)
    diagonal = owned.start - columns.start - 1
    return RowBlock(rows, cut, masked, diagonal, later, logits)


def _masking(
    x: Operands, block: RowBlock, total: RunningTotal, *, back: bool = False
) -> Float[Tensor, "B Hs R C"]:
    """F of a block.

    Into `total`, which is of the blocks before it, goes what it masks; or with `back` out of it.
    """
    s = torch.fmax(block.logits, block.logits.new_zeros(()))  # of NaN and zero this is zero
    sums = block.only_active(s).sum(2)
    if back:
        total.add(-sums, block.cut)
    base = total.rounded(block.cut)
    if not back:
        total.add(sums, block.cut)
    if x.state is not None:
        base += x.state[..., block.cut]  # last, as it may be infinite: such a key stays masked
    return above(s).add_(base[:, :, None])


class _Maps(NamedTuple):
    """Attention weights of a block of queries; the soft cap and the sinks, where there are any."""

    p: Float[Tensor, "B H R C"]
    slope: Float[Tensor, "B H R C"] | None
    sunk: Float[Tensor, "B H R 1"] | None  # what of each row goes to the sink


def _maps(
    x: Operands,
    block: RowBlock,
    f: Float[Tensor, "B Hs R C"],
    *,
    room: Tensor | None = None,
    slopes: bool = False,
) -> "_Maps":
    """The maps of a block, with the slope of the soft cap if `slopes` asks for it.

    The logits are made in `room`, if that is given.
    """
    logits = scores(x.q[:, :, block.rows], x.k[:, :, block.cut], x.scale, room)
    cap_(logits, x.softcap)
    slope = cap_slope(logits, x.softcap) if slopes else None
    logits.sub_(f)
    if x.bias is not None:
        logits.add_(x.bias[:, :, block.rows, block.cut])
    if not x.scope.composed:
        p, sunk = sunk_softmax_(logits, block.masked, x.sinks)
        return _Maps(p, slope, sunk)
    p, log_sum = tile_softmax(logits, block.masked.mask, x.sinks, logits.dtype)
    return _Maps(p, slope, None if x.sinks is None else (x.sinks - log_sum).exp())


def attend_backward(
    grad: Tensor, grad_state: Tensor, grad_memory: Tensor, x: Operands, pair: Tensor,
    tau: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the operands and of the incoming state, from the last block to the first."""
    selectors, total = x.selector_q.shape[1], RunningTotal(pair.clone())
    # Contiguous, whatever the inputs' strides: the layout that the fake below promises.
    # Every block has rows of its own.
    dq = torch.empty_like(x.q, dtype=pair.dtype)
    dsq = torch.empty_like(x.selector_q, dtype=pair.dtype)
    # Those of keys are transposed: a product is a quarter faster when its long side comes last.
    dsk = torch.zeros(x.selector_k.mT.shape, dtype=pair.dtype, device=x.k.device)
    dk, dv = (pair.new_zeros(t.mT.shape).mT for t in (x.k, x.v))
    dbias = pair.new_zeros(0)
    if x.bias is not None:
        dbias = torch.zeros(x.bias.shape, dtype=x.bias.dtype, device=pair.device)
    dsinks = pair.new_zeros(0 if x.sinks is None else len(x.sinks))
    # The sum of dF over the queries of later blocks.
    later = grad_state.clone(memory_format=torch.contiguous_format)
    for start, stop in row_blocks(x.q.shape[2], x.rows):
        block = _row_block(x, start, stop)
        rows, cut = block.rows, block.cut
        f = _masking(x, block, total, back=True)
        out_grad = grad[:, :, rows]
        p, slope, sunk = _maps(x, block, f, slopes=True)
        factor = x.dropout_factor(block)
        dv[:, :, cut].add_(product(out_grad.mT, p if factor is None else p * factor).mT)
        dp = product(out_grad, x.v[:, :, cut].mT)
        if factor is not None:
            dp.mul_(factor)
            del factor
        if sunk is not None:
            dsinks += sink_gradient(dp, p, sunk)
        dlogits = torch._softmax_backward_data(dp, p, -1, dp.dtype)
        del dp, p  # tiles are what the peak is made of
        if x.bias is not None:
            part = dbias[:, :, rows, cut]
            part.copy_(dlogits.sum_to_size(part.shape))

        # Of -F, not of F.
        g = dlogits.sum(1, keepdim=True) if selectors == 1 else dlogits
        if tau is not None:
            unclipped = block.masked.fill(f <= tau, False)
            g = g - unclipped * (grad_memory[:, None, rows, None] / selectors)
        # At zero the slope of the ReLU is one, as in reference.py.
        ds = below(-g, later[:, :, cut]).mul_(block.logits >= 0)
        block.only_active(ds)
        dsq[:, :, rows] = product(ds, x.selector_k[:, :, cut]).mul_(x.scale)
        dsk[..., cut].add_(product(x.selector_q[:, :, rows].mT, ds), alpha=x.scale)

        if slope is not None:
            dlogits.mul_(slope)
        dlogits.mul_(x.scale)
        dq[:, :, rows] = product(dlogits, x.k[:, :, cut])
        dk[:, :, cut].add_(product(x.q[:, :, rows].mT, dlogits).mT)
        del block, f, slope, dlogits, g, ds
    dsk = dsk.mT
    if x.first is not None:
        dsk.masked_fill_(x.first[:, None, :, None], 0.0)
    return dq, dk, dv, dsq, dsk, dbias, dsinks, later


@torch.library.custom_op("heedful::selective_attention_tiled", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, selector_k: Tensor, state: Tensor | None,
    bias: Tensor | None, sinks: Tensor | None, drop: Tensor | None, segments: Tensor | None,
    mutual: Tensor | None, places: Tensor | None, first: Tensor | None, window: int | None,
    tau: float | None, scale: float, softcap: float | None, dropout_p: float, composed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    batch, selectors, queries, _ = selector_q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    pair = torch.zeros(2, batch, selectors, k.shape[2], dtype=wide, device=q.device)
    memory = pair.new_zeros(batch, queries if tau is not None else 0)
    whole = segments is mutual is places is None and (window is None or window >= k.shape[2])
    if not composed and whole and state is tau is softcap is sinks is drop is None:
        out = _nothing_selected(q, k, v, selector_q, selector_k, scale, bias)
        if out is not None:
            return out, torch.zeros_like(pair[0]), memory, pair
    x = operands(
        q, k, v, selector_q, selector_k, state, bias, sinks, drop, segments, mutual, places,
        first, window, scale, softcap, dropout_p, composed,
    )  # fmt: skip
    out = q.new_empty(*q.shape[:3], v.shape[3])
    attend(x, tau, Outputs(out, memory, pair))
    last = RunningTotal(pair).rounded()
    return out, last if state is None else last + state, memory, pair


def _nothing_selected(q, k, v, selector_q, selector_k, scale: float, bias=None) -> Tensor | None:
    """Standard attention, to the last bit, while a selector initialised to zero is untrained.

    On a CPU only: elsewhere this look at the selector would stall the stream.
    """
    if q.device.type != "cpu" or v.shape[3] != q.shape[3]:
        return None
    if bool(selector_q.any()) and bool(selector_k.any()):
        return None
    out = standard_attention(q, k, v, causal=True, scale=scale, bias=bias)
    return None if out is None else out.contiguous()


@_tiled.register_fake
def _(
    q, k, v, selector_q, selector_k, state, bias, sinks, drop, segments, mutual, places, first,
    window, tau, scale, softcap, dropout_p, composed,
):  # fmt: skip
    batch, selectors, queries, _ = selector_q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(batch, selectors, k.shape[2], dtype=wide),
        q.new_empty(batch, queries if tau is not None else 0, dtype=wide),
        q.new_empty(2, batch, selectors, k.shape[2], dtype=wide),
    )


@torch.library.custom_op("heedful::selective_attention_tiled_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, grad_state: Tensor, grad_memory: Tensor, pair: Tensor, q: Tensor, k: Tensor,
    v: Tensor, selector_q: Tensor, selector_k: Tensor, state: Tensor | None, bias: Tensor | None,
    sinks: Tensor | None, drop: Tensor | None, segments: Tensor | None, mutual: Tensor | None,
    places: Tensor | None, first: Tensor | None, window: int | None, tau: float | None,
    scale: float, softcap: float | None, dropout_p: float, composed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    x = operands(
        q, k, v, selector_q, selector_k, state, bias, sinks, drop, segments, mutual, places,
        first, window, scale, softcap, dropout_p, composed,
    )  # fmt: skip
    *grads, dbias, dsinks, later = attend_backward(
        operand(grad), grad_state, grad_memory, x, pair, tau
    )
    dsinks = dsinks if sinks is None else dsinks.to(sinks.dtype)
    return *(finished(grads, t) for t in (q, k, v, selector_q, selector_k)), dbias, dsinks, later


@_tiled_backward.register_fake
def _(
    grad, grad_state, grad_memory, pair, q, k, v, selector_q, selector_k, state, bias, sinks, *_
):  # fmt: skip
    optional = (pair.new_empty(0) if x is None else x for x in (bias, sinks))
    inputs = (q, k, v, selector_q, selector_k, *optional, grad_state)
    return tuple(x.new_empty(x.shape) for x in inputs)


refuse_second_derivative(_tiled_backward, "selective_attention")


def _save(ctx, inputs, output) -> None:
    *tensors, window, tau, scale, softcap, dropout_p, composed = inputs
    pair = output[3]
    ctx.mark_non_differentiable(pair)
    ctx.save_for_backward(pair, *tensors)
    ctx.options = (window, tau, scale, softcap, dropout_p, composed)
    ctx.present = tuple(x is not None for x in tensors[5:8])


def _backward(ctx, grad, grad_state, grad_memory, *_):
    *grads, dbias, dsinks, later = without_autocast(_tiled_backward)(
        grad, grad_state, grad_memory, *ctx.saved_tensors, *ctx.options
    )
    last = (later, dbias, dsinks)
    optional = (x if present else None for x, present in zip(last, ctx.present, strict=True))
    return *grads, *optional, *(None,) * 11


_tiled.register_autograd(_backward, setup_context=_save)
