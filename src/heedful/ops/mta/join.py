"""Attention to far keys by torch's own kernels, and to near keys whose logits are given, joined.

Both are shares of one softmax, weighted by what they hold of the whole sum. The backward pass of
torch's kernel, given the joint output and sum, gives the exact gradients of its share. Here is the
kernel that serves a device, the calls of it that a visibility takes, and the join.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common import tiles
from heedful.ops.common.precision import widen
from heedful.ops.common.tiles import Scope, Sight, row_blocks
from heedful.ops.mta.low_rank import add_near_values, diagonals, near_outputs


class Joined(NamedTuple):
    """The output, and per row the logarithm of the sum of exponentials, 0 if nothing is seen."""

    out: Float[Tensor, "B H Tq Dv"]
    total: Float[Tensor, "B H Tq"]


def joined(
    q: Float[Tensor, "B H Tq W"], k: Float[Tensor, "B H Tk W"], v: Float[Tensor, "B H Tk Dv"],
    near: Float[Tensor, "B H Tq m"] | None, sinks: Float[Tensor, " H"] | None, sight: Sight,
    scale: float, impl: str,
) -> Joined:  # fmt: skip
    """Softmax attention; `near` has the logits of the keys at a distance below m."""
    band, width = 0 if near is None else near.shape[3], v.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    total = q.new_full(q.shape[:3], float("-inf"), dtype=wide)
    even, parts = _even(q, k, v), []
    for share in _shares(q, k, sight, band, impl):
        far, log_sum = share.forward(*share.cut(*even), scale)
        parts.append((share.rows, far[..., :width], log_sum))
        total[:, :, share.rows] = log_sum
    if near is not None:
        near = near.masked_fill(_near_masked(sight, q, k, band), float("-inf"))
        total = torch.logaddexp(total, near.logsumexp(-1))
    if sinks is not None:
        total = torch.logaddexp(total, sinks.to(wide)[:, None])
    total = total.masked_fill(total.isinf(), 0.0)
    if near is None and sinks is None and len(parts) == 1:
        return Joined(parts[0][1].contiguous(), total)
    if near is None:
        out = q.new_zeros(*q.shape[:3], width, dtype=wide)
    else:
        out = near_outputs((near - total[..., None]).exp(), widen(v))
    for rows, far, log_sum in parts:
        out[:, :, rows] += far * (log_sum - total[:, :, rows]).exp()[..., None]
    return Joined(out.to(q.dtype).contiguous(), total)


def joined_backward(
    grad: Float[Tensor, "B H Tq Dv"], result: Joined, q: Tensor, k: Tensor, v: Tensor,
    near: Tensor | None, sinks: Tensor | None, sight: Sight, scale: float, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v, near and sinks, in the precision of the sums."""
    band, (out, total) = 0 if near is None else near.shape[3], result
    even, rows, grads = _even(q, k, v), _even(out, grad, q)[:2], [None, None, None]
    for share in _shares(q, k, sight, band, impl):
        own_out, own_grad, own_total = (x[:, :, share.rows] for x in (*rows, total))
        parts = share.backward(own_grad, *share.cut(*even), own_out, own_total, scale)
        places = (share.rows, share.columns, share.columns)
        grads = [_add(*x) for x in zip(grads, parts, (q, k, v), places, strict=True)]
    dq, dk, dv = (
        x.new_zeros(x.shape, dtype=total.dtype) if d is None else d
        for d, x in zip(grads, (q, k, v), strict=True)
    )
    dnear = dsinks = None
    if near is not None or sinks is not None:
        grad = widen(grad)
        per_row = (grad * out).sum(-1)
    if near is not None:
        p = (near - total[..., None]).exp().masked_fill(_near_masked(sight, q, k, band), 0.0)
        dnear = p * (diagonals(grad, v, band) - per_row[..., None])
        add_near_values(dv, p, grad)
    if sinks is not None:  # a sink has no value: all it does is take weight
        dsinks = -((sinks.to(total.dtype)[:, None] - total).exp() * per_row).sum((0, 2))
    return dq, dk, dv, dnear, dsinks


def _add(total: Tensor | None, part: Tensor, like: Tensor, place: slice) -> Tensor:
    """Gradients of a place added to those so far; the first ones need no zeros to be added to."""
    part = widen(part)[..., : like.shape[3]]
    if total is None:
        return pad(part, (0, 0, place.start, like.shape[2] - place.stop))
    total[:, :, place] += part
    return total


