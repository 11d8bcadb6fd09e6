"""Multi-token attention in memory linear in T: blocks of query rows, recomputed in the backward.

A row block owns its rows of the probabilities P. The convolution before the softmax reads `cq - 1`
more rows of queries above the block. The one after the softmax takes the block's rows of P to
`cq2 - 1` more output rows below, and the block adds its share to these. (Two-sided kernels do both
above and below.) Everything but the softmax is linear, so the shares of blocks simply add up.

The file goes from the outside in: the function that is called, the loop over row blocks, what one
block does, its backward, and at the end the custom operator around all of it. The arithmetic of one
tile is in convolution.py; kernels of low rank have a form of their own, in flash.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.dropout import Dropout
from heedful.ops.common.few import few_queries
from heedful.ops.common.precision import widen, without_autocast
from heedful.ops.common.standard import standard_attention
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import (
    Scope,
    Sight,
    cap_,
    cap_slope,
    finished,
    row_blocks,
    spread_heads,
)
from heedful.ops.impl import refuse_second_derivative
from heedful.ops.mta.convolution import Parameters, Softmax, TileSteps
from heedful.ops.mta.decode import multi_token_attention_few


def multi_token_attention_tiled(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    terms: Terms,
    *,
    two_sided: bool = False,
    impl: str = "tiled",
    wide: bool = False,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `multi_token_attention`, in blocks of query rows; dense where these are few.

    The blocks are a CPU's if `impl` is `"tiled"`, see `Scope`, else a GPU's. The output is in q's
    dtype, or in the precision of the sums if `wide`.
    """
    if terms.dropout is None and few_queries(q, k, (q, k, v, *parameters, *terms.learned)):
        out = multi_token_attention_few(q, k, v, parameters, terms, two_sided=two_sided)
        return out.to(output_dtype(q, wide))
    visibility, scale, bias, softcap, sinks, dropout = terms
    sight = visibility.tensors(q.shape[2], k.shape[2], q.device)
    p, drop = dropout or (0.0, None)
    return _tiled(
        q, k, v, *parameters, bias, sinks, drop, *sight, visibility.documents is not None,
        visibility.causal, visibility.window, scale, softcap, p, two_sided, impl, wide,
    )  # fmt: skip


class Operands(NamedTuple):
    """A call's tensors as its blocks take them.

    Key heads are spread over query heads; the parameters are in the precision of the sums.
    """

    q: Float[Tensor, "B H Tq D"]
    k: Float[Tensor, "B H Tk D"]
    v: Float[Tensor, "B H Tk Dv"]
    parameters: Parameters
    scale: float
    bias: Float[Tensor, "#B #H Tq Tk"] | None
    softcap: float | None
    sinks: Float[Tensor, "H 1 1"] | None
    dropout: Dropout | None

    def biased(self, capped: Tensor, block: "RowBlock") -> Tensor:
        """The logits of the block's own rows with their bias, in place."""
        return capped if self.bias is None else capped.add_(block.own(self.bias))

    def dropout_factor(self, block: "RowBlock") -> Float[Tensor, "B H W C"] | None:
        """Dropout's factor on the rows that the block writes; `None` without dropout."""
        if self.dropout is None:
            return None
        return self.dropout.of_block(self.q, self.k.shape[2], block.write, block.columns)


def operands(
    q: Tensor, k: Tensor, v: Tensor, parameters: Parameters, scale: float, steps: TileSteps,
    bias: Tensor | None = None, sinks: Tensor | None = None, softcap: float | None = None,
    dropout: Dropout | None = None,
) -> Operands:  # fmt: skip
    """The call's tensors in the precisions in which these steps take them, the scale folded."""
    heads, accumulating = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    spread = [spread_heads(steps.operand(x), heads) for x in (q, k, v)]
    wide = Parameters(*(None if x is None else x.to(accumulating) for x in parameters))
    sinks = None if sinks is None else sinks.to(accumulating)[:, None, None]
    wide, scale = steps.folded(wide, scale)
    return Operands(*spread, wide, scale, bias, softcap, sinks, dropout)


class RowBlock(NamedTuple):
    """The rows and columns that one block is about; rows count queries, columns count keys."""

    rows: range  # those whose probabilities it owns
    read: range  # with the rows around them that the convolution before the softmax reads
    write: range  # with the rows around them that the convolution after the softmax reaches
    columns: range
    missing: tuple[int, int]  # rows to be read that would stand before the first query, or no more
    around: tuple[int, int]  # rows of zeros around its own from which those to write are made
    offset: int  # query i is token i + offset

    def tokens(self, rows: range) -> range:
        return range(self.offset + rows.start, self.offset + rows.stop)

    @property
    def keys(self) -> slice:
        return slice(self.columns.start, self.columns.stop)

    def own(self, x: Float[Tensor, "b h Tq Tk"]) -> Float[Tensor, "b h R C"]:
        """The block's part of something as large as the map."""
        return x[:, :, self.rows.start : self.rows.stop, self.keys]


