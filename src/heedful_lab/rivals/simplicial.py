"""2-simplicial attention: a query attends to pairs of tokens, one from each of two windows."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from heedful.checks import UserError, check_choice, check_whole
from heedful.nn.layer import (
    NO_INPUTS,
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
    check_defaults,
    check_inputs,
)
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility
from heedful.ops.common.few import by_keys, few_outputs, few_scores
from heedful.ops.common.precision import cast_inputs, widen
from heedful.ops.common.standard import masked_softmax
from heedful.ops.visibility import see_at

_PAIRS = 256  # pairs of a query and a second key whose maps are in memory at once


@dataclass(frozen=True)
class Simplicial:
    r"""Attention to pairs of tokens: a key j of one window, a second key l of a smaller one.

    $$ A_{ijl} = s \sum_d q_{id}\, k_{jd}\, k'_{ld}, \qquad P = \mathrm{softmax}_{jl}(A), \qquad
       O_i = \sum_{jl} P_{ijl}\, (v_j \odot v'_l) $$

    with $i - w_1 < j \le i$ and $i - w_2 < l \le i$. k' and v' are made of the layer's input, with
    as many heads as k and v.

    The published kernels have this form, without rotation. The paper says that rotating q, k and k'
    would not make it a function of distances, and proposes sums of determinants, which are left out
    here. `convert` keeps the family's rotation of q and k, and rotates no k'.

    Arguments:
        window: from how many tokens, the query's own included, j is taken. A narrower window of the
            model's stays, for l too. One longer than a sequence is the whole sequence.
        second_window: from how many tokens l is taken.
        every: one layer in this many is simplicial, `every - 1`, `2 * every - 1` and so on; the
            others are standard ones.
        start: `"random"` draws the projections of k' and v'; `"identity"` adds one to both and
            starts the projections at zero, so that the layer is at first standard attention with
            the first window, up to rounding.

    Source: Roy et al., "Fast and Simplex: 2-Simplicial Attention in Triton", arXiv 2507.02754,
        equations 5 to 7 and section 6, whose windows and layers these are, and its kernels in
        FBGEMM, which add 1 / D to k' and 1 to v' by default. The paper does not say what its
        models add, whether they rotate, how projections start, or which of four layers it is; its
        64 query heads share one key head, which is left to the model here.
    """

    window: int = 512
    second_window: int = 32
    every: int = 4
    start: Literal["random", "identity"] = "random"

    def __post_init__(self) -> None:
        for name in ("window", "second_window", "every"):
            check_whole(name, getattr(self, name), 1)
        check_choice("start", self.start, ("random", "identity"))

    def build(self, shape: HeadShape) -> "SimplicialAttention | StandardAttention":
        """The layer for one attention module."""
        if shape.layer % self.every == self.every - 1:
            return SimplicialAttention(self, shape)
        layer = StandardAttention(Standard(), shape)
        layer.roles = SimplicialAttention.roles
        return layer


class SimplicialAttention(Layer):
    """Second keys and values of one layer; pairs by blocks of rows, computed again in backward.

    A query and a second key make one query of an ordinary attention, q times k': it adds up to the
    softmax over pairs, and what it reads is multiplied by v'.
    """

    needs = frozenset({"input"})
    caches = False

    def __init__(self, config: Simplicial, shape: HeadShape) -> None:
        super().__init__(shape)
        self.config = config
        width = shape.key_heads * shape.dim
        self.second_key = WideLinear(shape.hidden, width, bias=False)
        self.second_value = WideLinear(shape.hidden, width, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with std hidden^-1/2, or zero beside an offset of one."""
        for projection in (self.second_key, self.second_value):
            if self.config.start == "identity":
                projection.weight.zero_()
            else:
                nn.init.normal_(projection.weight, std=projection.in_features**-0.5)

    def forward(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        inputs: LayerInputs = NO_INPUTS,
    ) -> LayerOutput:
        """Attention to pairs, in fp32 at least between the products; padded queries get zeros."""
        _check_terms(inputs)
        q, k, v = cast_inputs(q, k, v)
        second_k, second_v = self._second(k, inputs)
        blocks = _PairBlocks(self.config, visibility, q, k, scale)
        return LayerOutput(_PairAttention.apply(blocks, q, k, v, second_k, second_v).to(q.dtype))

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """Weight of all pairs of a key: the factor of its value if v' is one."""
        _check_terms(inputs)
        second_k, _ = self._second(k, inputs)
        blocks, parts = _PairBlocks(self.config, visibility, q, k, scale), []
        for block in blocks.rows():
            _, weights = blocks.maps(block, q, k, second_k)
            keys = blocks.tokens(block, blocks.first)
            parts.append(pad(weights.sum(3), (keys.start, k.shape[2] - keys.stop)))
        return Maps(torch.cat(parts, dim=2))

    def _second(self, k: Float[Tensor, "B Hk Tk D"], inputs: LayerInputs) -> tuple[Tensor, ...]:
        """k' and v' of every key, in the keys' precision."""
        check_inputs(self, inputs)
        if inputs.input.shape[1] != k.shape[2]:
            raise UserError(
                f"inputs.input must hold all {k.shape[2]} tokens that k has, each of which has a "
                f"second key, got {inputs.input.shape[1]}"
            )
        offset = 1.0 if self.config.start == "identity" else 0.0
        return tuple(
            (x(inputs.input).unflatten(2, (k.shape[1], -1)).transpose(1, 2) + offset).to(k.dtype)
            for x in (self.second_key, self.second_value)
        )


def _check_terms(inputs: LayerInputs) -> None:
    """Raise for what a family does to the logits of single keys."""
    for name in ("bias", "softcap", "sinks"):
        if getattr(inputs, name) is not None:
            raise UserError(
                f"{name} must be None for simplicial attention, whose logits are of pairs of "
                "keys; take another mechanism"
            )
    if inputs.dropout:
        raise UserError(
            f"dropout must be 0 for simplicial attention, which drops nothing, got "
            f"{inputs.dropout}; take another mechanism"
        )


class _PairBlocks:
    """Visible pairs of blocks of query rows, and their weights."""

    def __init__(
        self,
        config: Simplicial,
        visibility: Visibility | None,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        scale: float | None,
    ) -> None:
        view = Visibility() if visibility is None else visibility
        reason = (
            "windows of simplicial attention count back along the sequence; use it in causal "
            "self-attention, without images and without eviction"
        )
        check_defaults(view, ("causal", "mutual", "positions", "queries"), reason)
        self.queries, self.total = q.shape[2], k.shape[2]
        view.check(q.shape[0], self.queries, self.total)
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        self.segments = view.segments()
        most = self.total if view.window is None else min(view.window, self.total)
        self.first, self.second = min(config.window, most), min(config.second_window, most)

    def rows(self) -> list[slice]:
        """All query rows, in blocks."""
        size = max(1, _PAIRS // self.second)
        starts = range(0, self.queries, size)
        return [slice(start, min(start + size, self.queries)) for start in starts]

    def tokens(self, block: slice, window: int) -> slice:
        """The keys that a window of this size has for the block."""
        before = self.total - self.queries
        return slice(max(0, before + block.start - window + 1), before + block.stop)

    def spread(self, block: slice, x: Float[Tensor, "*lead Tk D"]) -> Float[Tensor, "*lead R w D"]:
        """The rows of the second window of each query, oldest first; zeros before the sequence."""
        tokens, size = self.tokens(block, self.second), block.stop - block.start
        gap = size + self.second - 1 - (tokens.stop - tokens.start)
        rows = pad(x[..., tokens, :], (0, 0, gap, 0))
        return rows.unfold(-2, self.second, 1).mT

    def gather(
        self,
        block: slice,
        gradient: Float[Tensor, "*lead R w D"],
        total: Float[Tensor, "*lead T D"],
    ) -> None:
        """The reverse of `spread`: add the gradient of every window to its tokens' in `total`."""
        tokens, (size, width) = self.tokens(block, self.second), gradient.shape[-3:-1]
        # With one column less than there are, every row stands one further right than the last.
        wide = pad(gradient, (0, 0, 0, size)).flatten(-3, -2)
        shifted = wide[..., : size * (size + width - 1), :].unflatten(-2, (size, -1)).sum(-3)
        total[..., tokens, :] += shifted[..., tokens.start - tokens.stop :, :]

    def visible(self, block: slice, device: torch.device) -> Bool[Tensor, "#B R w K"]:
        """Pairs of a second key and a key visible to each row of the block."""
        token, before = torch.arange(self.total, device=device), self.total - self.queries
        rows = token[before + block.start : before + block.stop]
        first, second = (
            see_at(self.segments, True, window, rows, token[self.tokens(block, window)])
            for window in (self.first, self.second)
        )
        size = len(rows)
        second = pad(second, (size + self.second - 1 - second.shape[2], 0))
        place = torch.arange(size, device=device)[:, None]
        place = place + torch.arange(self.second, device=device)
        near = second.gather(2, place.expand(len(second), -1, -1))
        return near[..., None] & first[:, :, None]

    def maps(
        self,
        block: slice,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        second_k: Float[Tensor, "B Hk Tk D"],
    ) -> tuple[Float[Tensor, "B H R w D"], Float[Tensor, "B H R w K"]]:
        """Queries times second keys, and the weights of all pairs that the block may see."""
        pairs = _times(q[:, :, block, None], self.spread(block, second_k))
        pairs = pairs.to(q.dtype)  # as queries have it, so that products may be in half precision
        near = k[:, :, self.tokens(block, self.first)]
        logits = few_scores(pairs.flatten(2, 3), near, self.scale)
        logits = logits.unflatten(2, pairs.shape[2:4])
        visible = self.visible(block, k.device)[:, None]
        weights = masked_softmax(logits.flatten(3), visible.flatten(3), None)
        return pairs, weights.view_as(logits)


class _PairAttention(torch.autograd.Function):
    """The output in fp32 at least; the maps of one block of rows at a time."""

    @staticmethod
    def forward(ctx, blocks: _PairBlocks, q, k, v, second_k, second_v) -> Float[Tensor, "B H Tq D"]:
        ctx.blocks = blocks
        ctx.save_for_backward(q, k, v, second_k, second_v)
        parts = []
        for block in blocks.rows():
            _, weights = blocks.maps(block, q, k, second_k)
            near = v[:, :, blocks.tokens(block, blocks.first)]
            values = few_outputs(weights.flatten(2, 3), near).unflatten(2, weights.shape[2:4])
            parts.append(_times(values, blocks.spread(block, second_v)).sum(3))
        return torch.cat(parts, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Float[Tensor, "B H Tq D"]) -> tuple[Tensor | None, ...]:
        blocks, (q, k, v, second_k, second_v) = ctx.blocks, ctx.saved_tensors
        d_q, heads = [], k.shape[1]
        sums = [torch.zeros_like(x, dtype=d_out.dtype) for x in (k, v, second_k, second_v)]
        d_k, d_v, d_second_k, d_second_v = sums
        for block in blocks.rows():
            tokens, rows = blocks.tokens(block, blocks.first), d_out[:, :, block, None]
            near_k, near_v = k[:, :, tokens], v[:, :, tokens]
            pairs, weights = blocks.maps(block, q, k, second_k)
            size = weights.shape[2:4]
            of_k, of_v = (blocks.spread(block, x) for x in (second_k, second_v))
            values = few_outputs(weights.flatten(2, 3), near_v).unflatten(2, size)
            d_read = _times(rows, of_v)
            d_map = few_scores(d_read.flatten(2, 3), near_v.to(d_read.dtype), 1.0)
            mean = (d_read * values).sum((3, 4), keepdim=True)
            d_scores = weights * (d_map.unflatten(2, size) - mean) * blocks.scale
            d_scores = d_scores.flatten(2, 3)
            d_pairs = few_outputs(d_scores, near_k).unflatten(2, size)
            d_q.append(_times(d_pairs, of_k).sum(3))
            d_k[:, :, tokens] += by_keys(d_scores, pairs.flatten(2, 3), heads)
            d_v[:, :, tokens] += by_keys(weights.flatten(2, 3), d_read.flatten(2, 3), heads)
            for x, factor, total in (
                (d_pairs, q[:, :, block, None], d_second_k),
                (values, rows, d_second_v),
            ):
                of_group = (x * factor).unflatten(1, (heads, -1)).sum(2)
                blocks.gather(block, of_group, total)
        of_keys = zip(sums, (k, v, second_k, second_v), strict=True)
        return None, torch.cat(d_q, dim=2).to(q.dtype), *(x.to(y.dtype) for x, y in of_keys)


def _times(
    x: Float[Tensor, "B H R #w D"], of_keys: Float[Tensor, "B Hk R w D"]
) -> Float[Tensor, "B H R w D"]:
    """Vectors of query heads times those of their key heads, by channel, in fp32 at least."""
    grouped = widen(x).unflatten(1, (of_keys.shape[1], -1))
    return (grouped * widen(of_keys)[:, :, None]).flatten(1, 2)
