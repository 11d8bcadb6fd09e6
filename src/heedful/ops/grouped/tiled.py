"""Grouped attention in blocks of query rows: the work is what the definition needs, and no more.

A block of rows scores the summaries that any of its rows sees and the tokens of its neighbourhood,
each part by itself; the softmax of both is joined by their log-sum-exp. The backward computes the
blocks again. Where groups ask, rows that ask with the same query for the same summaries are one
row of the first part.

The file goes from the outside in: the function that is called, the loop over blocks, the three
parts of a block with their gradients, and at the end the custom operator around all of it.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.ops.common.few import few_queries
from heedful.ops.common.precision import operand, product, widen, without_autocast
from heedful.ops.common.tiles import Masked
from heedful.ops.grouped.blocks import Block, Operands, blocks_of, units_of
from heedful.ops.grouped.decode import grouped_attention_few
from heedful.ops.grouped.neighbourhood import GroupedCall
from heedful.ops.impl import refuse_second_derivative

_LOG2_E = 1.4426950408889634


def grouped_attention_tiled(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    call: GroupedCall,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `grouped_attention`, in blocks of query rows; dense where these are few."""
    groups, summaries, log_size = call.groups, call.summaries, call.log_size
    reach = call.reach(q.shape[2], k.shape[2])
    learned = (q, k, v, *summaries, groups.weight, log_size)
    if few_queries(q, k, learned) and call.bias is None:
        return grouped_attention_few(q, k, v, call, reach)
    asking, unit = q, None
    if summaries.q is not None:
        asking, unit = units_of(q, summaries.q, reach.stacked())
    weight = groups.weight.to(log_size.dtype)
    return _tiled(
        q, k, v, asking, summaries.k, summaries.v, log_size, weight, call.bias, call.group_bias,
        groups.index, reach.stacked(), unit, groups.hard, call.scale,
    )[0]  # fmt: skip


class SoftmaxPart(NamedTuple):
    """One part of a block's softmax, before it is joined: the largest logit, sum, and output."""

    top: Float[Tensor, "B H R 1"]
    total: Float[Tensor, "B H R 1"]
    out: Float[Tensor, "B H R Dv"]


def attend(x: Operands, out: Float[Tensor, "B H Tq Dv"], lse: Float[Tensor, "B H Tq"]) -> None:
    """Fills the output, and the log-sum-exp of every row's logits."""
    for block in blocks_of(x):
        rows = slice(block.rows.start, block.rows.stop)
        parts = []
        if len(block.groups):
            logits = _group_logits(x, block)
            part = _part(logits, x.group_v[:, :, block.groups.start : block.groups.stop])
            if x.unit is not None:
                own = x.unit[rows] - block.units.start
                part = SoftmaxPart(*(t.index_select(2, own) for t in part))
            parts.append(part)
        if len(block.tokens):
            logits, _ = _token_logits(x, block)
            parts.append(_part(logits, x.v[:, :, block.tokens.start : block.tokens.stop]))
        if not parts:
            out[:, :, rows], lse[:, :, rows] = 0, float("inf")
            continue
        top = torch.stack([part.top for part in parts]).amax(0)
        top = top.masked_fill(top == float("-inf"), 0)
        factors = [(part.top - top).exp() for part in parts]
        total = sum(f * part.total for f, part in zip(factors, parts, strict=True))
        joined = sum(f * part.out for f, part in zip(factors, parts, strict=True))
        blind = total == 0
        out[:, :, rows] = joined / total.masked_fill(blind, 1)
        # A row that sees nothing has weights of zero on the way back too.
        lse[:, :, rows] = (top + total.log()).masked_fill(blind, float("inf"))[..., 0]


def _part(logits: Float[Tensor, "B H R C"], v: Float[Tensor, "B Hk C Dv"]) -> SoftmaxPart:
    top = logits.amax(-1, keepdim=True)
    weights = _exp_(logits.sub_(top.masked_fill(top == float("-inf"), 0)))
    return SoftmaxPart(top, weights.sum(-1, keepdim=True), _by_key_head(weights, v))