def _even(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of one width, as a CPU's kernel and flash attention want them."""
    width = max(q.shape[3], v.shape[3])
    return tuple(x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in (q, k, v))


class _Share(NamedTuple):
    """Queries and keys of one call of torch's kernel.

    mask: minus infinity where keys are not seen; `None` if only causal order masks any.
    """

    rows: slice
    columns: slice
    causal: bool
    mask: Float[Tensor, "#B 1 R C"] | None

    def cut(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Part of a call's tensors that belongs to it."""
        return q[:, :, self.rows], k[:, :, self.columns], v[:, :, self.columns]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The output, and per row the logarithm of the sum of exponentials."""
        if self.mask is None:
            return _kernel(q).forward(q, k, v, None, self.causal, scale)
        blind = (self.mask == float("-inf")).all(-1)
        mask = self.mask.masked_fill(blind[..., None], 0.0)  # what they see then is not a number
        out, log_sum = _kernel(q, mask).forward(q, k, v, mask, False, scale)
        return out.masked_fill(blind[..., None], 0.0), log_sum.masked_fill(blind, float("-inf"))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Gradients of q, k and v for the joint output and sum."""
        kernel = _kernel(q, self.mask)
        return kernel.backward(grad, q, k, v, out, log_sum, self.mask, self.causal, scale)


def _shares(q: Tensor, k: Tensor, sight: Sight, band: int, impl: str) -> list[_Share]:
    """The calls of the kernel that compute attention to all keys but those of the band."""
    queries, keys = q.shape[2], k.shape[2]
    apart = any(x is not None for x in (sight.segments, sight.window, sight.places))
    if not apart and (queries == keys or not sight.causal):
        far = keys - band
        if far <= 0:
            return []
        return [_Share(slice(band, queries), slice(0, far), sight.causal, None)]
    scope = Scope(sight, queries, keys, q.device, composed=impl != "tiled")
    shares = []
    for start, stop in row_blocks(queries, tiles.ROWS_COMPOSED):
        rows = range(scope.offset + start, scope.offset + stop)
        columns = scope.columns(rows)
        masked = scope.masked(rows, columns)
        mask = q.new_zeros(len(masked.mask), 1, stop - start, len(columns))
        masked.fill(mask, float("-inf"))
        if band:
            row, column = (
                torch.arange(x.start, x.stop, device=q.device)
                for x in (range(keys - queries + start, keys - queries + stop), columns)
            )
            mask.masked_fill_(column > row[:, None] - band, float("-inf"))
        cut = slice(columns.start, columns.stop)
        shares.append(_Share(slice(start, stop), cut, False, mask))
    return shares


def _near_masked(sight: Sight, q: Tensor, k: Tensor, band: int) -> Tensor:
    """Mark the near keys that are masked, `[B or 1, 1, Tq, band]`."""
    queries, keys = q.shape[2], k.shape[2]
    row = torch.arange(keys - queries, keys, device=q.device)[:, None]
    column = row - torch.arange(band, device=q.device)
    inside, column = column >= 0, column.clamp(min=0)
    if sight.places is not None:
        own, others = sight.places[..., :queries, None], sight.places[..., queries:][..., column]
        seen = (own[:, 0] == others[:, 0]) & (own[:, 0] >= 0)
        back = own[:, 1] - others[:, 1]
    else:
        seen, back = inside[None], row - column
        if sight.segments is not None:
            own = sight.segments[:, row]
            seen = (own == sight.segments[:, column]) & (own >= 0)
    seen = seen & inside
    if sight.window is not None:
        seen = seen & (back < sight.window)
    return ~seen[:, None]


class _FlashOnCpu:
    """Torch's flash kernel for CPUs."""

    @staticmethod
    def forward(q, k, v, mask, causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )

    @staticmethod
    def backward(grad, q, k, v, out, log_sum, mask, causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, log_sum, 0.0, causal, attn_mask=mask, scale=scale
        )


class _Flash:
    """FlashAttention on a GPU: half precision, no mask, heads of at most 256."""

    @staticmethod
    def forward(q, k, v, mask, causal, scale):
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, scale=scale
        )[:2]

    @staticmethod
    def backward(grad, q, k, v, out, log_sum, mask, causal, scale):
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, log_sum, None, None, q.shape[2], k.shape[2], 0.0, causal, state,
            state[0], scale=scale,
        )  # fmt: skip


class _Efficient:
    """Memory-efficient attention on a GPU: any precision, width and mask."""

    @staticmethod
    def forward(q, k, v, mask, causal, scale):
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, _aligned(mask, q.shape[1]), True, 0.0, causal, scale=scale
        )
        return out, log_sum[..., : q.shape[2]]

    @staticmethod
    def backward(grad, q, k, v, out, log_sum, mask, causal, scale):
        # Rows are filled up to whole warps; an infinite sum leaves these without weight.
        log_sum = pad(log_sum, (0, -q.shape[2] % 32), value=float("inf"))
        state = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, _aligned(mask, q.shape[1]), out, log_sum, state[0], state[1], 0.0,
            [True, True, True, False], causal, scale=scale,
        )[:3]  # fmt: skip


def _aligned(mask: Tensor | None, heads: int) -> Tensor | None:
    """A mask of every head, as a view of one whose rows begin where the kernel may load them."""
    if mask is None:
        return None
    columns = mask.shape[3]
    return pad(mask, (0, -columns % 16))[..., :columns].expand(-1, heads, -1, -1)


def _kernel(
    q: Tensor, mask: Tensor | None = None
) -> type[_FlashOnCpu] | type[_Flash] | type[_Efficient]:
    """The kernel of torch that supports a call; the meta device stands for a GPU."""
    if q.device.type == "cpu":
        return _FlashOnCpu
    half = q.dtype in (torch.float16, torch.bfloat16)
    return _Flash if half and mask is None and q.shape[3] <= 256 else _Efficient
