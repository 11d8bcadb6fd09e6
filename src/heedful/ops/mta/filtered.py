"""Multi-token attention of low rank to keys that are filtered already, as in cached decoding.

A filtered key holds what its neighbours give it, so that it stays right when they leave. It is
final once as many tokens have come as it reads ahead; before that, and wherever the causal edge
counts, the logits are made of the newest queries and keys as they are.
"""

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.ops.common.few import few_outputs, few_scores, few_weights, masked_from
from heedful.ops.common.precision import widen
from heedful.ops.common.standard import masked_softmax
from heedful.ops.common.terms import Terms
from heedful.ops.common.tiles import row_blocks
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.flash import HeadGroups
from heedful.ops.mta.low_rank import BLOCK, Band, LowRank, banded, query_filter
from heedful.ops.mta.reference import mix_heads

_ROWS = 64  # queries whose maps are in memory at once


class Newest(NamedTuple):
    """The newest tokens of a row as they are, the new ones last.

    queries: `[B, H, r, D]`, as many before the new ones as kernels look back, if there are.
    keys: `[B, Hk, m, D]`, as many before the new ones as their band reads; not fewer than queries.
    segments: of the same tokens as the keys, `[B or 1, m]`; `None` where all are of one document.
    plain: all keys are there as they are, in order, and are not filtered.
    """

    queries: Float[Tensor, "B H r D"]
    keys: Float[Tensor, "B Hk m D"]
    segments: Int[Tensor, "#B m"] | None = None
    plain: bool = False

    def before(self, later: int) -> "Newest":
        """Those that are followed by `later` ones."""
        queries, keys = (x[:, :, : x.shape[2] - later] for x in self[:2])
        segments = self.segments
        segments = None if segments is None else segments[:, : keys.shape[2]]
        return Newest(queries, keys, segments, self.plain)


def filtered_attention(
    newest: Newest,
    k: Float[Tensor, "B Hw Tk W"],
    v: Float[Tensor, "B Hk Tk Dv"],
    parameters: Parameters,
    terms: Terms,
    *,
    queries: int,
    across: int | None,
) -> Float[Tensor, "B H Tq Dv"]:
    """The operator of `multi_token_attention` for the last `queries` tokens.

    Arguments:
        newest: these tokens and some before them.
        k: filtered keys, of which the last are those of the newest tokens, in order; or all as they
            are, if `newest.plain`.
        v: values of the same tokens.
        parameters: kernels of low rank, and the mixing before and after the softmax.
        terms: as of `multi_token_attention`; of these, sinks.
        across: over how many key heads groups of heads are taken; `None` for consecutive heads.
    """
    post_mix, groups = parameters.post_mix, None
    if post_mix is not None:
        heads = newest.queries.shape[1]
        groups = HeadGroups.of(heads, v.shape[1], post_mix, across is not None)
    parts = []
    for start, stop in row_blocks(queries, _ROWS, ascending=True):
        later = queries - stop
        keys = k.shape[2] - later
        own = terms
        if later:
            own = terms._replace(visibility=terms.visibility.part(0, keys))
        maps = _softmax(newest.before(later), k[:, :, :keys], stop - start, parameters, own, across)
        values = v[:, :, :keys]
        if groups is None:
            parts.append(few_outputs(maps, values))
        else:
            parts.append(groups.mixed_few(maps, values, post_mix))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.to(newest.queries.dtype)


def filtered_attention_map(
    newest: Newest,
    k: Float[Tensor, "B Hw Tk W"],
    parameters: Parameters,
    terms: Terms,
    *,
    queries: int,
    across: int | None,
) -> Float[Tensor, "B H Tq Tk"]:
    """The map that multiplies the values in `filtered_attention`, whole."""
    maps = _softmax(newest, k, queries, parameters, terms, across)
    return maps if parameters.post_mix is None else mix_heads(maps, parameters.post_mix, across)


def _softmax(
    newest: Newest, k: Tensor, queries: int, parameters: Parameters, terms: Terms,
    across: int | None,
) -> Float[Tensor, "B H Tq Tk"]:  # fmt: skip
    """The map before the mixing after it, in fp32 at least."""
    conv, mix = parameters.conv, parameters.mix
    visibility, scale, sinks = terms.visibility, terms.scale, terms.sinks
    if queries == 1:
        q, near = _newest_row(newest, conv, visibility.causal, scale)
    else:
        q, near = _newest_rows(newest, queries, conv, visibility.causal, scale)
    if newest.plain:
        logits = _convolved(q, k, conv, visibility.segments(), scale)
    else:
        logits = few_scores(q, k, scale)
    if near is not None:
        width = min(near.shape[3], k.shape[2])
        if queries == 1:
            logits[..., k.shape[2] - width :] = near[..., :width].flip(-1)
        else:
            _replace_near(logits, near)
    if mix is not None:
        logits = mix_heads(logits, mix, across)
    if logits.requires_grad:  # the other works in place
        visible = visibility.dense(queries, k.shape[2], k.device)[:, None]
        return masked_softmax(logits, visible, None if sinks is None else sinks[:, None, None])
    return few_weights(logits, masked_from(visibility, queries, k.shape[2], k.device), sinks)