def _exp_(x: Tensor) -> Tensor:
    """exp in place; what would be lost beside one is dropped, as subnormal numbers are slow."""
    torch.threshold_(x, -80.0, float("-inf"))
    return x.mul_(_LOG2_E).exp2_()


def _by_key_head(
    weights: Float[Tensor, "B H R C"], v: Float[Tensor, "B Hk C D"]
) -> Float[Tensor, "B H R D"]:
    """`weights @ v`, each key head for all its query heads at once."""
    out = product(weights.unflatten(1, (v.shape[1], -1)).flatten(2, 3), v)
    return out.unflatten(2, (-1, weights.shape[2])).flatten(1, 2)


def _rows_by_key_head(q: Float[Tensor, "B H R D"], heads: int) -> Float[Tensor, "B {heads} rows D"]:
    return q.unflatten(1, (heads, -1)).flatten(2, 3)


def _scores(
    q: Float[Tensor, "B H R D"], k: Float[Tensor, "B Hk C D"], scale: float
) -> Float[Tensor, "B H R C"]:
    """`scale q k^T`, widened."""
    logits = widen(_rows_by_key_head(q, k.shape[1]) @ k.mT).mul_(scale)
    return logits.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def _group_logits(x: Operands, block: Block) -> Float[Tensor, "B H U G"]:
    """Logits of the summaries."""
    cut = slice(block.groups.start, block.groups.stop)
    asking = x.asking[:, :, block.units.start : block.units.stop]
    logits = _scores(asking, x.group_k[:, :, cut], x.scale)
    logits.add_(x.log_size[:, :, None, cut])
    if x.group_bias is not None:
        logits.add_(x.group_bias[:, :, block.rows.start : block.rows.stop, cut])
    rows = torch.arange(block.rows.start, block.rows.stop, device=logits.device)
    if x.unit is not None:  # any row of a unit, as all see the same
        rows = torch.searchsorted(x.unit, torch.arange(block.units.start, block.units.stop,
                                                       device=logits.device))  # fmt: skip
    first, near, after, last = (y[..., None] for y in x.reach[:, :4, rows].unbind(1))
    at = torch.arange(block.groups.start + block.clear, block.groups.stop, device=logits.device)
    visible = ((at >= first) & (at < near)) | ((at >= after) & (at < last))
    Masked(block.clear, ~visible[:, None]).fill(logits, float("-inf"))
    return logits


def _token_logits(
    x: Operands, block: Block
) -> tuple[Float[Tensor, "B H R C"], Float[Tensor, "#B R C"] | None]:
    """Logits of the tokens, and what no visible summary holds of each, if that is not all."""
    rows, cut = (slice(r.start, r.stop) for r in (block.rows, block.tokens))
    logits = _scores(x.q[:, :, rows], x.k[:, :, cut], x.scale)
    if x.bias is not None:
        logits.add_(x.bias[:, :, rows, cut])
    at = torch.arange(cut.start, cut.stop, device=logits.device)
    start, stop = (y[..., None] for y in x.reach[:, 4:6, rows].unbind(1))
    inside = (at >= start) & (at < stop)
    remainder = None
    if x.hard:
        inside = inside & (x.index[:, None, cut, 0] >= 0)
    else:
        remainder = _remainder(x, rows, cut)
        inside = inside & (remainder > 0)
        logits.add_(remainder.where(inside, 1).log()[:, None])
    return logits.masked_fill_(~inside[:, None], float("-inf")), remainder


def _uncovered(x: Operands, rows: slice, cut: slice) -> Bool[Tensor, "B R C S"]:
    """Mark the tokens' groups in the rows' neighbourhood, whose summaries are masked."""
    index = x.index[:, None, cut]
    near, after = (y[..., None, None] for y in x.reach[:, 1:3, rows].unbind(1))
    return (index >= near) & (index < after)


