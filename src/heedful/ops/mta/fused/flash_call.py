"""A call of the fused kernels of multi-token attention: tensors, what kernels are told, chunks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from jaxtyping import Int
from torch import Tensor

from heedful.ops.common.limits import MOST_PROGRAMS, padded
from heedful.ops.common.tiles import Sight, in_blocks, segment_bounds
from heedful.ops.mta.fused import plan
from heedful.ops.mta.fused.wide_kernels import band_kernel, filter_kernel, scores_kernel
from heedful.ops.mta.wide import Band, band_of

SPLIT = 1024  # tokens per program of the convolution kernel's gradient
_NEVER = 2**30  # a distance that no two tokens have


class FlashCall(NamedTuple):
    """One call's tensors, contiguous, and what every kernel is told about them."""

    q: Tensor
    k: Tensor
    v: Tensor
    theta: Tensor  # fp32; the identity stands for none
    own_keys: bool  # a convolution is given: each query head has keys of its own
    segments: Tensor  # int32; any tensor where there are none, as for `parts`
    parts: Tensor  # which parts of a query's wide row exist, see tile.load_parts
    sight: Sight
    band: Band
    scale: float

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def width(self) -> int:
        return self.theta.shape[1] * self.q.shape[3]

    @property
    def block(self) -> int:
        """Tokens per program of the kernels that are linear in T."""
        return plan.token_block(self.q.shape[3])

    def sizes(self) -> tuple[int, int, int]:
        """What a launch of the flash kernels is chosen by."""
        return self.width, self.v.shape[3], self.q.element_size()

    def chunks(self, bytes_per_number: int, map_bytes: int = 0) -> Iterator[tuple[int, int]]:
        """First query head and number of query heads (of all batch rows) of each launch.

        Arguments:
            bytes_per_number: what is held at once per number of a wide row.
            map_bytes: what is held at once of the map of one query head.
        """
        units = self.k.shape[0] * self.k.shape[1]
        one = self.group * self.k.shape[2] * self.width * bytes_per_number
        step = plan.heads_at_once(units, one, self.q.numel() * self.q.element_size())
        step = min(step, max(1, plan.SCRATCH // max(1, self.group * map_bytes)))
        step = min(step, max(1, MOST_PROGRAMS // self.group))
        for start in range(0, units, step):
            yield start * self.group, min(step, units - start) * self.group

    def spans(self, of: Any, block: int) -> Tensor:
        """Bounds per block where segments make them; kernels work out the others themselves."""
        if self.sight.segments is None:
            return self.segments[:1]
        return of(self.sight, self.q.shape[2], self.k.shape[2], block, self.q.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], *tensors: Tensor, **more: Any) -> None:
        """Launches a kernel: of all that kernels are told, it gets what it has arguments for."""
        several = self.sight.segments is not None and len(self.sight.segments) > 1
        band, window = self.band, self.sight.window or 0
        known = {
            "heads": self.q.shape[1], "group": self.group, "value_heads": self.v.shape[1],
            "queries": self.q.shape[2], "keys": self.k.shape[2], "scale": self.scale,
            "segment_stride": several * self.k.shape[2], "part_stride": several * self.q.shape[2],
            "OWN_KEYS": self.own_keys, "PARTS": self.theta.shape[1], "DIM": self.q.shape[3],
            "VALUE_DIM": self.v.shape[3], "DV": padded(self.v.shape[3]),
            "CAUSAL": self.sight.causal, "WINDOW": window,
            "SEGMENTS": self.sight.segments is not None,
            "ROWS": self.theta.shape[1], "COLUMNS": self.theta.shape[2],
            "D": padded(self.q.shape[3]), "NEAR": len(band.near),
            "FAR": band.far.start if band.far else window or _NEVER, "BAND": band.width,
            "BAND_PADDED": padded(max(1, band.width)),
            "NEAR_SCORES": len(band.near_scores), "FAR_SCORES": band.far_scores.start,
            "SCORES": len(band.scores), "SCORES_PADDED": padded(max(1, len(band.scores))),
            "BM": self.block, "BN": self.block, "TOKENS": SPLIT,
        } | more  # fmt: skip
        told = {name: x for name, x in known.items() if name in kernel.arg_names}
        options = {name: more[name] for name in ("num_warps", "num_stages") if name in more}
        with torch.cuda.device_of(self.q):
            kernel[grid](*tensors, **told, **options)


def flash_call(
    q: Tensor, k: Tensor, v: Tensor, conv: Tensor | None, segments: Tensor | None,
    causal: bool, window: int | None, scale: float,
) -> FlashCall:  # fmt: skip
    """Prepares a call; without `conv` it is standard attention."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    theta = torch.ones(q.shape[1], 1, 1, device=q.device) if conv is None else conv
    theta = theta.to(torch.float32).contiguous()
    if window is not None and window >= k.shape[2]:
        window = None  # hides nothing
    sight = Sight(segments, segments is not None, causal, window)
    numbers = parts = q
    if segments is not None:
        numbers = segments.to(torch.int32).contiguous()
        parts = _existing_parts(numbers, q.shape[2], theta.shape[1])
    band = band_of(*theta.shape[1:], sight)
    return FlashCall(q, k, v, theta, conv is not None, numbers, parts, sight, band, scale)


def _existing_parts(segments: Int[Tensor, "B Tk"], queries: int, parts: int) -> Int[Tensor, "B Tq"]:
    """Per query a number with bit r set where the row parts-1-r above exists in its segment."""
    own = segments[:, -queries:]
    above = torch.nn.functional.pad(own, (parts - 1, 0), value=-1).unfold(1, parts, 1)
    exists = (above == own[..., None]) & (own >= 0)[..., None]
    return (exists << torch.arange(parts, device=own.device)).sum(-1, dtype=torch.int32)


class Widened(NamedTuple):
    """What a chunk's flash kernels read in place of the keys."""

    keys: Tensor
    scores: Tensor
    band: Tensor


def widen_keys(x: FlashCall, first: int, heads: int) -> Widened:
    """Wide keys and the band of these query heads."""
    if not x.own_keys:
        return Widened(x.k, x.theta, x.theta)
    queries, keys = x.q.shape[2], x.k.shape[2]
    wide = x.k.new_empty(heads, keys, x.width)
    scores = x.theta.new_empty(heads, len(x.band.scores), queries)
    band = x.theta.new_empty(heads, queries, x.band.width)
    at = {"first_head": first, "num_warps": 8}
    x.launch(
        filter_kernel, (triton.cdiv(keys, x.block), heads), x.k, x.theta, x.segments, wide, **at
    )
    if x.band.width:
        grid = (triton.cdiv(queries, x.block), heads)
        x.launch(scores_kernel, grid, x.q, x.k, x.segments, scores, **at)
        x.launch(band_kernel, grid, scores, x.theta, x.parts, band, **at)
    return Widened(wide, scores, band)


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
        [
            in_blocks(first[:, rows], block, keys).amin(-1),
            in_blocks(stop[:, rows], block, 0).amax(-1),
        ],
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
        [in_blocks(first, block, queries).amin(-1), in_blocks(stop, block, 0).amax(-1)], dim=-1
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
