"""Selective attention in Triton: the GPU kernels' options and tiles, the operators."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.ops.common.precision import without_autocast
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import in_blocks
from heedful.ops.impl import padded, refuse_second_derivative
from heedful.ops.selective.fused.backward import (
    key_gradients_kernel,
    query_gradients_kernel,
    selector_key_gradients_kernel,
    selector_query_gradients_kernel,
)
from heedful.ops.selective.fused.forward import (
    accumulate_kernel,
    attend_kernel,
    remember_kernel,
    survey_kernel,
    visits_kernel,
)
from heedful.ops.selective.fused.plan import TileLaunch, plan

PROGRAMS = 1024  # that fill a GPU; what more of them would hold at a time grows as T^2
# Queries that are computed at a time. What is held of F is one number per key for every block of 64
# of them, so that memory grows with T and not with its square.
PIECE = 4096


def selective_attention_fused(
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
    tile: tuple[int, int, int] | tuple[()] = (),
    skip: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operator of `selective_attention`, as Triton kernels.

    `tile` (see `plan`) and `skip` (leave out tiles without weight) are for tests and tuning; no
    result depends on `skip` by a bit.
    """
    visibility, tensors = terms.visibility, (q, k, v, selector_q, selector_k, state)
    first = visibility.first_tokens(k.shape[2], k.device) if protect_first else None
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    output, last, memory, *_ = _fused(
        *tensors, visibility.segments(), first, visibility.window, tau, terms.scale, skip,
        list(tile), keep,
    )  # fmt: skip
    return output, last, memory if tau is not None else None