def _row_blocks(x: Operands, steps: TileSteps) -> Iterator[RowBlock]:
    """All row blocks, the last first: it has the most columns of a causal map."""
    queries, scope, parameters = x.q.shape[2], steps.scope, x.parameters
    before, after = steps.reach(parameters.conv)
    back, ahead = steps.reach(parameters.post_conv)
    for start, stop in row_blocks(queries, scope.rows_per_block(x.q.shape[1])):
        owned = range(scope.offset + start, scope.offset + stop)
        write = range(max(0, start - ahead), min(stop + back, queries))
        yield RowBlock(
            rows=range(start, stop),
            read=range(max(0, start - before), min(stop + after, queries)),
            write=write,
            columns=scope.columns(owned, parameters.aside),
            missing=(max(0, before - start), max(0, stop + after - queries)),
            around=(back + start - write.start, ahead + write.stop - stop),
            offset=scope.offset,
        )


def attend(x: Operands, steps: TileSteps) -> Float[Tensor, "B H Tq Dv"]:
    """The output, in the precision of the sums."""
    out = _zeros(x.q, x.v.shape[3])
    for block in _row_blocks(x, steps):
        p = _probabilities(x, steps, block).soft.p
        a = _convolved(p, x, steps, block)
        if x.parameters.post_mix is not None:
            a = steps.mix(a, x.parameters.post_mix)
        if (factor := x.dropout_factor(block)) is not None:
            a = factor.mul_(a)
        steps.add_product(out[:, :, _cut(block.write)], a, x.v[:, :, block.keys])
        del p, a, factor  # before the next block's
    return out


class _Probabilities(NamedTuple):
    """The probabilities of one block, and what they were made from."""

    z: Tensor | None  # Mask_0(S), where a convolution follows
    c: Tensor | None  # Conv(Z), where mixing follows
    slope: Tensor | None  # of the soft cap, where there is one and the caller needs it
    soft: Softmax


def _probabilities(
    x: Operands, steps: TileSteps, block: RowBlock, *, slopes: bool = False
) -> _Probabilities:
    """P = softmax(Mask_-inf(Cap(W Conv(Mask_0(S))))) on the block's own rows (MTA eq. 5, 7)."""
    conv, _, mix, _ = x.parameters
    logits = steps.scores(
        x.q[:, :, _cut(block.read)], x.k[:, :, block.keys], x.scale, last=conv is mix is None
    )
    owned = block.tokens(block.rows)
    z = c = None
    if conv is not None:
        z = steps.blank(logits, block.tokens(block.read), block.columns)
        logits = steps.convolve(z, conv, *block.missing, owned, last=mix is None)
    if mix is not None:
        c = logits
        logits = steps.mix(c, mix, last=True)
    logits = cap_(logits, x.softcap)
    slope = cap_slope(logits, x.softcap) if slopes else None
    return _Probabilities(z, c, slope, _softmax(x, steps, block, logits))


def _softmax(x: Operands, steps: TileSteps, block: RowBlock, capped: Tensor) -> Softmax:
    """The softmax of the block's own rows."""
    logits = x.biased(capped, block)
    return steps.softmax(logits, x.sinks, block.tokens(block.rows), block.columns)


def _convolved(p: Tensor, x: Operands, steps: TileSteps, block: RowBlock) -> Tensor:
    """The block's share of Mask_0(Conv(P)) on the rows that it writes (MTA eq. 6)."""
    _, post_conv, _, _ = x.parameters
    if post_conv is None:
        return p
    outputs = block.tokens(block.write)
    share = steps.convolve(p, post_conv, *block.around, outputs)
    return steps.blank(share, outputs, block.columns)


