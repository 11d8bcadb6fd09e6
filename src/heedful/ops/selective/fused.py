"""Selective attention in Triton: the custom operators."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.selective import fused_backward as backward
from heedful.ops.selective import fused_forward as forward
from heedful.ops.selective.fused_field import Field, visits, weight_limit, weightless
from heedful.ops.selective.fused_launch import Launch, plan, width
from heedful.ops.visibility import Visibility

CHUNKS = 4  # of heads whose column sums the backward holds at a time


def selective_attention_fused(
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
    tile: tuple[int, int, int] | tuple[()] = (),
    skip: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of `selective_attention`, as Triton kernels.

    `tile` (see `plan`) and `skip` (leave out tiles without weight) are for tests and tuning; no
    result depends on `skip` by a bit.
    """
    first = visibility.first_tokens(k.shape[2], k.device) if protect_first else None
    output, last, memory, *_ = _fused(
        q, k, v, selector_q, selector_k, state, visibility.segments(), first,
        visibility.window, tau, scale, skip, list(tile),
    )  # fmt: skip
    return output, last, memory if tau is not None else None


def _head_sizes(q: Tensor, k: Tensor, v: Tensor, selectors: int, launch: Launch) -> dict[str, int]:
    """What the kernels with heads take by name."""
    group = q.shape[1] // k.shape[1]
    return {
        "heads": q.shape[1], "PER_SELECTOR": q.shape[1] // selectors, "GROUP": group,
        "HEADS": launch.heads, "SHARE": min(launch.heads, group),
        "D": q.shape[3], "WD": width(q), "DV": v.shape[3], "WDV": width(v),
    } | launch.tile  # fmt: skip


def _accumulate(field: Field, tiles: Tensor, state: Tensor | None, launch: Launch, step: int):
    """F before every `step` queries, `[B, Hs, steps, Tk]`, and after the last."""
    batch, selectors, blocks, key_blocks = tiles.shape
    keys = field.keys
    # Zero, not empty: nothing is written where nothing is visible.
    bases = torch.zeros(
        batch, selectors, blocks * launch.rows // step, keys, device=tiles.device
    )
    last = bases.new_empty(batch, selectors, keys)
    state = None if state is None else state.contiguous()
    forward.accumulate[key_blocks, selectors, batch](
        *field.tensors, state, *visits(tiles.mT), bases, last,
        **field.sizes, **launch.tile, STEP=step,
    )  # fmt: skip
    return bases, last