def _convolved(
    q: Float[Tensor, "B H Tq RD"], k: Float[Tensor, "B Hk Tk D"], conv: LowRank,
    segments: Int[Tensor, "#B Tk"] | None, scale: float,
) -> Float[Tensor, "B H Tq Tk"]:  # fmt: skip
    """Scores with plain keys, filtered along these: half the bytes of filtered keys of rank two."""
    (batch, heads, queries, _), (_, shared, keys, dim) = q.shape, k.shape
    ranks, columns = conv.w.shape[1:]
    # The keys come first: a product of few rows with many keys is slow on a CPU.
    k, rows = (x if x.is_cuda else widen(x) for x in (k, q.reshape(batch, shared, -1, dim)))
    scores = widen(k @ rows.mT) * scale  # b h k (g t r)
    reach, around = BLOCK + columns - 1, (columns - 1 - conv.ahead, conv.ahead + -keys % BLOCK)
    windows = pad(scores, (0, 0, *around)).unfold(2, reach, BLOCK)  # b h n (g t r) y
    windows = windows.unflatten(3, (-1, queries, ranks)).movedim(2, 3)  # b h g n t r y
    w = banded(conv.w.to(scores.dtype)[:, :, None].expand(-1, -1, BLOCK, -1)).transpose(1, 2)
    w = w.unflatten(0, (shared, -1))  # h g x r y
    if segments is None:
        logits = windows.flatten(3, 4).flatten(4) @ w.flatten(3).mT  # b h g (n t) x
        logits = logits.unflatten(3, (-1, queries))
    else:
        number = pad(segments, around, value=-2).unfold(1, reach, BLOCK)  # b n y
        own = number[:, :, around[0] : around[0] + BLOCK, None]
        same = own == number[:, :, None]  # b n x y
        w = w[:, :, None] * same[:, None, None, :, :, None]  # b h g n x r y
        logits = windows.flatten(5) @ w.flatten(5).mT  # b h g n t x
    logits = logits.movedim(4, 3).flatten(4).reshape(batch, heads, queries, -1)
    return logits[..., :keys]


def _newest_row(
    newest: Newest, conv: LowRank, causal: bool, scale: float
) -> tuple[Float[Tensor, "B H 1 W"], Float[Tensor, "B H 1 m"] | None]:
    """The newest token's wide query, and its logits with the nearest keys, in few operations."""
    rows, keys = newest.queries[:, :, -conv.u.shape[2] :], newest.keys
    width = conv.band(causal)
    keys = keys[:, :, -(width + conv.ahead) :] if width else keys
    if newest.segments is not None:
        same = (newest.segments == newest.segments[:, -1:])[:, None, :, None]
        rows, keys = rows * same[:, :, -rows.shape[2] :], keys * same[:, :, -keys.shape[2] :]
    u = conv.u[..., -rows.shape[2] :].to(rows.dtype)
    q = (u @ rows).flatten(2)[:, :, None]
    if not width:
        return q, None
    scores = few_scores(rows, keys, scale).flatten(2)[:, :, None]
    places = _row_places(*conv.u.shape[2:], conv.w.shape[2], *rows.shape[2:3], keys.shape[2])
    row, column = (x.to(rows.device) for x in places)
    taps = pad(conv.kernel().to(scores.dtype), (0, 1))[:, row, column]
    return q, scores @ taps


@functools.lru_cache(maxsize=64)
def _row_places(
    rows: int, columns: int, queries: int, keys: int
) -> tuple[Int[Tensor, "qk m"], Int[Tensor, "qk m"]]:
    """Row and column of the kernel by which a score enters the newest query's logit at distance d.

    Of the last `queries` and `keys` tokens; scores of what is later than its query do not enter.
    """
    width = rows - 1 + columns // 2
    back = torch.arange(queries - 1, -1, -1)[:, None, None]  # of the query from the newest one
    far = torch.arange(keys - 1, -1, -1)[:, None]  # of the key
    column = torch.arange(width) - far + columns // 2
    outside = (column < 0) | (column >= columns) | (far < back)
    column = column.expand(queries, -1, -1).masked_fill(outside, columns)  # a column of zeros
    row = (rows - 1 - back).expand_as(column)
    return row.flatten(0, 1), column.flatten(0, 1)


def _newest_rows(
    newest: Newest, queries: int, conv: LowRank, causal: bool, scale: float
) -> tuple[Float[Tensor, "B H Tq W"], Float[Tensor, "B H Tq m"] | None]:
    """The same for several."""
    rows, keys, segments, _ = newest
    own = None if segments is None else segments[:, -rows.shape[2] :]
    q = query_filter(conv, own).of(rows)[:, :, -queries:]
    width = conv.band(causal)
    if not width:
        return q, None
    return q, Band(conv, width, scale, segments).logits(rows, keys)[:, :, -queries:]


def _replace_near(logits: Float[Tensor, "B H Tq Tk"], near: Float[Tensor, "B H Tq m"]) -> None:
    """Write the logits of the nearest keys over the others', in place."""
    queries, keys = logits.shape[2:]
    row = torch.arange(keys - queries, keys, device=logits.device)[:, None]
    at = row - torch.arange(near.shape[3], device=logits.device)
    # Before the first key there is nothing to replace: the entry of distance 0 is written again.
    inside, at = at >= 0, at.where(at >= 0, row)
    logits.scatter_(3, at.expand_as(near), near.where(inside, near[..., :1]))