def attend_backward(
    grad: Float[Tensor, "B H Tq Dv"], x: Operands, steps: TileSteps
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Parameters]:
    """Gradients of q, k, v, bias, sinks and the parameters, in the precision of the sums.

    But for that of the bias, as large as the map: it is in the bias's own.
    """
    dq = _zeros(x.q, x.q.shape[3])
    # Transposed, as a CPU's product is a quarter faster when its long side comes last.
    dk, dv = (_zeros(t.mT, t.shape[2]) for t in (x.k, x.v))
    sums = Parameters(*(None if t is None else torch.zeros_like(t) for t in x.parameters))
    dbias = None if x.bias is None else x.bias.new_zeros(x.bias.shape)
    dsinks = None if x.sinks is None else x.sinks.new_zeros(len(x.sinks))
    for block in _row_blocks(x, steps):
        block_map = _probabilities(x, steps, block, slopes=True)
        d = _after_softmax_backward(grad, block_map.soft.p, x, steps, block, dv, sums)
        last = dbias is None and block_map.slope is None and x.parameters.mix is None
        d, totals = steps.softmax_backward(d, block_map.soft, last=last)
        if dsinks is not None:  # a sink has no value: all it does is take weight
            dsinks -= (totals * block_map.soft.sunk).sum((0, 2, 3))
        if dbias is not None:
            block.own(dbias).copy_(d.sum_to_size(block.own(dbias).shape))
        if block_map.slope is not None:
            d.mul_(block_map.slope)
        if x.parameters.mix is not None:
            d, dweights = steps.mix_backward(d, block_map.c, x.parameters.mix, last=True)
            sums.mix.add_(dweights)
        z = block_map.z
        del block_map  # the gradient of a kernel takes more memory than any other step
        if z is not None:
            d = _before_softmax_backward(d, z, x, steps, block, sums)
        read, d = _cut(block.read), steps.narrowed(d)
        steps.add_product(dq[:, :, read], d, x.k[:, :, block.keys])
        steps.add_product(dk[..., block.keys], x.q[:, :, read].mT, d)
        del z, d
    if x.scale != 1.0:
        dq.mul_(x.scale), dk.mul_(x.scale)
    return dq, dk.mT, dv.mT, dbias, dsinks, sums


def _after_softmax_backward(
    grad: Tensor, p: Tensor, x: Operands, steps: TileSteps, block: RowBlock,
    dv: Tensor, sums: Parameters,
) -> Tensor:  # fmt: skip
    """dP of the block; adds its shares of dV and of the parameters behind the softmax.

    The peak of memory is made of tiles: each goes as soon as it has been read.
    """
    _, post_conv, _, post_mix = x.parameters
    out_grad = grad[:, :, _cut(block.write)]
    a = _convolved(p, x, steps, block)
    mixed = a if post_mix is None else steps.mix(a, post_mix)
    factor = x.dropout_factor(block)
    mixed = mixed if factor is None else mixed * factor
    steps.add_product(dv[..., block.keys], out_grad.mT, mixed)
    del mixed
    d = steps.tile(out_grad, x.v[:, :, block.keys].mT, mixed=post_mix is not None)  # dA
    if factor is not None:
        d.mul_(factor)
        del factor
    if post_mix is not None:
        d, dweights = steps.mix_backward(d, a, post_mix)
        sums.post_mix.add_(dweights)
    del a
    if post_conv is not None:
        outputs = block.tokens(block.write)
        d = steps.blank(d, outputs, block.columns)
        d, dkernel = steps.convolve_backward(d, p, post_conv, *block.around, outputs)
        sums.post_conv.add_(dkernel)
    return d


def _before_softmax_backward(
    d: Tensor, z: Tensor, x: Operands, steps: TileSteps, block: RowBlock, sums: Parameters
) -> Tensor:
    """dS of the block from the gradient of its convolution; adds its share of the kernel's."""
    owned = block.tokens(block.rows)
    d, dkernel = steps.convolve_backward(d, z, x.parameters.conv, *block.missing, owned, last=True)
    sums.conv.add_(dkernel)
    return steps.blank(d, block.tokens(block.read), block.columns)


def _zeros(like: Tensor, width: int) -> Tensor:
    """Contiguous, whatever the strides of `like`: the layout that the fakes promise."""
    accumulating = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(*like.shape[:3], width, dtype=accumulating, device=like.device)


def _cut(rows: range) -> slice:
    return slice(rows.start, rows.stop)


@torch.library.custom_op("heedful::multi_token_attention_tiled", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    drop: Tensor | None, segments: Tensor | None, mutual: Tensor | None, places: Tensor | None,
    documents: bool, causal: bool, window: int | None, scale: float, softcap: float | None,
    dropout_p: float, two_sided: bool, impl: str, wide: bool,
) -> Tensor:  # fmt: skip
    parameters = Parameters(conv, post_conv, mix, post_mix)
    sight = Sight(segments, documents, causal, window, mutual, places)
    qkv = [widen(x) if wide else x for x in (q, k, v)]
    out = None
    if impl == "tiled" and softcap is None and sinks is None and drop is None:
        out = identity_attention(*qkv, parameters, sight, scale, bias, two_sided)
    if out is None:
        steps = steps_of(impl, sight, q, k, two_sided)
        dropout = None if drop is None else Dropout(dropout_p, drop)
        parts = (parameters, scale, steps, bias, sinks, softcap, dropout)
        out = attend(operands(q, k, v, *parts), steps)
    return out.to(output_dtype(q, wide))


