"""The convolution before the softmax as ordinary attention with wider heads, but for a narrow band.

Conv(Mask_0(S))[i, j] = sum_{a, c} theta[cq-1-a, c] Z[i-a, j-h+c] with h = (ck-1)/2 (MTA eq. 5).
Wherever Mask_0 hides nothing that the kernel reaches, any factorisation theta[cq-1-a, c] =
sum_r left[r, a] right[r, c] gives

    C[i, j] = scale sum_r q^r_i . k^r_j,    q^r_i = sum_a left[r, a] q_{i-a},
                                            k^r_j = sum_c right[r, c] k_{j-h+c}:

plain attention with heads r times as wide. Segments fit in exactly: a term of another document, of
padding or of a row that does not exist is left out of q^r and k^r. The causal edge and the window's
edge do not fit, as they run along the diagonal: there Mask_0 hides S[i', j'] with j' > i' (the
future of its own row, eq. 5 against eq. 4) or i' - j' >= window. They concern only the distances
i - j of a `Band`; its logits are sums of scores at few distances, computed apart, and *replace*
those above. Subtracting the hidden terms instead would leave their rounding, hence a trace of
future tokens. Nothing here is T x T, and all of it is differentiable.

The rest of the file says where this form is taken. A kernel of low rank is cheaper as a product of
wide heads than convolved tile by tile; an identity kernel, which every converted model starts with,
has rank one. Where the call has nothing else, torch's own flash kernel computes it, and where all
parameters are the identity, standard attention does.
"""

import functools
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from heedful.ops.common.precision import product, scores, widen
from heedful.ops.common.standard import standard_attention, with_positive_scale
from heedful.ops.common.tiles import Sight
from heedful.ops.mta.convolution import Parameters

_RANK = 2  # up to here the product is cheaper than the convolution of a tile
_QUERIES = 64  # fewer do not repay that every key is filtered
_BLOCK = 32  # tokens per small matrix product


class Band(NamedTuple):
    """Distances i - j whose logits an edge of visibility cuts, and of the scores they sum.

    Each is a run near the diagonal and, with a window, a run near its far end; either can be empty.
    """

    near: range
    far: range
    near_scores: range
    far_scores: range

    @property
    def width(self) -> int:
        return len(self.near) + len(self.far)

    @property
    def logits(self) -> list[int]:
        return [*self.near, *self.far]

    @property
    def scores(self) -> list[int]:
        return [*self.near_scores, *self.far_scores]


def band_of(rows: int, columns: int, sight: Sight) -> Band:
    """The band of a kernel with `rows` (c_q) and `columns` (c_k); empty if not causal."""
    none, aside = range(0), columns // 2
    if not sight.causal:
        return Band(none, none, none, none)
    near = range(aside + rows - 1)
    if sight.window is None:
        return Band(near, none, range(near.stop + aside if near else 0), none)
    # A small window makes the runs meet; then the first owns what both would hold.
    near = range(min(near.stop, sight.window))
    far = range(max(near.stop, sight.window - aside), sight.window)
    near_scores = range(min(near.stop + aside, sight.window) if near else 0)
    far_scores = none
    if far:
        far_scores = range(max(near_scores.stop, far.start - aside - rows + 1), sight.window)
    return Band(near, far, near_scores, far_scores)


def wide_queries(
    q: Float[Tensor, "B H Tq D"], left: Float[Tensor, "H r cq"], sight: Sight, after: int = 0
) -> Float[Tensor, "B H r Tq D"]:
    """q^r_i = sum_a left[r, a] q_{i-a+after} over the queries of i's own segment."""
    segments = None if sight.segments is None else sight.segments[:, -q.shape[2] :]
    return _filter(q, left.flip(-1), left.shape[2] - 1 - after, segments)