@torch.library.custom_op("heedful::selective_attention_fused", mutates_args=())
def _fused(
    q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, selector_k: Tensor, state: Tensor | None,
    segments: Tensor | None, first: Tensor | None, window: int | None, tau: float | None,
    scale: float, skip: bool, tile: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Output, state and memory; what the output lost by rounding and the softmax's statistics."""
    attend, _, _, selector = plan(q, k, v, selector_q, tile)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    field = Field(selector_q, selector_k, segments, first, window, scale)
    out, _, memory, rest, lse = _outputs(q, k, v, selector_q, tau)
    with torch.cuda.device_of(q):
        tiles = field.tiles(selector.rows, selector.columns)
        bases, last = _accumulate(field, tiles, state, selector, attend.rows)
        if tau is not None:
            sums = lse.new_empty(selector_q.shape[:3])
            forward.remember[tiles.shape[2], field.selectors, field.batch](
                *field.tensors, bases, *visits(tiles), sums, tau, **field.sizes, **selector.tile
            )
            memory = sums.mean(1)

        tiles = field.tiles(attend.rows, attend.columns)
        if skip:
            limit = weight_limit(q, k, state, field.selectors, scale)
            tiles = tiles.masked_fill(weightless(limit, bases, attend.rows, attend.columns), 0)
        forward.attend[tiles.shape[2], q.shape[1] // attend.heads, field.batch](
            *field.tensors, q, k, v, bases, *visits(tiles), out, rest, lse,
            **field.sizes, **_head_sizes(q, k, v, field.selectors, attend),
        )  # fmt: skip
    return out, last, memory, rest, lse


def _outputs(q, k, v, selector_q, tau) -> tuple[Tensor, ...]:
    """The outputs of `_fused`, unwritten."""
    batch, selectors, queries, _ = selector_q.shape
    shape = *q.shape[:3], v.shape[3]
    return (
        q.new_empty(shape),
        q.new_empty(batch, selectors, k.shape[2], dtype=torch.float32),
        q.new_empty(batch, queries if tau is not None else 0, dtype=torch.float32),
        q.new_empty(shape if q.dtype != torch.float32 else 0),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


@_fused.register_fake
def _(q, k, v, selector_q, selector_k, state, segments, first, window, tau, *_):
    return _outputs(q, k, v, selector_q, tau)


@torch.library.custom_op("heedful::selective_attention_fused_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, grad_state: Tensor, grad_memory: Tensor, out: Tensor, rest: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, selector_k: Tensor, state: Tensor | None,
    segments: Tensor | None, first: Tensor | None, window: int | None, tau: float | None,
    scale: float, skip: bool, tile: list[int],
) -> list[Tensor]:  # fmt: skip
    _, rowwise, keywise, selector = plan(q, k, v, selector_q, tile)
    q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    field = Field(selector_q, selector_k, segments, first, window, scale)
    batch, selectors, step = field.batch, field.selectors, keywise.rows

    with torch.cuda.device_of(q):
        seen = field.tiles(selector.rows, selector.columns)
        bases, _ = _accumulate(field, seen, state, selector, step)
        limit = weight_limit(q, k, state, selectors, scale) if skip else None

        def needed(launch: Launch) -> Tensor:
            tiles = field.tiles(launch.rows, launch.columns)
            if limit is None:
                return tiles
            table = bases[:, :, :: launch.rows // step][:, :, : tiles.shape[2]]
            return tiles.masked_fill(weightless(limit, table, launch.rows, launch.columns), 0)

        sizes = _head_sizes(q, k, v, selectors, rowwise)
        chunks_q = sizes["PER_SELECTOR"] // rowwise.heads
        tiles = needed(rowwise)
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        dselector_q = _parts(selector_q, chunks_q)
        backward.query_gradients[tiles.shape[2], selectors * chunks_q, batch](
            *field.tensors, q, k, v, bases, *visits(tiles), out, rest, lse, grad,
            dq, delta, dselector_q,
            **field.sizes, **sizes, STEP=step,
        )  # fmt: skip

        sizes = _head_sizes(q, k, v, selectors, keywise)
        chunks_k = sizes["PER_SELECTOR"] // keywise.heads
        tiles = needed(keywise)
        key_blocks, tiles = tiles.shape[3], visits(tiles.mT)
        whole = sizes["SHARE"] == sizes["GROUP"]  # else the heads of a group are added up below
        slots = q.shape[1] // sizes["SHARE"]
        dk, dv = (
            x.new_empty(batch, slots, *x.shape[2:], dtype=x.dtype if whole else torch.float32)
            for x in (k, v)
        )
        dselector_k = _parts(selector_k, chunks_k)
        flows = torch.zeros_like(bases)
        for begin in range(0, chunks_k, CHUNKS):
            count = min(CHUNKS, chunks_k - begin)
            held = bases.new_zeros(batch, selectors, count, *bases.shape[2:])
            backward.key_gradients[key_blocks, selectors * count, batch](
                *field.tensors, q, k, v, bases, *tiles, lse, delta, grad,
                dk, dv, dselector_k, held, begin, count, bases.shape[2],
                **field.sizes, **sizes,
            )  # fmt: skip
            flows += held.sum(2)

        if tau is not None:
            grad_memory = (grad_memory / selectors).contiguous()
        later = bases.new_zeros(seen.shape[:3] + bases.shape[3:])
        dstate = bases.new_empty(batch, selectors, field.keys)
        backward.selector_key_gradients[seen.shape[3], selectors, batch](
            *field.tensors, bases, flows, grad_state.contiguous(), grad_memory, *visits(seen.mT),
            later, dstate, dselector_k, tau, chunks_k,
            **field.sizes, **selector.tile, STEP=step,
        )  # fmt: skip
        backward.selector_query_gradients[seen.shape[2], selectors, batch](
            *field.tensors, bases, later, grad_memory, *visits(seen), dselector_q, tau, chunks_q,
            **field.sizes, **selector.tile, STEP=step,
        )  # fmt: skip
    if not whole:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in (dk, dv))
    return [dq, dk, dv, *(x.sum(2).to(q.dtype) for x in (dselector_q, dselector_k)), dstate]


def _parts(selector: Tensor, chunks: int) -> Tensor:
    """A selector's gradient from each chunk of heads, and one more for what needs no head."""
    batch, selectors, *rest = selector.shape
    return selector.new_empty(batch, selectors, chunks + 1, *rest, dtype=torch.float32)


@_fused_backward.register_fake
def _(grad, grad_state, grad_memory, out, rest, lse, q, k, v, selector_q, selector_k, *_):
    inputs = (q, k, v, selector_q, selector_k, grad_state)
    return [x.new_empty(x.shape) for x in inputs]


def _save(ctx, inputs, output) -> None:
    *tensors, window, tau, scale, skip, tile = inputs
    out, _, _, rest, lse = output
    ctx.mark_non_differentiable(rest, lse)
    ctx.save_for_backward(out, rest, lse, *tensors)
    ctx.options = window, tau, scale, skip, tile
    ctx.from_state = tensors[5] is not None


def _backward(ctx, grad, grad_state, grad_memory, *_):
    *grads, dstate = _fused_backward(
        grad, grad_state, grad_memory, *ctx.saved_tensors, *ctx.options
    )
    return *grads, dstate if ctx.from_state else None, *(None,) * 7


_fused.register_autograd(_backward, setup_context=_save)
