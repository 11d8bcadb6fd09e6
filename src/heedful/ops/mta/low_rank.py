"""Logits of a tile where the convolution before the softmax has a low rank: one matrix product.

An identity kernel, which every converted model starts with, has rank one and costs what no
convolution costs. A kernel of full rank is cheaper convolved, tile by tile, on a CPU.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.ops.mta.wide import Band, band_logits, band_of, wide_keys, wide_queries
from heedful.ops.products import scores
from heedful.ops.tiles import Sight

_RANK = 2  # up to here the product is cheaper than the convolution of a tile
_QUERIES = 64  # fewer do not repay that every key is filtered


class LowRank(NamedTuple):
    """Queries and keys with heads r times as wide, and the logits of the band that they miss."""

    q: Float[Tensor, "B H Tq W"]
    k: Float[Tensor, "B H Tk W"]
    band: Band
    band_logits: Float[Tensor, "B H Tq n"]
    scale: float

    def logits(self, rows: range, columns: range, offset: int) -> Float[Tensor, "B H R C"]:
        """Conv(Mask_0(S)) of the tile; `rows` count queries, query i is token i + offset."""
        cut = slice(rows.start, rows.stop)
        x = scores(self.q[:, :, cut], self.k[:, :, columns.start : columns.stop], self.scale)
        if self.band.width == 0:
            return x
        distances = torch.tensor(self.band.logits, device=x.device)
        tokens = torch.arange(rows.start + offset, rows.stop + offset, device=x.device)
        at = tokens[:, None] - distances - columns.start
        # Outside the tile there is nothing to replace: the entry of distance 0 is written again.
        # (It is outside itself only in rows that see nothing.)
        inside = (at >= 0) & (at < len(columns))
        at = at.where(inside, at[:, :1]).clamp(0, len(columns) - 1)
        values = self.band_logits[:, :, cut]
        return x.scatter_(3, at.expand_as(values), values.where(inside, values[..., :1]))


def low_rank(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    conv: Float[Tensor, "H cq ck"],
    sight: Sight,
    scale: float,
) -> LowRank | None:
    """The wide form of these kernels, or `None` where it does not pay: high rank, few queries.

    `None` too anywhere but on a CPU: there looking for the rank would stall the stream.
    """
    looked = q.device.type == "cpu" and q.shape[2] >= _QUERIES
    if sight.mutual is not None:
        return None  # its edge of visibility is no band
    factors = _factors(conv) if looked else None
    if factors is None:
        return None
    left, right = factors
    wide_q = wide_queries(q, left, sight).transpose(2, 3).flatten(3)
    wide_k = wide_keys(k, right, sight).transpose(2, 3).flatten(3)
    band = band_of(conv.shape[1], conv.shape[2], sight)
    return LowRank(wide_q, wide_k, band, band_logits(q, k, conv, sight, scale), scale)


def _factors(
    conv: Float[Tensor, "H cq ck"],
) -> tuple[Float[Tensor, "H r cq"], Float[Tensor, "H r ck"]] | None:
    """theta[cq-1-a, c] = sum_r left[r, a] right[r, c], up to what rounding theta costs."""
    u, sizes, v = torch.linalg.svd(conv.flip(1).double(), full_matrices=False)
    # The decomposition itself errs by a few units of fp64.
    least = max(torch.finfo(conv.dtype).eps, 16 * torch.finfo(torch.float64).eps)
    rank = max(1, int((sizes > least * sizes[:, :1]).sum(1).max()))
    if rank > _RANK:
        return None
    left = (u * sizes[:, None])[..., :rank].mT
    return left.to(conv.dtype), v[:, :rank].to(conv.dtype)
