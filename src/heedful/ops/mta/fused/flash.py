"""Multi-token attention with a convolution before the softmax, fused: flash attention, wide heads.

For some heads at a time, keys are filtered into wide rows and the band's logits are computed, flash
kernels run over both, and in the backward their gradients are folded back (wide_kernels.py does the
filtering and the folding). mta/wide.py says why that is the operator. Nothing is T x T, and the
wide rows held at a time take a fixed number of bytes, or what q takes.
"""

from typing import NamedTuple

import torch
import triton
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.precision import without_autocast
from heedful.ops.impl import refuse_second_derivative
from heedful.ops.mta.fused import plan
from heedful.ops.mta.fused.backward import keys_kernel, map_kernel, queries_kernel
from heedful.ops.mta.fused.flash_call import (
    SPLIT,
    FlashCall,
    Widened,
    flash_call,
    key_spans,
    query_spans,
    widen_keys,
)
from heedful.ops.mta.fused.forward import forward_kernel
from heedful.ops.mta.fused.wide_kernels import (
    fold_keys_kernel,
    fold_queries_kernel,
    scores_grad_kernel,
    theta_grad_kernel,
)
from heedful.ops.visibility import Visibility


def multi_token_attention_fused(
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
    """The operator of `multi_token_attention` in Triton, with nothing but `conv` given."""
    if not (post_conv is mix is post_mix is None):
        raise ValueError(
            "multi_token_attention_fused takes no post_conv, mix or post_mix; "
            "multi_token_attention_blocks does"
        )
    return flash(q, k, v, conv, visibility, scale)


def flash(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hv Tk Dv"],
    conv: Float[Tensor, "H cq ck"] | None,
    visibility: Visibility,
    scale: float,
    *,
    wide: bool = False,
) -> Float[Tensor, "B H Tq Dv"]:
    """softmax(Mask_-inf(Conv(Mask_0(S)))) V; key head m takes value head m modulo Hv.

    The output is in q's dtype, or in fp32 if `wide`.
    """
    return _fused(
        q, k, v, conv, visibility.segments(), visibility.causal, visibility.window, scale, wide
    )[0]


@torch.library.custom_op("heedful::multi_token_attention_fused", mutates_args=())
def _fused(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, segments: Tensor | None,
    causal: bool, window: int | None, scale: float, wide: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = flash_call(q, k, v, conv, segments, causal, window, scale)
    out = x.q.new_empty(*q.shape[:3], v.shape[3], dtype=torch.float32 if wide else q.dtype)
    lse = x.theta.new_empty(q.shape[:3])
    at = plan.forward_launch(*x.sizes())
    spans = x.spans(key_spans, at.queries)
    for first, heads in x.chunks(q.element_size()):
        widened = widen_keys(x, first, heads)
        x.launch(
            forward_kernel, (triton.cdiv(q.shape[2], at.queries), heads), x.q, widened.keys, x.v,
            widened.band, x.segments, x.parts, spans, out, lse, first_head=first,
            span_stride=_row_stride(spans), TILES=triton.cdiv(x.width, at.tile), TILE=at.tile,
            RESIDENT=at.resident, BM=at.queries, BN=at.keys, STAGES=at.stages,
            num_warps=at.warps, num_stages=at.stages,
        )  # fmt: skip
    return out, lse


@_fused.register_fake
def _(q, k, v, conv, segments, causal, window, scale, wide):
    dtype = torch.float32 if wide else q.dtype
    return (
        q.new_empty(*q.shape[:3], v.shape[3], dtype=dtype),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


@torch.library.custom_op("heedful::multi_token_attention_fused_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None,
    segments: Tensor | None, causal: bool, window: int | None, scale: float,
) -> list[Tensor]:  # fmt: skip
    x = flash_call(q, k, v, conv, segments, causal, window, scale)
    batch, heads, group = q.shape[0], q.shape[1], x.group
    grad = grad.to(q.dtype).contiguous()
    delta = torch.empty_like(lse)
    dq, dk = torch.empty_like(x.q), torch.empty_like(x.k)
    dv = x.theta.new_empty(batch * k.shape[1], k.shape[2], v.shape[3])
    dtheta = x.theta.new_empty(batch * heads, *x.theta.shape[1:])
    at = plan.backward_launch(*x.sizes())
    step, map_bytes = _map_rows(x, at)
    # Of every number of a wide row: its own bytes, and the fp32 gradients of both sides.
    for first, count in x.chunks(q.element_size() + 8, map_bytes):
        chunk, shared = slice(first, first + count), slice(first // group, (first + count) // group)
        products = grad.flatten(0, 1)[chunk].to(torch.float32) * out.flatten(0, 1)[chunk]
        delta.flatten(0, 1)[chunk] = products.sum(-1)
        widened = widen_keys(x, first, count)
        slopes = _flash_backward(x, widened, grad, lse, delta, first, count, at, step)
        dv[shared] = slopes.values.unflatten(0, (-1, group)).sum(1)
        if conv is None:
            dq.flatten(0, 1)[chunk] = slopes.queries
            dk.flatten(0, 1)[shared] = slopes.keys.unflatten(0, (-1, group)).sum(1)
        else:
            dtheta[chunk] = _fold(x, widened, slopes, dq, dk, first, count)
    # Key heads that share a value head stand whole multiples of Hv apart.
    dv = dv.unflatten(0, (batch, -1, v.shape[1])).sum(1).to(v.dtype)
    if conv is None:
        return [dq, dk, dv, q.new_empty(0)]
    return [dq, dk, dv, dtheta.unflatten(0, (batch, heads)).sum(0).to(conv.dtype)]


class _Slopes(NamedTuple):
    """Gradients of a chunk's wide rows, values and band: fp32, per query head."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    band: Tensor


def _flash_backward(
    x: FlashCall,
    widened: Widened,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    first: int,
    heads: int,
    at: plan.BackwardLaunch,
    step: int,
) -> _Slopes:
    queries, keys, like = x.q.shape[2], x.k.shape[2], x.theta
    slopes = _Slopes(
        like.new_empty(heads, queries, x.width), like.new_zeros(heads, keys, x.width),
        like.new_zeros(heads, keys, x.v.shape[3]), like.new_zeros(heads, queries, x.band.width),
    )  # fmt: skip
    spans, query_bounds = x.spans(key_spans, at.queries), x.spans(query_spans, at.keys)
    blocks, key_blocks = triton.cdiv(queries, at.queries), triton.cdiv(keys, at.keys)
    map_keys = key_blocks * at.keys
    p_map, dc_map = (x.q.new_empty(heads, step * at.queries, map_keys) for _ in range(2))
    shared = {
        "first_head": first, "map_rows": step * at.queries, "map_keys": map_keys,
        "span_stride": _row_stride(spans),
        "query_span_stride": _row_stride(query_bounds), "BM": at.queries, "BN": at.keys,
        "STEP": at.step, "num_warps": at.warps, "num_stages": at.stages,
    }  # fmt: skip
    columns = triton.cdiv(x.width, at.columns)
    for block in range(0, blocks, step):
        shared |= {"first_block": block, "last_block": min(block + step, blocks)}
        count = shared["last_block"] - block
        x.launch(
            map_kernel, (key_blocks, count, heads), x.q, widened.keys, x.v, widened.band,
            x.segments, x.parts, spans, grad, lse, delta, p_map, dc_map, slopes.band,
            TILES=triton.cdiv(x.width, at.tile), TILE=at.tile,
            VALUE_TILES=triton.cdiv(x.v.shape[3], at.tile), **shared,
        )  # fmt: skip
        x.launch(
            queries_kernel, (columns, count, heads), widened.keys, dc_map, spans, slopes.queries,
            TILE=at.columns, **shared,
        )  # fmt: skip
        x.launch(
            keys_kernel, (columns, key_blocks, heads), x.q, dc_map, x.parts, spans, query_bounds,
            slopes.keys, TILE=at.columns, **shared,
        )  # fmt: skip
        x.launch(
            keys_kernel, (triton.cdiv(x.v.shape[3], at.value_columns), key_blocks, heads), grad,
            p_map, x.parts, spans, query_bounds, slopes.values, TILE=at.value_columns, PARTS=1,
            DIM=x.v.shape[3], scale=1.0, **shared,
        )  # fmt: skip
    return slopes


def _map_rows(x: FlashCall, at: plan.BackwardLaunch) -> tuple[int, int]:
    """How many row blocks of the map are held at once, and their bytes for one query head.

    The gradients of keys are added up over these pieces, so that their number must not depend on
    the batch: it is chosen for the heads of one batch row.
    """
    block_bytes = 2 * at.queries * triton.cdiv(x.k.shape[2], at.keys) * at.keys
    block_bytes *= x.q.element_size()
    blocks = triton.cdiv(x.q.shape[2], at.queries)
    step = plan.blocks_at_once(blocks, x.q.shape[1] * block_bytes)
    return step, step * block_bytes


def _row_stride(spans: Tensor) -> int:
    return spans[0].numel() if len(spans) > 1 else 0


def _fold(
    x: FlashCall, widened: Widened, slopes: _Slopes, dq: Tensor, dk: Tensor, first: int, heads: int
) -> Float[Tensor, "heads cq ck"]:
    """Writes the chunk's `dq` and `dk`; returns the gradient of each head's kernel."""
    of_queries = (triton.cdiv(x.q.shape[2], x.block), heads)
    of_keys = (triton.cdiv(x.k.shape[2], x.block), heads // x.group)
    dscores = torch.empty_like(widened.scores)
    at = {"first_head": first}
    if x.band.width:
        x.launch(
            scores_grad_kernel, of_queries, slopes.band, x.theta, x.parts, dscores, **at
        )  # fmt: skip
    x.launch(
        fold_queries_kernel, of_queries, slopes.queries, dscores, x.k, x.segments, x.parts, dq, **at
    )
    x.launch(
        fold_keys_kernel, of_keys, slopes.keys, dscores, x.q, x.theta, x.segments, dk, **at
    )  # fmt: skip
    splits = triton.cdiv(x.k.shape[2], SPLIT)
    dtheta = x.theta.new_empty(splits, heads, *x.theta.shape[1:])
    x.launch(
        theta_grad_kernel, (x.theta.shape[1], heads, splits), slopes.keys, slopes.band, x.k,
        widened.scores, x.segments, x.parts, dtheta, BN=16, **at,
    )  # fmt: skip
    return dtheta.sum(0)


@_fused_backward.register_fake
def _(grad, out, lse, q, k, v, conv, *_):
    inputs = (q, k, v, conv)
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


refuse_second_derivative(_fused_backward, "multi_token_attention")


def _save(ctx, inputs, output) -> None:
    q, k, v, conv, segments, causal, window, scale, _ = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(out, lse, q, k, v, conv, segments)
    ctx.options = (causal, window, scale)


def _backward(ctx, grad, _):
    tensors = ctx.saved_tensors
    *grads, dconv = without_autocast(_fused_backward)(grad, *tensors, *ctx.options)
    return *grads, None if tensors[5] is None else dconv, None, None, None, None, None


_fused.register_autograd(_backward, setup_context=_save)