def wide_keys(
    k: Float[Tensor, "B Hk Tk D"], right: Float[Tensor, "H r ck"], sight: Sight
) -> Float[Tensor, "B H r Tk D"]:
    """k^r_j = sum_c right[r, c] k_{j-h+c} over the keys of j's own segment, one per query head."""
    return _filter(k, right, right.shape[2] // 2, sight.segments)


def band_logits(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    conv: Float[Tensor, "H cq ck"],
    sight: Sight,
    scale: float,
) -> Float[Tensor, "B H Tq n"]:
    """Conv(Mask_0(S))[i, i-d] for every distance d of the band in turn, fp32 at least.

    Entries with i - d before the first key or in another segment are finite and mean nothing.
    """
    q, k = widen(q), widen(k)
    queries, rows, columns = q.shape[2], conv.shape[1], conv.shape[2]
    band = band_of(rows, columns, sight)
    parts = [_diagonals(q, k, x) for x in (band.near_scores, band.far_scores) if x]
    if not parts:
        return q.new_zeros(*q.shape[:3], 0)
    scores = torch.cat(parts, dim=-1) * scale  # Z[i, i-e]: e is never negative, nor >= window
    at, of = (torch.tensor(x, device=q.device) for x in (band.scores, band.logits))
    segments = sight.segments
    if segments is not None:
        scores = scores * _same_segment(segments, queries, at)[:, None]
    # c = d + h - a - e; a column of zeros stands for every c outside the kernel.
    column = of[None, :] + columns // 2 - at[:, None]
    kernel = F.pad(conv.to(q.dtype), (0, 1))
    total = q.new_zeros(())
    for a in range(rows):
        above = F.pad(scores, (0, 0, a, 0))[:, :, :queries]
        if segments is not None and a:
            back = torch.tensor([a], device=q.device)
            above = above * _same_segment(segments, queries, back)[:, None]
        c = column - a
        c = c.masked_fill((c < 0) | (c >= columns), columns)
        total = total + above @ kernel[:, rows - 1 - a, c]
    return total


def _filter(
    x: Float[Tensor, "B Hx T D"],
    weights: Float[Tensor, "H r w"],
    before: int,
    segments: Int[Tensor, "#B T"] | None,
) -> Float[Tensor, "B H r T D"]:
    """y_t = sum_c weights[c] x_{t-before+c} over t's own segment, as products with small bands.

    A block of outputs is a banded Toeplitz matrix times the tokens that it reaches.
    """
    (batch, shared, tokens, dim), (heads, parts, width) = x.shape, weights.shape
    blocks = -(-tokens // _BLOCK)
    reach = _BLOCK + width - 1
    after = blocks * _BLOCK - tokens + width - 1 - before
    windows = F.pad(x, (0, 0, before, after)).unfold(2, reach, _BLOCK)  # b h n d y
    matrix = _banded(weights.to(x.dtype)[:, :, None].expand(-1, -1, _BLOCK, -1))
    matrix = matrix.unflatten(0, (shared, -1))  # h g r t y
    if segments is None:
        y = torch.einsum("hgrty,bhndy->bhgrntd", matrix, windows)
    else:
        documents = F.pad(segments, (before, after), value=-2).unfold(1, reach, _BLOCK)
        same = documents[:, :, before : before + _BLOCK, None] == documents[:, :, None]  # b n t y
        y = torch.einsum(
            "bhgnrty,bhndy->bhgrntd", matrix[:, :, None] * same[:, None, None, :, None], windows
        )
    return y.reshape(batch, heads, parts, blocks * _BLOCK, dim)[:, :, :, :tokens]


def _banded(weights: Float[Tensor, "*lead n w"]) -> Float[Tensor, "*lead n n+w-1"]:
    """Row t holds its weights from column t on."""
    rows, width = weights.shape[-2:]
    reach = rows + width - 1
    # Lines one longer than a row shift by one from row to row.
    lines = F.pad(weights, (0, rows)).flatten(-2)[..., : rows * reach]
    return lines.unflatten(-1, (rows, reach))


def _diagonals(
    q: Float[Tensor, "B H Tq D"], k: Float[Tensor, "B Hk Tk D"], distances: range
) -> Float[Tensor, "B H Tq n"]:
    """q_i . k_{i-e} for every distance e in turn, 0 where there is no such key."""
    (batch, heads, queries, dim), (_, shared, keys, _) = q.shape, k.shape
    blocks, width = -(-queries // _BLOCK), len(distances)
    reach = _BLOCK + width - 1
    first = keys - queries - distances.stop + 1  # the key that the first query reaches furthest
    needed = blocks * _BLOCK + width - 1
    around = F.pad(k, (0, 0, max(0, -first), max(0, first + needed - keys)))
    around = around[:, :, max(0, first) : max(0, first) + needed]
    windows = around.unfold(2, reach, _BLOCK)  # b h n d y
    q = F.pad(q, (0, 0, 0, blocks * _BLOCK - queries))
    q = q.reshape(batch, shared, heads // shared, blocks, _BLOCK, dim)
    products = torch.einsum("bhgntd,bhndy->bhgnty", q, windows)
    # Query t of a block meets its keys from column t on; lines one longer put them in column 0.
    lines = F.pad(products.flatten(-2), (0, _BLOCK)).unflatten(-1, (_BLOCK, reach + 1))
    return lines[..., :width].flip(-1).reshape(batch, heads, -1, width)[:, :, :queries]


def near_values(
    p: Float[Tensor, "B H T n"], v: Float[Tensor, "B H T D"]
) -> Float[Tensor, "B H T D"]:
    """sum_e p[i, e] v[i - e] over distances e below n, without the keys before the first."""
    tokens, width = p.shape[2:]
    blocks, reach = -(-tokens // _BLOCK), _BLOCK + width - 1
    p = F.pad(p.flip(-1), (0, 0, 0, blocks * _BLOCK - tokens))
    matrix = _banded(p.unflatten(2, (blocks, _BLOCK)))  # b h n t y
    windows = F.pad(v, (0, 0, width - 1, blocks * _BLOCK - tokens)).unfold(2, reach, _BLOCK)
    return product(matrix, windows.mT).flatten(2, 3)[:, :, :tokens].contiguous()


def _same_segment(
    segments: Int[Tensor, "B Tk"], queries: int, distances: Int[Tensor, " n"]
) -> Bool[Tensor, "B Tq n"]:
    """Query token i and token i - e are of the same segment."""
    keys = segments.shape[1]
    token = torch.arange(keys - queries, keys, device=segments.device)[:, None] - distances
    return (segments[:, token.clamp(min=0)] == segments[:, -queries:, None]) & (token >= 0)


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
    two_sided: bool = False,
) -> LowRank | None:
    """The wide form of these kernels, or `None` where it does not pay: high rank, few queries.

    `None` too anywhere but on a CPU: there looking for the rank would stall the stream.
    """
    looked = q.device.type == "cpu" and q.shape[2] >= _QUERIES
    two_edges = sight.window is not None and not sight.causal
    if sight.mutual is not None or sight.places is not None or two_edges:
        return None  # its edge of visibility is no band
    factors = _factors(conv) if looked else None
    if factors is None:
        return None
    left, right = factors
    after = conv.shape[1] // 2 if two_sided else 0
    wide_q = wide_queries(q, left, sight, after).transpose(2, 3).flatten(3)
    wide_k = wide_keys(k, right, sight).transpose(2, 3).flatten(3)
    band = band_of(conv.shape[1], conv.shape[2], sight)
    return LowRank(wide_q, wide_k, band, band_logits(q, k, conv, sight, scale), scale)


def _factors(
    conv: Float[Tensor, "H cq ck"],
) -> tuple[Float[Tensor, "H r cq"], Float[Tensor, "H r ck"]] | None:
    """theta[cq-1-a, c] = sum_r left[r, a] right[r, c], up to what rounding theta costs.

    Found once for the same numbers: a kernel stays what it is for all the calls between two steps
    of training. (A tensor's version would not do: who writes through `.data` leaves it unchanged.)
    """
    return _factors_of(tuple(conv.flatten().tolist()), tuple(conv.shape), conv.dtype)


@functools.lru_cache(maxsize=256)
def _factors_of(
    numbers: tuple[float, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    theta = torch.tensor(numbers, dtype=torch.float64).reshape(shape).flip(1)
    u, sizes, v = torch.linalg.svd(theta, full_matrices=False)
    # The decomposition itself errs by a few units of fp64.
    least = max(torch.finfo(dtype).eps, 16 * torch.finfo(torch.float64).eps)
    rank = max(1, int((sizes > least * sizes[:, :1]).sum(1).max()))
    if rank > _RANK:
        return None
    left = (u * sizes[:, None])[..., :rank].mT
    return left.to(dtype), v[:, :rank].to(dtype)


def flash_attention(
    wide: LowRank, v: Float[Tensor, "B H Tk Dv"], sight: Sight
) -> Float[Tensor, "B H Tq Dv"] | None:
    """softmax(Conv(Mask_0(S))) V in the precision of the sums, without a tile in memory.

    Where the causal edge does not reach, the logits are those of ordinary attention, and keys at
    least a band's width back are a causal map again, which torch's flash kernel for CPUs computes.
    Its output and the few logits of the band are two shares of one softmax, each weighted by what
    it holds of the whole sum.

    `None` where torch has no such kernel: on other devices, for heads whose keys and values differ
    in width, and where visibility is more than causal order over as many queries as keys, or none.
    """
    (queries, width), keys, band = wide.q.shape[2:], wide.k.shape[2], wide.band.width
    plain = sight.segments is None and sight.window is None
    plain = plain and (queries == keys or not sight.causal)
    if not plain or v.device.type != "cpu" or width != v.shape[3] or band >= keys:
        return None
    back = keys - band
    q, scale = with_positive_scale(wide.q[:, :, band:], wide.scale)
    far, far_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, wide.k[:, :, :back], v[:, :, :back], 0.0, sight.causal, scale=scale
    )  # and the logarithm of the sum of exponentials
    if band == 0:
        return widen(far).contiguous()
    far_sum = F.pad(widen(far_sum), (band, 0), value=float("-inf"))[..., None]  # b h i 1
    token = torch.arange(band, device=v.device)
    near = wide.band_logits.clone()
    near[:, :, :band].masked_fill_(token > token[:, None], float("-inf"))  # before the first key
    total = torch.logaddexp(near.logsumexp(-1, keepdim=True), far_sum)
    out = near_values((near - total).exp(), v)
    out[:, :, band:] += widen(far) * (far_sum - total)[:, :, band:].exp()
    return out


def identity_attention(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    sight: Sight,
    scale: float,
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None,
    two_sided: bool = False,
) -> Float[Tensor, "B H Tq Dv"] | None:
    """What torch's own kernel computes; `None` where a parameter is not the identity any more.

    So a freshly converted model gives the very logits that it gave before. `None` too where the
    visibility needs a mask, and anywhere but on a CPU: there this look would stall the stream.
    """
    window = sight.window is not None and sight.window < k.shape[2]
    apart = (sight.segments, sight.mutual, sight.places)
    if q.device.type != "cpu" or window or any(x is not None for x in apart):
        return None
    if v.shape[3] != q.shape[3]:  # torch would take its dense path
        return None
    conv, post_conv, mix, post_mix = parameters
    if not all(x is None or _is_identity_kernel(x, two_sided) for x in (conv, post_conv)):
        return None
    if not all(x is None or bool((x == torch.eye(x.shape[1])).all()) for x in (mix, post_mix)):
        return None
    out = standard_attention(q, k, v, causal=sight.causal, scale=scale, bias=bias)
    return None if out is None else out.contiguous()


def _is_identity_kernel(kernel: Float[Tensor, "H cq ck"], two_sided: bool) -> bool:
    rows, columns = kernel.shape[1:]
    identity = torch.zeros(rows, columns)
    identity[rows // 2 if two_sided else -1, columns // 2] = 1
    return bool((kernel == identity).all())
