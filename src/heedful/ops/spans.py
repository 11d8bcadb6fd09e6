"""Which keys a block of queries can reach, and back: the loop bounds of the fused kernels."""

import torch
from jaxtyping import Int
from torch import Tensor

from heedful.ops.tiles import Sight, segment_bounds


def key_spans(
    sight: Sight, queries: int, keys: int, block: int, device: torch.device
) -> Int[Tensor, "B_or_1 blocks 2"]:
    """First and one-past-last key that any query of each block of `block` queries can see.

    Bounds, not exact: inside them a tile still needs its mask. A block that sees nothing (padding)
    has an empty span.
    """
    first, stop = _reach_back(sight, keys, device)
    rows = slice(keys - queries, keys)
    return torch.stack(
        [_blocks(first[:, rows], block, keys).amin(-1), _blocks(stop[:, rows], block, 0).amax(-1)],
        dim=-1,
    ).to(torch.int32)


def query_spans(
    sight: Sight, queries: int, keys: int, block: int, device: torch.device
) -> Int[Tensor, "B_or_1 blocks 2"]:
    """First and one-past-last query (counted among queries) that can see any key of each block."""
    token = torch.arange(keys, device=device)[None]
    begin, end = _document_bounds(sight, keys, device)
    first = torch.maximum(begin, token) if sight.causal else begin
    stop = end if sight.window is None else torch.minimum(end, token + sight.window)
    if sight.segments is not None:
        first, stop = _empty_where_padded(sight, first, stop, keys)
    offset = keys - queries
    first, stop = (first - offset).clamp(0, queries), (stop - offset).clamp(0, queries)
    return torch.stack(
        [_blocks(first, block, queries).amin(-1), _blocks(stop, block, 0).amax(-1)], dim=-1
    ).to(torch.int32)


def _reach_back(sight: Sight, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per token as a query: first and one-past-last key it may see."""
    token = torch.arange(keys, device=device)[None]
    begin, end = _document_bounds(sight, keys, device)
    first = begin if sight.window is None else torch.maximum(begin, token - sight.window + 1)
    stop = torch.minimum(end, token + 1) if sight.causal else end
    if sight.segments is not None:
        first, stop = _empty_where_padded(sight, first, stop, keys)
    return first, stop


def _document_bounds(sight: Sight, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Per token the first and one-past-last token of its segment."""
    if sight.segments is None:
        zero = torch.zeros(1, keys, dtype=torch.int64, device=device)
        return zero, zero + keys
    return segment_bounds(sight.segments)


def _empty_where_padded(sight, first: Tensor, stop: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    real = sight.segments >= 0
    return first.expand_as(real).where(real, keys), stop.expand_as(real).where(real, 0)


def _blocks(x: Tensor, block: int, fill: int) -> Tensor:
    """`[B, T] -> [B, blocks, block]`, the last one filled up."""
    filled = torch.nn.functional.pad(x, (0, -x.shape[1] % block), value=fill)
    return filled.unflatten(1, (-1, block))
