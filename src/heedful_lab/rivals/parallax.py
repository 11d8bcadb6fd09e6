"""Parallax: standard attention, and how it would change if the query moved a little."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.nn.layer import (
    NO_INPUTS,
    LayerInputs,
    LayerOutput,
    Maps,
    check_inputs,
)
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility
from heedful.ops.common.few import by_keys, few_outputs, few_scores
from heedful.ops.common.standard import masked_softmax
from heedful.ops.visibility import see_placed

_ROWS = 64  # query rows whose maps are in memory at once


@dataclass(frozen=True)
class Parallax:
    r"""Standard attention and a first-order correction of it along a second query.

    $$ O\,(1 + E_p[s']) - E_p[s' v], \qquad p = \mathrm{softmax}(s\, q k^\top), \quad
       s' = r k^\top, \quad r = x W_r $$

    r is rotated as the query is, and s' is not scaled. W_r starts at zero, so that a converted
    model is unchanged.

    Source: Zuo et al., "Parallax: Parameterized Local Linear Attention for Language Modeling",
        arXiv 2605.29157, as the authors' code in flash-linear-attention has it.
    """

    def build(self, shape: HeadShape) -> "ParallaxAttention":
        """The layer for one attention module."""
        return ParallaxAttention(self, shape)


class ParallaxAttention(StandardAttention):
    """SDPA, and the correction by blocks of rows, which a backward pass computes again."""

    any_heads = False
    takes = frozenset({"bias", "softcap", "sinks"})
    needs = frozenset({"input", "rotation"})

    def __init__(self, config: Parallax, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config, self.roles = config, frozenset({"decoder"})
        self.second = WideLinear(shape.hidden, shape.heads * shape.dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero."""
        self.second.weight.zero_()

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
        """Softmax attention, less the covariance of s' and the values."""
        result = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
        r, rows = self._second_queries(q, inputs), _RowBlocks(visibility, q, k, scale, inputs)
        less = _Covariance.apply(rows, q, r, k, v, inputs.bias, inputs.sinks)
        return result._replace(output=(result.output - less).to(q.dtype))

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """Weights of the values: p (1 + E_p[s'] - s'), below zero in places."""
        rows, block = _RowBlocks(visibility, q, k, scale, inputs), slice(0, q.shape[2])
        k = k[:, :, : rows.keys(block)]
        r, terms = self._second_queries(q, inputs), (inputs.bias, inputs.sinks)
        x = rows.maps(block, q, r, k, *terms)
        return Maps(x.weights * (1 + x.mean - x.other))

    def _second_queries(
        self, q: Float[Tensor, "B H Tq D"], inputs: LayerInputs
    ) -> Float[Tensor, "B H Tq D"]:
        """r of the newest tokens, rotated to their positions."""
        check_inputs(self, inputs)
        r = self.second(inputs.input[:, -q.shape[2] :]).unflatten(2, (q.shape[1], -1))
        r = r.transpose(1, 2).to(q.dtype)
        if inputs.rotation is None:
            return r
        return inputs.rotation(r, inputs.positions[:, -q.shape[2] :])


class _RowBlocks:
    """Visible keys of blocks of query rows, and their weights."""

    def __init__(
        self,
        visibility: Visibility | None,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        scale: float | None,
        inputs: LayerInputs,
    ) -> None:
        self.visibility = Visibility() if visibility is None else visibility
        self.scale = q.shape[3] ** -0.5 if scale is None else scale
        self.queries, self.total, self.softcap = q.shape[2], k.shape[2], inputs.softcap
        self.places = self.visibility.places(self.queries, self.total, q.device)

    def blocks(self) -> list[slice]:
        """All rows, in blocks."""
        starts = range(0, self.queries, _ROWS)
        return [slice(start, min(start + _ROWS, self.queries)) for start in starts]

    def keys(self, block: slice) -> int:
        """Number of the first keys that the block may see."""
        view = self.visibility
        ordered = view.causal and view.mutual is None and view.in_place
        return self.total - self.queries + block.stop if ordered else self.total

    def visible(self, block: slice, device: torch.device) -> Bool[Tensor, "#B R K"]:
        """Keys visible to each row of the block."""
        if self.places is not None:
            rows, view = range(block.start, block.stop), self.visibility
            return see_placed(self.places, self.queries, view.causal, view.window, rows)
        token = torch.arange(self.total, device=device)
        rows = token[self.total - self.queries :][block]
        return self.visibility.at(rows, token[: self.keys(block)])

    def maps(
        self,
        block: slice,
        q: Float[Tensor, "B H Tq D"],
        r: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk K D"],
        bias: Float[Tensor, "#B #H Tq Tk"] | None,
        sinks: Float[Tensor, " H"] | None,
    ) -> "_Block":
        """The maps of one block of rows, with the keys that it may see."""
        logits, slope = few_scores(q[:, :, block], k, self.scale), self.scale
        if self.softcap is not None:
            share = torch.tanh(logits / self.softcap)
            logits, slope = self.softcap * share, self.scale * (1 - share.square())
        if bias is not None:
            logits = logits + bias[:, :, block, : k.shape[2]]
        sinks = None if sinks is None else sinks[:, None, None]
        weights = masked_softmax(logits, self.visible(block, k.device)[:, None], sinks)
        other = few_scores(r[:, :, block], k, 1.0)
        return _Block(weights, other, (weights * other).sum(-1, keepdim=True), slope)


class _Block(NamedTuple):
    """Maps of one block of rows.

    weights: p.
    other: s'.
    mean: of s' under p.
    slope: of the logits that enter the softmax, by q k.
    """

    weights: Float[Tensor, "B H R K"]
    other: Float[Tensor, "B H R K"]
    mean: Float[Tensor, "B H R 1"]
    slope: Float[Tensor, "B H R K"] | float


class _Covariance(torch.autograd.Function):
    """E_p[s' v] - E_p[s'] O, in fp32 at least; the maps of one block of rows at a time."""

    @staticmethod
    def forward(ctx, rows: _RowBlocks, q, r, k, v, bias, sinks) -> Float[Tensor, "B H Tq D"]:
        ctx.rows = rows
        ctx.save_for_backward(q, r, k, v, bias, sinks)
        parts = []
        for block in rows.blocks():
            keys = rows.keys(block)
            x = rows.maps(block, q, r, k[:, :, :keys], bias, sinks)
            parts.append(few_outputs(x.weights * (x.other - x.mean), v[:, :, :keys]))
        return torch.cat(parts, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Float[Tensor, "B H Tq D"]) -> tuple[Tensor | None, ...]:
        rows, (q, r, k, v, bias, sinks) = ctx.rows, ctx.saved_tensors
        d_q, d_r = [], []
        d_k, d_v = (torch.zeros_like(x, dtype=d_out.dtype) for x in (k, v))
        d_bias, d_sinks = (None if x is None else torch.zeros_like(x) for x in (bias, sinks))
        for block in rows.blocks():
            keys = rows.keys(block)
            near, own = k[:, :, :keys], d_out[:, :, block]
            x = rows.maps(block, q, r, near, bias, sinks)
            centred = x.other - x.mean
            d_map = few_scores(own, v[:, :, :keys].to(own.dtype), 1.0)
            d_mean = -(d_map * x.weights).sum(-1, keepdim=True)
            d_other = x.weights * (d_map + d_mean)
            d_weights = d_map * centred + d_mean * x.other
            mean = (x.weights * d_weights).sum(-1, keepdim=True)
            d_logits = x.weights * (d_weights - mean)
            d_scores = d_logits * x.slope
            d_q.append(few_outputs(d_scores, near))
            d_r.append(few_outputs(d_other, near))
            d_k[:, :, :keys] += by_keys(d_scores, q[:, :, block], k.shape[1])
            d_k[:, :, :keys] += by_keys(d_other, r[:, :, block], k.shape[1])
            d_v[:, :, :keys] += by_keys(x.weights * centred, own, k.shape[1])
            if bias is not None:
                shared = [dim for dim in (0, 1) if bias.shape[dim] == 1]
                part = d_logits.sum(shared, keepdim=True) if shared else d_logits
                d_bias[:, :, block, :keys] += part.to(bias.dtype)
            if sinks is not None:
                sink_weight = 1 - x.weights.sum(-1, keepdim=True)
                d_sinks -= (sink_weight * mean).sum((0, 2, 3)).to(sinks.dtype)
        queries = [torch.cat(parts, dim=2).to(q.dtype) for parts in (d_q, d_r)]
        return None, *queries, d_k.to(k.dtype), d_v.to(v.dtype), d_bias, d_sinks