def _remainder(x: Operands, rows: slice, cut: slice) -> Float[Tensor, "B R C"]:
    """r_i(t), the share of each token that no visible summary holds.

    Of a token of which none is, it is one, and not a sum that may depend on what comes later.
    """
    uncovered, index = _uncovered(x, rows, cut), x.index[:, None, cut]
    whole = (uncovered | (index < 0)).all(-1) & (index >= 0).any(-1)
    return (uncovered * x.weight[:, None, cut]).sum(-1).masked_fill(whole, 1)


class Gradients(NamedTuple):
    """Of the tensors that a call is differentiated in, filled block by block."""

    q: Tensor
    k: Tensor
    v: Tensor
    asking: Tensor
    group_k: Tensor
    group_v: Tensor
    log_size: Tensor
    weight: Tensor
    bias: Tensor | None
    group_bias: Tensor | None


def attend_backward(
    grad: Float[Tensor, "B H Tq Dv"], x: Operands, delta: Tensor, lse: Tensor, to: Gradients
) -> None:
    """Adds every block's gradients; `delta` is the sum of gradient times output of every row."""
    for block in blocks_of(x):
        rows = slice(block.rows.start, block.rows.stop)
        back = _Back(grad[:, :, rows], delta[:, :, rows, None], lse[:, :, rows, None])
        if len(block.groups):
            _groups_backward(x, block, back, to)
        if len(block.tokens):
            _tokens_backward(x, block, back, to)


class _Back(NamedTuple):
    """Row statistics for the gradient of a part; the last of them normalises the weights."""

    grad: Float[Tensor, "B H R Dv"]
    delta: Float[Tensor, "B H R 1"]
    lse: Float[Tensor, "B H R 1"]

    def of(
        self, logits: Float[Tensor, "B H R C"], v: Float[Tensor, "B Hk C Dv"]
    ) -> tuple[Float[Tensor, "B H R C"], Float[Tensor, "B H R C"]]:
        """Weights, in the place of the logits, and the logits' gradient."""
        weights = _exp_(logits.sub_(self.lse))
        gradient = product(_rows_by_key_head(self.grad, v.shape[1]), v.mT)
        gradient = gradient.unflatten(2, (-1, logits.shape[2])).flatten(1, 2)
        return weights, gradient.sub_(self.delta).mul_(weights)

    def for_units(self, logits: Tensor, own: Int[Tensor, " R"]) -> "_Back":
        """Of rows that ask as one: each row's weights are the unit's times a factor of its own."""
        units = logits.shape[2]
        lse = logits.logsumexp(-1, keepdim=True)
        factor = (lse.index_select(2, own) - self.lse).exp()
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))

        def added(y: Tensor) -> Tensor:
            total = y.new_zeros(*y.shape[:2], units, y.shape[3])
            return total.index_add_(2, own, y)

        return _Back(added(widen(self.grad) * factor), added(self.delta * factor), lse)


def _add_to(
    gradient: Float[Tensor, "B Hk C D"], weights: Float[Tensor, "B H R C"], x: Tensor
) -> None:
    """Adds `weights^T x` over each key head's query heads."""
    heads = gradient.shape[1]
    gradient += product(_rows_by_key_head(weights, heads).mT, _rows_by_key_head(x, heads))


def _groups_backward(x: Operands, block: Block, back: _Back, to: Gradients) -> None:
    cut, units = (slice(r.start, r.stop) for r in (block.groups, block.units))
    logits = _group_logits(x, block)
    if x.unit is not None:
        own = x.unit[block.rows.start : block.rows.stop] - block.units.start
        back = back.for_units(logits, own)
    values, keys = x.group_v[:, :, cut], x.group_k[:, :, cut]
    weights, dlogits = back.of(logits, values)
    _add_to(to.group_v[:, :, cut], weights, back.grad)
    to.log_size[:, :, cut].add_(dlogits.sum(2))
    if to.group_bias is not None:
        part = to.group_bias[:, :, block.rows.start : block.rows.stop, cut]
        part += dlogits.sum_to_size(part.shape)
    dlogits.mul_(x.scale)
    asking = x.asking[:, :, units]
    to.asking[:, :, units].add_(_by_key_head(dlogits, keys))
    _add_to(to.group_k[:, :, cut], dlogits, asking)