class SelectorCall:
    """The selectors and the visibility of a call, as the kernels take them."""

    def __init__(self, selector_q, selector_k, segments, first, window, scale) -> None:
        self.batch, self.selectors, self.queries, dim = selector_q.shape
        self.keys = selector_k.shape[2]
        segments = None if segments is None else segments.to(torch.int32).contiguous()
        first = None if first is None else first.to(torch.int8).contiguous()
        self.lines = max(1 if x is None else len(x) for x in (segments, first))
        self.sight = segments, first, self.keys if self.lines > 1 else 0
        self.cut = {"queries": self.queries, "keys": self.keys, "WINDOW": window or 0}
        # The first arguments of every kernel that forms a tile of S, and names that all know.
        self.tensors = selector_q.contiguous(), selector_k.contiguous(), *self.sight
        self.sizes = {"scale": scale, "DS": dim, "WDS": padded(dim)} | self.cut
        self._tiles: dict[tuple[int, int], Tensor] = {}

    def tiles(self, rows: int, columns: int) -> Int[Tensor, "B Hs blocks key_blocks"]:
        """Contents of each tile: 0 nothing visible, 1 something, 2 no entry to mask."""
        if (rows, columns) not in self._tiles:
            shape = self.lines, -(-self.queries // rows), -(-self.keys // columns)
            tiles = self.tensors[0].new_empty(shape, dtype=torch.int8)
            survey_kernel[shape[::-1]](*self.sight, tiles, ROWS=rows, COLUMNS=columns, **self.cut)
            tiles = tiles[:, None].expand(self.batch, self.selectors, -1, -1)
            self._tiles[rows, columns] = tiles
        return self._tiles[rows, columns]


def visits(
    tiles: Int[Tensor, "B Hs blocks n"],
) -> tuple[Int[Tensor, "B Hs blocks n"], Int[Tensor, "B Hs blocks"]]:
    """For every row of tiles, which to visit, last first, and how many; see `tile.visit`."""
    batch, selectors, rows, size = tiles.shape
    order = tiles.new_empty(tiles.shape, dtype=torch.int32)
    count = order.new_empty(tiles.shape[:3])
    visits_kernel[rows, selectors, batch](
        tiles, order, count, size, *tiles.stride(), WIDTH=padded(size)
    )
    return order, count


def weight_limit(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    state: Float[Tensor, "B Hs Tk"] | None,
    selectors: int,
    scale: float,
) -> Float[Tensor, "B Hs Tq"]:
    """A bound for every query: keys with F above it have a weight of exactly zero in fp32.

    Every logit of query i lies within U = scale |q_i| max|k| of zero. Its own key has F = its
    incoming state (nobody masks a token before it is there), so the softmax's maximum is at least
    -U - state. A key's weight is then at most exp(2 U + state - F), and exp(-104) is zero. One more
    in the exponent and a thousandth of U are for rounding, here and in the kernels.
    """
    norm = {"dim": -1, "dtype": torch.float32}
    longest = torch.linalg.vector_norm(k, **norm).amax(-1, keepdim=True)
    reach = torch.linalg.vector_norm(q, **norm) * longest.repeat_interleave(
        q.shape[1] // k.shape[1], dim=1
    )
    limit = 105 + 2.002 * scale * reach.unflatten(1, (selectors, -1)).amax(2)
    return limit if state is None else limit + state[:, :, k.shape[2] - q.shape[2] :]


def weightless(
    limit: Float[Tensor, "B Hs Tq"], bases: Float[Tensor, "B Hs blocks Tk"], rows: int, columns: int
) -> Bool[Tensor, "B Hs blocks key_blocks"]:
    """Tiles without any weight: F never falls, so that none is below the base of its block."""
    least = in_blocks(bases, columns, float("inf")).amin(-1)
    return least > in_blocks(limit, rows, float("-inf")).amax(-1)[..., None]


class Inputs(NamedTuple):
    """The tensors of a call, contiguous."""

    q: Float[Tensor, "B H Tq D"]
    k: Float[Tensor, "B Hk Tk D"]
    v: Float[Tensor, "B Hk Tk Dv"]
    selector_q: Float[Tensor, "B Hs Tq Ds"]
    selector_k: Float[Tensor, "B Hs Tk Ds"]
    segments: Int[Tensor, "#B Tk"] | None
    first: Bool[Tensor, "#B Tk"] | None

    def pieces(self) -> list[tuple[slice, int]]:
        """The queries that are computed at a time, and how many keys they can see at most."""
        queries, keys = self.q.shape[2], self.k.shape[2]
        starts = range(0, queries, PIECE)
        stops = [min(start + PIECE, queries) for start in starts]
        return [(slice(a, b), keys - queries + b) for a, b in zip(starts, stops, strict=True)]

    def piece(self, rows: slice, keys: int) -> "Inputs":
        """These queries, as the last tokens of so many keys."""
        q, k, v, selector_q, selector_k, *per_token = self
        parts = (q[:, :, rows], k[:, :, :keys], v[:, :, :keys])
        parts += (selector_q[:, :, rows], selector_k[:, :, :keys])
        parts += tuple(None if x is None else x[:, :keys] for x in per_token)
        return Inputs(*(None if x is None else x.contiguous() for x in parts))


def _head_sizes(
    q: Tensor, k: Tensor, v: Tensor, selectors: int, launch: TileLaunch
) -> dict[str, int]:
    """Sizes for the kernels with heads, by name."""
    group = q.shape[1] // k.shape[1]
    return {
        "heads": q.shape[1], "PER_SELECTOR": q.shape[1] // selectors, "GROUP": group,
        "HEADS": launch.heads, "SHARE": min(launch.heads, group),
        "D": q.shape[3], "WD": padded(q.shape[3]), "DV": v.shape[3], "WDV": padded(v.shape[3]),
    } | launch.tile  # fmt: skip


def _accumulate(
    call: SelectorCall, tiles: Tensor, state: Tensor | None, launch: TileLaunch, step: int
):
    """F before every `step` queries, `[B, Hs, steps, Tk]`, and after the last."""
    batch, selectors, blocks, key_blocks = tiles.shape
    keys = call.keys
    # Zero, not empty: nothing is written where nothing is visible.
    bases = torch.zeros(batch, selectors, blocks * launch.rows // step, keys, device=tiles.device)
    last = bases.new_empty(batch, selectors, keys)
    state = None if state is None else state.contiguous()
    accumulate_kernel[key_blocks, selectors, batch](
        *call.tensors, state, *visits(tiles.mT), bases, last,
        **call.sizes, **launch.tile, STEP=step,
    )  # fmt: skip
    return bases, last


def _with_weight(
    call: SelectorCall, launch: TileLaunch, limit: Tensor | None, bases: Tensor
) -> Tensor:
    """Contents of each tile of a launch, 0 also where no weight is above zero (with a limit)."""
    tiles = call.tiles(launch.rows, launch.columns)
    if limit is None:
        return tiles
    masked = weightless(limit, bases[:, :, : tiles.shape[2]], launch.rows, launch.columns)
    return tiles.masked_fill(masked, 0)


class Forward(NamedTuple):
    """Results of the forward kernels for a piece of the queries."""

    output: Tensor
    last: Tensor
    memory: Tensor
    remainder: Tensor  # what the output lost by rounding; empty in fp32, or if nobody needs it
    lse: Tensor  # the softmax's statistics


def _forward(
    x: Inputs, state: Tensor | None, window: int | None, tau: float | None, scale: float,
    skip: bool, tile: list[int], keep: bool,
) -> Forward:  # fmt: skip
    q, k, v, *_ = x
    attend, _, _, selector = plan(q, k, v, x.selector_q, tile)
    call = SelectorCall(*x[3:], window, scale)
    out, _, memory, remainder, lse = _outputs(q, k, v, x.selector_q, tau, keep)
    tiles = call.tiles(selector.rows, selector.columns)
    bases, last = _accumulate(call, tiles, state, selector, attend.rows)
    if tau is not None:
        sums = lse.new_empty(x.selector_q.shape[:3])
        remember_kernel[tiles.shape[2], call.selectors, call.batch](
            *call.tensors, bases, *visits(tiles), sums, tau, **call.sizes, **selector.tile
        )
        memory = sums.mean(1)

    limit = weight_limit(q, k, state, call.selectors, scale) if skip else None
    tiles = _with_weight(call, attend, limit, bases)
    attend_kernel[tiles.shape[2], q.shape[1] // attend.heads, call.batch](
        *call.tensors, q, k, v, bases, *visits(tiles), out,
        remainder if remainder.numel() else None, lse,
        **call.sizes, **_head_sizes(q, k, v, call.selectors, attend),
    )  # fmt: skip
    return Forward(out, last, memory, remainder, lse)


def _outputs(q, k, v, selector_q, tau, keep) -> Forward:
    """The outputs of the forward kernels, unwritten."""
    batch, selectors, queries, _ = selector_q.shape
    shape = *q.shape[:3], v.shape[3]
    return Forward(
        q.new_empty(shape),
        q.new_empty(batch, selectors, k.shape[2], dtype=torch.float32),
        q.new_empty(batch, queries if tau is not None else 0, dtype=torch.float32),
        q.new_empty(shape if keep and q.dtype != torch.float32 else 0),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    )


@torch.library.custom_op("heedful::selective_attention_fused", mutates_args=())
def _fused(
    q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor, selector_k: Tensor, state: Tensor | None,
    segments: Tensor | None, first: Tensor | None, window: int | None, tau: float | None,
    scale: float, skip: bool, tile: list[int], keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Fields of `Forward`, and F before every piece of the queries but the first.

    With `keep` all that the backward needs is kept.
    """
    x = Inputs(q, k, v, selector_q, selector_k, segments, first)
    options = (window, tau, scale, skip, tile, keep)
    pieces = x.pieces()
    with torch.cuda.device_of(q):
        if len(pieces) == 1:
            return *_forward(x.piece(*pieces[0]), state, *options), _states(x, keep)
        whole, states = _outputs(q, k, v, selector_q, tau, keep), _states(x, keep)
        f = torch.zeros_like(whole.last) if state is None else state.clone()
        for n, (rows, keys) in enumerate(pieces):
            if n and keep:
                states[n - 1] = f
            before = state if n == 0 else f
            piece = _forward(x.piece(rows, keys), _until(before, keys), *options)
            f[:, :, :keys] = piece.last
            whole.output[:, :, rows], whole.lse[:, :, rows] = piece.output, piece.lse
            if tau is not None:
                whole.memory[:, rows] = piece.memory
            if whole.remainder.numel():
                whole.remainder[:, :, rows] = piece.remainder
    return whole.output, f, whole.memory, whole.remainder, whole.lse, states


def _states(x: Inputs, keep: bool) -> Float[Tensor, "pieces B Hs Tk"]:
    # By arithmetic: a range would fix the length of a compiled graph.
    count = (x.q.shape[2] + PIECE - 1) // PIECE - 1 if keep else 0
    return x.q.new_empty(count, *x.selector_k.shape[:3], dtype=torch.float32)


def _until(x: Tensor | None, keys: int) -> Tensor | None:
    return None if x is None else x[:, :, :keys].contiguous()


@_fused.register_fake
def _(q, k, v, selector_q, selector_k, state, segments, first, window, tau, *rest):
    x = Inputs(q, k, v, selector_q, selector_k, segments, first)
    return *_outputs(q, k, v, selector_q, tau, rest[-1]), _states(x, rest[-1])


@torch.library.custom_op("heedful::selective_attention_fused_backward", mutates_args=())
def _fused_backward(
    grad: Tensor, grad_state: Tensor, grad_memory: Tensor, out: Tensor, remainder: Tensor,
    lse: Tensor, states: Tensor, q: Tensor, k: Tensor, v: Tensor, selector_q: Tensor,
    selector_k: Tensor, state: Tensor | None, segments: Tensor | None, first: Tensor | None,
    window: int | None, tau: float | None, scale: float, skip: bool, tile: list[int],
) -> list[Tensor]:  # fmt: skip
    x = Inputs(q, k, v, selector_q, selector_k, segments, first)
    options = (window, tau, scale, skip, tile)
    inputs, pieces = (q, k, v, selector_q, selector_k), x.pieces()
    df = grad_state.clone(memory_format=torch.contiguous_format)
    with torch.cuda.device_of(q):
        if len(pieces) == 1:
            gradients = (grad, df, grad_memory, out, remainder, lse)
            return _backward_of_piece(x.piece(*pieces[0]), state, *gradients, *options)
        # Keys belong to several pieces, whose shares are added up in fp32.
        sums = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in inputs]
        for n, (rows, keys) in reversed(list(enumerate(pieces))):
            tokens = (slice(None), slice(None), rows)
            gradients = (grad[tokens], _until(df, keys), grad_memory[:, rows], out[tokens])
            gradients += (remainder[tokens] if remainder.numel() else remainder, lse[tokens])
            f = state if n == 0 else states[n - 1]
            *grads, dstate = _backward_of_piece(
                x.piece(rows, keys), _until(f, keys), *(t.contiguous() for t in gradients), *options
            )
            df[:, :, :keys] = dstate
            for total, part, of_queries in zip(
                sums, grads, (True, False, False, True, False), strict=True
            ):
                total[:, :, rows if of_queries else slice(keys)] += part
    return [*(total.to(t.dtype) for total, t in zip(sums, inputs, strict=True)), df]


def _backward_of_piece(
    x: Inputs, state: Tensor | None, grad: Tensor, grad_state: Tensor, grad_memory: Tensor,
    out: Tensor, remainder: Tensor, lse: Tensor, window: int | None, tau: float | None,
    scale: float, skip: bool, tile: list[int],
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, selector_q, selector_k and of the incoming state."""
    q, k, v, selector_q, selector_k, *_ = x
    grad = grad.contiguous()
    _, by_query, by_key, selector = plan(q, k, v, selector_q, tile)
    call = SelectorCall(*x[3:], window, scale)
    batch, selectors, step = call.batch, call.selectors, by_key.rows
    selected = call.tiles(selector.rows, selector.columns)
    bases, _ = _accumulate(call, selected, state, selector, step)
    limit = weight_limit(q, k, state, selectors, scale) if skip else None

    # The kernels with heads: dq, dk, dv, and the selector's share from within a block.
    sizes = _head_sizes(q, k, v, selectors, by_query)
    chunks_q = sizes["PER_SELECTOR"] // by_query.heads
    tiles = _with_weight(call, by_query, limit, bases[:, :, :: by_query.rows // step])
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    dselector_q = _gradient_parts(selector_q, chunks_q)
    query_gradients_kernel[tiles.shape[2], selectors * chunks_q, batch](
        *call.tensors, q, k, v, bases, *visits(tiles), out, remainder, lse, grad,
        dq, delta, dselector_q,
        **call.sizes, **sizes, STEP=step,
    )  # fmt: skip

    sizes = _head_sizes(q, k, v, selectors, by_key)
    chunks_k = sizes["PER_SELECTOR"] // by_key.heads
    tiles = _with_weight(call, by_key, limit, bases)
    listed = visits(tiles.mT)
    slots = q.shape[1] // sizes["SHARE"]
    whole = slots == k.shape[1]  # else several programs share a key head; added up below
    dk, dv = (
        x.new_empty(batch, slots, *x.shape[2:], dtype=x.dtype if whole else torch.float32)
        for x in (k, v)
    )
    dselector_k = _gradient_parts(selector_k, chunks_k)
    g_sums = bases.new_zeros(*selected.shape[:3], call.keys)
    room = max(1, PROGRAMS // (tiles.shape[3] * selectors * batch))
    for begin in range(0, chunks_k, room):
        partial_sums = g_sums.new_zeros(
            batch, selectors, min(room, chunks_k - begin), *g_sums.shape[2:]
        )
        key_gradients_kernel[tiles.shape[3], selectors * partial_sums.shape[2], batch](
            *call.tensors, q, k, v, bases, *listed, lse, delta, grad,
            dk, dv, dselector_k, partial_sums, begin, partial_sums.shape[2],
            **call.sizes, **sizes, STEPS=selector.rows // step,
        )  # fmt: skip
        for part in partial_sums.unbind(2):  # in this order, however many there is room for
            g_sums += part
    if not whole:
        dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(q.dtype) for x in (dk, dv))

    # The kernels without: the selector's share from behind a block, and from the memory.
    if tau is not None:
        grad_memory = (grad_memory / selectors).contiguous()
    later = torch.zeros_like(g_sums)
    dstate = bases.new_empty(batch, selectors, call.keys)
    selector_key_gradients_kernel[selected.shape[3], selectors, batch](
        *call.tensors, bases, g_sums, grad_state.contiguous(), grad_memory, *visits(selected.mT),
        later, dstate, dselector_k, tau, chunks_k,
        **call.sizes, **selector.tile, STEP=step,
    )  # fmt: skip
    selector_query_gradients_kernel[selected.shape[2], selectors, batch](
        *call.tensors, bases, later, grad_memory, *visits(selected), dselector_q, tau, chunks_q,
        **call.sizes, **selector.tile, STEP=step,
    )  # fmt: skip
    return [dq, dk, dv, *(t.sum(2).to(q.dtype) for t in (dselector_q, dselector_k)), dstate]


def _gradient_parts(selector: Tensor, chunks: int) -> Tensor:
    """A selector's gradient from each chunk of heads, and one more for what needs no head."""
    batch, selectors, tokens, dim = selector.shape
    return selector.new_empty(batch, selectors, chunks + 1, tokens, dim, dtype=torch.float32)


@_fused_backward.register_fake
def _(
    grad, grad_state, grad_memory, out, remainder, lse, states, q, k, v, selector_q, selector_k, *_
):
    inputs = (q, k, v, selector_q, selector_k, grad_state)
    return [x.new_empty(x.shape) for x in inputs]


refuse_second_derivative(_fused_backward, "selective_attention")


def _save(ctx, inputs, output) -> None:
    *tensors, window, tau, scale, skip, tile, _ = inputs
    out, _, _, remainder, lse, states = output
    ctx.mark_non_differentiable(remainder, lse, states)
    ctx.save_for_backward(out, remainder, lse, states, *tensors)
    ctx.options = window, tau, scale, skip, tile
    ctx.from_state = tensors[5] is not None


def _backward(ctx, grad, grad_state, grad_memory, *_):
    *grads, dstate = without_autocast(_fused_backward)(
        grad, grad_state, grad_memory, *ctx.saved_tensors, *ctx.options
    )
    return *grads, dstate if ctx.from_state else None, *(None,) * 8


_fused.register_autograd(_backward, setup_context=_save)
