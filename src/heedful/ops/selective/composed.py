"""Row blocks of selective attention through torch's own attention with a bias: what a GPU gets.

The map of a block is never in memory: -F is a bias, one tile for all heads, and the gradient of the
bias is that of -F. Of torch's kernels the memory-efficient one is called by its name: it is the one
that gives a bias a gradient. Where it does not serve, plain torch computes the same.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from heedful.ops.common.precision import product, scores
from heedful.ops.common.tiles import Hidden

HIDDEN = -1e30  # finite, as a row of -inf is NaN; to its power e is zero beside any logit
ALIGNMENT = 32  # rows to which the kernel fills up its sums, with infinity
_BIAS_COLUMNS = 16  # to a multiple of which the kernel needs a row of the bias in memory


class Bias(NamedTuple):
    """What is added to the logits of a row block."""

    values: Float[Tensor, "B H R C"]  # in the operands' precision; one tile may stand for all heads
    blind: Bool[Tensor, "B 1 R 1"] | None  # rows that see nothing, where there may be some

    def without_blind(self, x: Float[Tensor, "B H R D"]) -> Float[Tensor, "B H R D"]:
        """Zero in the rows that see nothing."""
        return x if self.blind is None else x.masked_fill(self.blind, 0.0)


def bias_of(
    f: Float[Tensor, "B Hs R C"],
    hidden: Hidden,
    bias: Float[Tensor, "#B #H R C"] | None,
    q: Float[Tensor, "B H R D"],
) -> Bias:
    """`bias - F`, in the precision of these queries; far below every logit where hidden."""
    size = f.shape if bias is None else torch.broadcast_shapes(f.shape, bias.shape)
    values = _room(size, q)
    if bias is None:
        torch.mul(f, -1.0, out=values)
    else:
        torch.sub(bias, f, out=values)
    hidden.fill(values, HIDDEN)
    blind = None if hidden.clear else hidden.mask.all(-1, keepdim=True)
    return Bias(values.expand(-1, q.shape[1], -1, -1), blind)


def _room(size: tuple[int, ...], like: Tensor) -> Tensor:
    columns = size[3]
    rows = like.new_empty(*size[:3], -(-columns // _BIAS_COLUMNS) * _BIAS_COLUMNS)
    return rows[..., :columns]


def biased_attention(
    q: Float[Tensor, "B H R D"],
    k: Float[Tensor, "B H C D"],
    v: Float[Tensor, "B H C Dv"],
    bias: Bias,
    scale: float,
) -> tuple[Float[Tensor, "B H R Dv"], Float[Tensor, "B H R"]]:
    """`softmax(scale q k^T + bias) v`, and the logarithm of each row's sum of exponentials."""
    if _by_kernel(q, v, scale):
        out, sums, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias.values, True, scale=scale
        )
        sums = sums[..., : q.shape[2]]
    else:
        logits = scores(q, k, scale).add_(bias.values)
        sums = logits.logsumexp(-1)
        out = product(logits.sub_(sums[..., None]).exp_(), v).to(q.dtype)
    return bias.without_blind(out), sums


def biased_attention_backward(
    grad: Float[Tensor, "B H R Dv"],
    q: Float[Tensor, "B H R D"],
    k: Float[Tensor, "B H C D"],
    v: Float[Tensor, "B H C Dv"],
    bias: Bias,
    out: Float[Tensor, "B H R Dv"],
    sums: Float[Tensor, "B H rows"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Float[Tensor, "B H R C"]]:
    """Gradients of q, k, v and, for every head, of the bias, in the operands' precision.

    `sums` has infinity after its last row, up to a multiple of `ALIGNMENT` rows.
    """
    grad = bias.without_blind(grad)
    if _by_kernel(q, v, scale):
        seed = torch.empty((), dtype=torch.int64, device=q.device)  # of no dropout
        return torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias.values, out, sums, seed, seed, 0.0, [True] * 4, scale=scale
        )
    rows = sums[:, :, : q.shape[2], None]
    p = scores(q, k, scale).add_(bias.values).sub_(rows).exp_()
    delta = (grad.to(p.dtype) * out).sum(-1, keepdim=True)
    dbias = product(grad, v.mT).sub_(delta).mul_(p)
    dlogits = dbias * scale
    parts = product(dlogits, k), product(dlogits.mT, q), product(p.mT, grad), dbias
    dq, dk, dv, dbias = (x.to(q.dtype) for x in parts)
    return dq, dk, dv, dbias


def sums_shape(q: Float[Tensor, "B H Tq D"], composed: bool) -> tuple[int, ...]:
    """Of the `sums` of all blocks of a call; of none, if it is not composed."""
    return (*q.shape[:2], -(-q.shape[2] // ALIGNMENT) * ALIGNMENT) if composed else (0,)


def _by_kernel(q: Tensor, v: Tensor, scale: float) -> bool:
    """Whether torch's kernel serves: on a GPU, in at most fp32, with heads of whole 16 bytes."""
    aligned = all(x.shape[-1] * x.element_size() % 16 == 0 for x in (q, v))
    return q.device.type in ("cuda", "meta") and q.dtype != torch.float64 and aligned and scale > 0
