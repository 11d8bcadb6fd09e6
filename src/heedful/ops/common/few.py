"""A few new queries against many keys, as in cached decoding: dense over the few rows.

Memory is linear in the number of keys all the same, and keys and values are read where they lie,
once for every group of query heads: nothing is copied, spread or widened on the way.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.precision import bf16_on_cpu, widen
from heedful.ops.common.tiles import Masked
from heedful.ops.visibility import Visibility

FEW = 32
_LOST = 1e-30  # weights below are lost beside a weight of one, and subnormal ones slow a CPU down


def few_queries(q: Tensor, k: Tensor, tensors: Iterable[Tensor | None]) -> bool:
    """Test whether this form fits a call: few rows of more tokens, and nothing to differentiate."""
    if torch.compiler.is_compiling() or not 1 <= q.shape[2] <= FEW or q.shape[2] >= k.shape[2]:
        return False
    return not torch.is_grad_enabled() or not any(
        x is not None and x.requires_grad for x in tensors
    )


def is_step(q: Tensor, k: Tensor) -> bool:
    """Test whether a call is a step of a cache: few queries, and neither gradients nor autocast."""
    return (
        not torch.is_grad_enabled()
        and few_queries(q, k, ())
        and not torch.is_autocast_enabled(q.device.type)
    )


def masked_from(
    visibility: Visibility, queries: int, keys: int, device: torch.device
) -> Masked | None:
    """Keys masked from the queries; `None` where they see everything."""
    if not visibility.plain:
        return Masked(0, ~visibility.dense(queries, keys, device)[:, None])
    if queries == 1 or not visibility.causal:
        return None
    # Keys before the first query are seen by all: only a triangle is masked.
    return Masked(keys - queries, ~visibility.dense(queries, queries, device)[:, None])


def few_scores(
    q: Float[Tensor, "B H Tq D"], k: Float[Tensor, "B Hk Tk D"], scale: float
) -> Float[Tensor, "B H Tq Tk"]:
    """`scale q k^T` in fp32 at least; every key head serves its group of query heads at once."""
    (batch, heads, queries, dim), (_, key_heads, keys, _) = q.shape, k.shape
    grouped = _operand(q).reshape(batch, key_heads, heads // key_heads * queries, dim)
    scores = widen(grouped @ _operand(k).mT).view(batch, heads, queries, keys)
    return scores if scale == 1.0 else scores.mul_(scale)


def few_weights(
    logits: Float[Tensor, "B H Tq Tk"],
    masked: Masked | None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "B H Tq Tk"]:
    """Softmax over what is seen, and a sink if there is one; rows that see nothing become zero.

    What is masked is written into `logits`.
    """
    if masked is not None:
        masked.fill(logits, float("-inf"))
    if sinks is None:
        weights = logits.softmax(-1)
    else:
        row = sinks.to(logits.dtype)[:, None, None].expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, row], dim=-1).softmax(-1)[..., :-1]
    if masked is not None:
        masked.fill(weights, 0)  # also where a whole row is masked
    return torch.threshold_(weights, _LOST, 0.0)


def few_outputs(
    weights: Float[Tensor, "B H Tq Tk"], v: Float[Tensor, "B Hk Tk Dv"]
) -> Float[Tensor, "B H Tq Dv"]:
    """`weights v` in fp32 at least."""
    (batch, heads, queries, keys), (_, key_heads, _, dim) = weights.shape, v.shape
    v = _operand(v)
    grouped = weights.reshape(batch, key_heads, heads // key_heads * queries, keys)
    return widen(grouped.to(v.dtype) @ v).view(batch, heads, queries, dim)


def by_keys(
    maps: Float[Tensor, "B H R K"], rows: Float[Tensor, "B H R D"], key_heads: int
) -> Float[Tensor, "B Hk K D"]:
    """Sum of the rows for every key, weighted by the maps, over the query heads of its group."""
    maps, rows = (x.unflatten(1, (key_heads, -1)).flatten(2, 3) for x in (maps, rows))
    return maps.mT @ rows.to(maps.dtype)


def _operand(x: Tensor) -> Tensor:
    """In its own precision where the device has units for it, else wide; in place either way."""
    narrow = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    narrow = narrow or (x.dtype == torch.bfloat16 and x.device.type == "cpu" and bf16_on_cpu())
    return x if narrow else widen(x)