def identity_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    sight: Sight,
    scale: float,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    two_sided: bool = False,
) -> Float[Tensor, "B H Tq Dv"] | None:
    """Attention by torch's own kernel; `None` where a parameter is no longer the identity.

    So a freshly converted model gives the very logits that it gave before. `None` too where the
    visibility needs a mask, and anywhere but on a CPU: there this look would stall the stream.
    """
    window = sight.window is not None and sight.window < k.shape[2]
    apart = (sight.segments, sight.mutual, sight.places)
    if q.device.type != "cpu" or window or any(x is not None for x in apart):
        return None
    if v.shape[3] != q.shape[3]:  # torch would take its dense path
        return None
    conv, post_conv, mix, post_mix = parameters
    if not all(x is None or _is_identity_kernel(x, two_sided) for x in (conv, post_conv)):
        return None
    if not all(x is None or bool((x == torch.eye(x.shape[1])).all()) for x in (mix, post_mix)):
        return None
    out = standard_attention(q, k, v, causal=sight.causal, scale=scale, bias=bias)
    return None if out is None else out.contiguous()


def _is_identity_kernel(kernel: Float[Tensor, "H cq ck"], two_sided: bool) -> bool:
    rows, columns = kernel.shape[1:]
    identity = torch.zeros(rows, columns)
    identity[rows // 2 if two_sided else -1, columns // 2] = 1
    return bool((kernel == identity).all())


def steps_of(impl: str, sight: Sight, q: Tensor, k: Tensor, two_sided: bool) -> TileSteps:
    """The arithmetic of this implementation's tiles."""
    scope = Scope(sight, q.shape[2], k.shape[2], q.device, composed=impl != "tiled")
    if impl != "fused":
        return TileSteps(scope, two_sided)
    from heedful.ops.mta.fused.steps import FusedSteps  # needs Triton

    return FusedSteps(scope, two_sided)


def output_dtype(q: Tensor, wide: bool) -> torch.dtype:
    """q's dtype, or that of the sums if `wide`."""
    return torch.promote_types(q.dtype, torch.float32) if wide else q.dtype


@_tiled.register_fake
def _(q, k, v, *options):
    return q.new_empty(*q.shape[:3], v.shape[3], dtype=output_dtype(q, options[-1]))


@torch.library.custom_op("heedful::multi_token_attention_tiled_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, post_conv: Tensor | None,
    mix: Tensor | None, post_mix: Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    drop: Tensor | None, segments: Tensor | None, mutual: Tensor | None, places: Tensor | None,
    documents: bool, causal: bool, window: int | None, scale: float, softcap: float | None,
    dropout_p: float, two_sided: bool, impl: str, wide: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sight = Sight(segments, documents, causal, window, mutual, places)
    steps = steps_of(impl, sight, q, k, two_sided)
    inputs = (q, k, v, conv, post_conv, mix, post_mix, bias, sinks)
    dropout = None if drop is None else Dropout(dropout_p, drop)
    return gradients(grad, inputs, scale, steps, softcap, dropout)


def gradients(
    grad: Tensor, inputs: tuple[Tensor | None, ...], scale: float, steps: TileSteps,
    softcap: float | None = None, dropout: Dropout | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, the parameters, bias and sinks in their dtypes; empty for none."""
    q, k, v, *parameters, bias, sinks = inputs
    x = operands(q, k, v, Parameters(*parameters), scale, steps, bias, sinks, softcap, dropout)
    *grads, dbias, dsinks, sums = attend_backward(steps.operand(grad.to(q.dtype)), x, steps)
    if x.scale != scale:
        sums, _ = steps.folded(sums, scale)
    rounded = [finished(grads, t) for t in (q, k, v)]
    for g, t in zip((*sums, dbias, dsinks), (*parameters, bias, sinks), strict=True):
        rounded.append(q.new_empty(0) if t is None else g.to(t.dtype))
    return tuple(rounded)


@_tiled_backward.register_fake
def _(grad, q, *inputs):
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, *inputs[:8]))


refuse_second_derivative(  # sums that stay wide are differential attention's
    _tiled_backward, lambda x: f"{'differential' if x[-1] else 'multi_token'}_attention"
)


def save(ctx, inputs, output) -> None:
    """Keeps the inputs for the backward pass, and nothing else."""
    first = next(i for i, x in enumerate(inputs) if isinstance(x, bool))  # tensors stand before it
    ctx.save_for_backward(*inputs[:first])
    ctx.options = inputs[first:]


def _backward(ctx, grad):
    tensors = ctx.saved_tensors
    grads = without_autocast(_tiled_backward)(grad, *tensors, *ctx.options)
    given = [None if x is None else g for x, g in zip(tensors, grads, strict=False)]
    return *given, *[None] * (len(tensors) - len(grads) + len(ctx.options))


_tiled.register_autograd(_backward, setup_context=save)
