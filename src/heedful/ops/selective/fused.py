"""Selective attention in Triton: the custom operators."""

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.impl import refuse_second_derivative
from heedful.ops.limits import padded
from heedful.ops.selective import fused_backward, fused_forward, fused_selector
from heedful.ops.selective.fused_field import Field, visits, weight_limit, weightless
from heedful.ops.selective.fused_launch import Launch, plan
from heedful.ops.visibility import Visibility

PROGRAMS = 1024  # that fill a GPU; what more of them would hold at a time grows as T^2


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
        "D": q.shape[3], "WD": padded(q.shape[3]), "DV": v.shape[3], "WDV": padded(v.shape[3]),
    } | launch.tile  # fmt: skip


def _accumulate(field: Field, tiles: Tensor, state: Tensor | None, launch: Launch, step: int):
    """F before every `step` queries, `[B, Hs, steps, Tk]`, and after the last."""
    batch, selectors, blocks, key_blocks = tiles.shape
    keys = field.keys
    # Zero, not empty: nothing is written where nothing is visible.
    bases = torch.zeros(batch, selectors, blocks * launch.rows // step, keys, device=tiles.device)
    last = bases.new_empty(batch, selectors, keys)
    state = None if state is None else state.contiguous()
    fused_forward.accumulate[key_blocks, selectors, batch](
        *field.tensors, state, *visits(tiles.mT), bases, last,
        **field.sizes, **launch.tile, STEP=step,
    )  # fmt: skip
    return bases, last


def _with_weight(field: Field, launch: Launch, limit: Tensor | None, bases: Tensor) -> Tensor:
    """What each tile of a launch holds, 0 also where no weight is above zero (with a limit)."""
    tiles = field.tiles(launch.rows, launch.columns)
    if limit is None:
        return tiles
    hidden = weightless(limit, bases[:, :, : tiles.shape[2]], launch.rows, launch.columns)
    return tiles.masked_fill(hidden, 0)


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
    out, _, memory, remainder, lse = _outputs(q, k, v, selector_q, tau)
    with torch.cuda.device_of(q):
        tiles = field.tiles(selector.rows, selector.columns)
        bases, last = _accumulate(field, tiles, state, selector, attend.rows)
        if tau is not None:
            sums = lse.new_empty(selector_q.shape[:3])
            fused_forward.remember[tiles.shape[2], field.selectors, field.batch](
                *field.tensors, bases, *visits(tiles), sums, tau, **field.sizes, **selector.tile
            )
            memory = sums.mean(1)

        limit = weight_limit(q, k, state, field.selectors, scale) if skip else None
        tiles = _with_weight(field, attend, limit, bases)
        fused_forward.attend[tiles.shape[2], q.shape[1] // attend.heads, field.batch](
            *field.tensors, q, k, v, bases, *visits(tiles), out, remainder, lse,
            **field.sizes, **_head_sizes(q, k, v, field.selectors, attend),
        )  # fmt: skip
    return out, last, memory, remainder, lse


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
    grad: Tensor, grad_state: Tensor, grad_memory: Tensor, out: Tensor, remainder: Tensor,
    lse: Tensor, q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, selector_k: Tensor,
    state: Tensor | None, segments: Tensor | None, first: Tensor | None, window: int | None,
    tau: float | None, scale: float, skip: bool, tile: list[int],
) -> list[Tensor]:  # fmt: skip
    _, by_query, by_key, selector = plan(q, k, v, selector_q, tile)
    q, k, v, grad = q.contiguous(), k.contiguous(), v.contiguous(), grad.contiguous()
    field = Field(selector_q, selector_k, segments, first, window, scale)
    batch, selectors, step = field.batch, field.selectors, by_key.rows
    with torch.cuda.device_of(q):
        seen = field.tiles(selector.rows, selector.columns)
        bases, _ = _accumulate(field, seen, state, selector, step)
        limit = weight_limit(q, k, state, selectors, scale) if skip else None

        # The kernels with heads: dq, dk, dv, and the selector's share from within a block.
        sizes = _head_sizes(q, k, v, selectors, by_query)
        chunks_q = sizes["PER_SELECTOR"] // by_query.heads
        tiles = _with_weight(field, by_query, limit, bases[:, :, :: by_query.rows // step])
        dq, delta = torch.empty_like(q), torch.empty_like(lse)
        dselector_q = _parts(selector_q, chunks_q)
        fused_backward.query_gradients[tiles.shape[2], selectors * chunks_q, batch](
            *field.tensors, q, k, v, bases, *visits(tiles), out, remainder, lse, grad,
            dq, delta, dselector_q,
            **field.sizes, **sizes, STEP=step,
        )  # fmt: skip

        sizes = _head_sizes(q, k, v, selectors, by_key)
        chunks_k = sizes["PER_SELECTOR"] // by_key.heads
        tiles = _with_weight(field, by_key, limit, bases)
        listed = visits(tiles.mT)
        slots = q.shape[1] // sizes["SHARE"]
        whole = slots == k.shape[1]  # else several programs share a key head; added up below
        dk, dv = (
            x.new_empty(batch, slots, *x.shape[2:], dtype=x.dtype if whole else torch.float32)
            for x in (k, v)
        )
        dselector_k = _parts(selector_k, chunks_k)
        g_sums = bases.new_zeros(*seen.shape[:3], field.keys)
        room = max(1, PROGRAMS // (tiles.shape[3] * selectors * batch))
        for begin in range(0, chunks_k, room):
            held = g_sums.new_zeros(
                batch, selectors, min(room, chunks_k - begin), *g_sums.shape[2:]
            )
            fused_backward.key_gradients[tiles.shape[3], selectors * held.shape[2], batch](
                *field.tensors, q, k, v, bases, *listed, lse, delta, grad,
                dk, dv, dselector_k, held, begin, held.shape[2],
                **field.sizes, **sizes, STEPS=selector.rows // step,
            )  # fmt: skip
            for part in held.unbind(2):  # in this order, however many there is room for
                g_sums += part
        if not whole:
            dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in (dk, dv))

        # The kernels without: the selector's share from behind a block, and from the memory.
        if tau is not None:
            grad_memory = (grad_memory / selectors).contiguous()
        later = torch.zeros_like(g_sums)
        dstate = bases.new_empty(batch, selectors, field.keys)
        fused_selector.selector_key_gradients[seen.shape[3], selectors, batch](
            *field.tensors, bases, g_sums, grad_state.contiguous(), grad_memory, *visits(seen.mT),
            later, dstate, dselector_k, tau, chunks_k,
            **field.sizes, **selector.tile, STEP=step,
        )  # fmt: skip
        fused_selector.selector_query_gradients[seen.shape[2], selectors, batch](
            *field.tensors, bases, later, grad_memory, *visits(seen), dselector_q, tau, chunks_q,
            **field.sizes, **selector.tile, STEP=step,
        )  # fmt: skip
    return [dq, dk, dv, *(x.sum(2).to(q.dtype) for x in (dselector_q, dselector_k)), dstate]


def _parts(selector: Tensor, chunks: int) -> Tensor:
    """A selector's gradient from each chunk of heads, and one more for what needs no head."""
    batch, selectors, tokens, dim = selector.shape
    return selector.new_empty(batch, selectors, chunks + 1, tokens, dim, dtype=torch.float32)


@_fused_backward.register_fake
def _(grad, grad_state, grad_memory, out, remainder, lse, q, k, v, selector_q, selector_k, *_):
    inputs = (q, k, v, selector_q, selector_k, grad_state)
    return [x.new_empty(x.shape) for x in inputs]


refuse_second_derivative(_fused_backward, "selective_attention")


def _save(ctx, inputs, output) -> None:
    *tensors, window, tau, scale, skip, tile = inputs
    out, _, _, remainder, lse = output
    ctx.mark_non_differentiable(remainder, lse)
    ctx.save_for_backward(out, remainder, lse, *tensors)
    ctx.options = window, tau, scale, skip, tile
    ctx.from_state = tensors[5] is not None


def _backward(ctx, grad, grad_state, grad_memory, *_):
    *grads, dstate = _fused_backward(
        grad, grad_state, grad_memory, *ctx.saved_tensors, *ctx.options
    )
    return *grads, dstate if ctx.from_state else None, *(None,) * 7


_fused.register_autograd(_backward, setup_context=_save)
