"""Grouped attention as one FlexAttention: summaries and tokens stand side by side as its columns.

A row's summaries are two runs of columns and its tokens a third, so that the blocks which are
computed follow from bounds, and neither a mask nor a map is ever held. What is added to a logit,
the size of a group or the share of a token that no summary holds, is looked up in the kernel.

Where groups ask, a row has two queries. Both stand in one of twice the width, and the columns of
either kind are zero in the other's half.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from heedful.ops.grouped.groups import Groups
from heedful.ops.grouped.neighbourhood import GroupedCall
from heedful.ops.impl import no_triton

_BLOCK = 128
_NARROWEST = 16  # heads of a GPU


def grouped_attention_fused(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    call: GroupedCall,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `grouped_attention`, where `unserved` has nothing to say against it."""
    groups, summaries, log_size = call.groups, call.summaries, call.log_size
    rows, queries, keys, count = len(q), q.shape[2], k.shape[2], groups.count
    reach = call.reach(queries, keys)
    asking, group_k, token_k = q, summaries.k, k
    if summaries.q is not None:
        asks = reach.asks.expand(rows, -1)[:, None, :, None]
        theirs = summaries.q.gather(2, asks.clamp(min=0).expand(-1, q.shape[1], -1, q.shape[3]))
        asking = torch.cat([q, theirs.where(asks >= 0, q)], dim=3)
        group_k = torch.cat([torch.zeros_like(group_k), group_k], dim=3)
        token_k = torch.cat([token_k, torch.zeros_like(token_k)], dim=3)
    bounds = reach.stacked().expand(rows, -1, -1).contiguous()
    index = groups.index.expand(rows, -1, -1).contiguous()
    weight = groups.weight.to(log_size.dtype).expand(rows, -1, -1)
    constant = weight.detach()  # a mask has no gradient
    shares, hard = index.shape[2], groups.hard

    def left(weight: Tensor, b: Tensor, i: Tensor, token: Tensor) -> Tensor:
        """r_i(t); one where no summary that is seen holds any of the token."""
        near, after = bounds[b, 1, i], bounds[b, 2, i]
        covered = whole = None
        for s in range(shares):
            at = index[b, token, s]
            open_ = (at >= near) & (at < after)
            part = torch.where(open_, weight[b, token, s], 0.0)
            covered = part if covered is None else covered + part
            whole = open_ | (at < 0) if whole is None else whole & (open_ | (at < 0))
        return torch.where(whole, 1.0, covered)

    def visible(b: Tensor, h: Tensor, i: Tensor, column: Tensor) -> Tensor:
        first, near, after, last = (bounds[b, n, i] for n in range(4))
        summary = ((column >= first) & (column < near)) | ((column >= after) & (column < last))
        token = column - count
        inside = (token >= bounds[b, 4, i]) & (token < bounds[b, 5, i])
        token = token.clamp(min=0)
        real = index[b, token, 0] >= 0
        for s in range(1, shares):
            real = real | (index[b, token, s] >= 0)
        inside = inside & real if hard else inside & real & (left(constant, b, i, token) > 0)
        return torch.where(column < count, summary, inside)

    def added(score: Tensor, b: Tensor, h: Tensor, i: Tensor, column: Tensor) -> Tensor:
        size = log_size[b, h, column.clamp(max=count - 1)]
        if hard:
            return score + torch.where(column < count, size, 0.0)
        rest = left(weight, b, i, (column - count).clamp(min=0))
        return score + torch.where(column < count, size, torch.where(rest > 0, rest, 1.0).log())

    blocks = flex.BlockMask.from_kv_blocks(
        *_blocks(bounds, count, keys), BLOCK_SIZE=_BLOCK, mask_mod=visible,
        seq_lengths=(queries, count + keys),
    )  # fmt: skip
    columns = (torch.cat([group_k, token_k], dim=2), torch.cat([summaries.v, v], dim=2))
    return _run(q)(
        asking, *columns, score_mod=added, block_mask=blocks, scale=call.scale, enable_gqa=True
    )


def unserved(q: Tensor, v: Tensor, bias: Tensor | None, groups: Groups) -> str | None:
    """Why FlexAttention does not support a call, in one clause, or `None`."""
    if bias is not None:
        return "a position bias is one number per token, and its columns are summaries too"
    if not groups.count or not q.shape[2]:
        return "there is nothing to attend to"
    if q.is_cuda and (narrow := min(q.shape[3], v.shape[3])) < _NARROWEST:
        return f"FlexAttention on a GPU takes heads of {_NARROWEST} at least, not of {narrow}"
    if torch.compiler.is_compiling() and q.device.type == "cpu":
        return "its kernels need a GPU, and q is on cpu"
    return no_triton(q)


def _run(q: Tensor):
    """FlexAttention compiled; inside a compiled model, and without a GPU, as it is written."""
    if torch.compiler.is_compiling() or not q.is_cuda:
        return flex.flex_attention
    # Whole, so that what cannot be compiled raises, and never falls back to a dense map.
    return torch.compile(flex.flex_attention, fullgraph=True)


def _blocks(
    bounds: Int[Tensor, "B 7 Tq"], count: int, keys: int
) -> tuple[Int[Tensor, "B 1 R"], Int[Tensor, "B 1 R C"]]:
    """Number of column blocks that each row block reaches, and their order: those come first."""
    first, near, after, last, start, stop, _ = bounds.unbind(1)
    wide = -(-(count + keys) // _BLOCK)
    block = torch.arange(wide, device=bounds.device)
    reached = None
    for low, high in ((first, near), (after, last), (start + count, stop + count)):
        some = high > low
        fill = -low.shape[1] % _BLOCK
        low, high = low.where(some, count + keys), high.where(some, 0)
        low = torch.nn.functional.pad(low, (0, fill), value=count + keys)
        high = torch.nn.functional.pad(high, (0, fill), value=0)
        low, high = low.unflatten(1, (-1, _BLOCK)).amin(2), high.unflatten(1, (-1, _BLOCK)).amax(2)
        part = (block >= low[..., None] // _BLOCK) & (block * _BLOCK < high[..., None])
        reached = part if reached is None else reached | part
    order = (~reached).to(torch.int32).argsort(dim=2, stable=True).to(torch.int32)
    return reached.sum(2, dtype=torch.int32)[:, None], order[:, None]