def _tokens_backward(x: Operands, block: Block, back: _Back, to: Gradients) -> None:
    rows, cut = (slice(r.start, r.stop) for r in (block.rows, block.tokens))
    logits, remainder = _token_logits(x, block)
    weights, dlogits = back.of(logits, x.v[:, :, cut])
    _add_to(to.v[:, :, cut], weights, back.grad)
    if remainder is not None:
        dremainder = dlogits.sum(1) / remainder.where(remainder > 0, 1)
        dremainder = dremainder.masked_fill(remainder == 1, 0)
        dweight = (_uncovered(x, rows, cut) * dremainder[..., None]).sum(1)
        to.weight[:, cut] += dweight if len(to.weight) > 1 else dweight.sum(0, keepdim=True)
    if to.bias is not None:
        part = to.bias[:, :, rows, cut]
        part += dlogits.sum_to_size(part.shape)
    dlogits.mul_(x.scale)
    to.q[:, :, rows].add_(_by_key_head(dlogits, x.k[:, :, cut]))
    _add_to(to.k[:, :, cut], dlogits, x.q[:, :, rows])


@torch.library.custom_op("heedful::grouped_attention_tiled", mutates_args=())
def _tiled(
    q: Tensor, k: Tensor, v: Tensor, asking: Tensor, group_k: Tensor, group_v: Tensor,
    log_size: Tensor, weight: Tensor, bias: Tensor | None, group_bias: Tensor | None,
    index: Tensor, reach: Tensor, unit: Tensor | None, hard: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = _operands(q, k, v, asking, group_k, group_v, log_size, weight, bias, group_bias, index,
                  reach, unit, hard, scale)  # fmt: skip
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = log_size.new_empty(q.shape[:3])
    attend(x, out, lse)
    return out, lse


def _operands(q, k, v, asking, group_k, group_v, *rest) -> Operands:
    return Operands(*map(operand, (q, k, v, asking, group_k, group_v)), *rest)


@_tiled.register_fake
def _(q, k, v, asking, group_k, group_v, log_size, *_):
    return q.new_empty(*q.shape[:3], v.shape[3]), log_size.new_empty(q.shape[:3])


@torch.library.custom_op("heedful::grouped_attention_tiled_backward", mutates_args=())
def _tiled_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, asking: Tensor,
    group_k: Tensor, group_v: Tensor, log_size: Tensor, weight: Tensor, bias: Tensor | None,
    group_bias: Tensor | None, index: Tensor, reach: Tensor, unit: Tensor | None, hard: bool,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    x = _operands(q, k, v, asking, group_k, group_v, log_size, weight, bias, group_bias, index,
                  reach, unit, hard, scale)  # fmt: skip
    inputs = (q, k, v, asking, group_k, group_v, log_size, weight, bias, group_bias)
    to = Gradients(*(None if y is None else torch.zeros(y.shape, dtype=lse.dtype, device=q.device)
                     for y in inputs))  # fmt: skip
    delta = (widen(grad) * widen(out)).sum(-1)
    attend_backward(operand(grad), x, delta, lse, to)
    pairs = zip(to, inputs, strict=True)
    return [gradient.to(y.dtype) for gradient, y in pairs if y is not None]


@_tiled_backward.register_fake
def _(grad, out, lse, q, k, v, asking, group_k, group_v, log_size, weight, bias, group_bias, *_):
    inputs = (q, k, v, asking, group_k, group_v, log_size, weight, bias, group_bias)
    return [y.new_empty(y.shape) for y in inputs if y is not None]


refuse_second_derivative(_tiled_backward, "grouped_attention")


def _save(ctx, inputs, output) -> None:
    *tensors, hard, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*output, *tensors)
    ctx.biased = tensors[8] is not None
    ctx.options = (hard, scale)


def _backward(ctx, grad, _):
    grads = without_autocast(_tiled_backward)(grad, *ctx.saved_tensors, *ctx.options)
    return *grads, *(None,) * (5 if ctx.biased else 7)


_tiled.register_autograd(_backward, setup_context=_save)
