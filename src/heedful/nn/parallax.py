"""Parallax: standard attention, and how it would change if the query moved a little."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from heedful.nn.layer import (
    NO_INPUTS,
    LayerInputs,
    LayerOutput,
    Maps,
    StandardForm,
    check_inputs,
)
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility
from heedful.ops.common.few import few_outputs, few_scores
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

    any_shape = False
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

    def standard_form(self) -> StandardForm | None:
        """Standard attention while the second query is zero."""
        return None if bool(self.second.weight.any()) else StandardForm()

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
        r, rows = self._second_queries(q, inputs), _Rows(visibility, q, k, scale, inputs)
        less = _Covariance.apply(rows, q, r, k, v, inputs.bias, inputs.sinks)
        return result._replace(output=(result.output - less).to(q.dtype))

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """What multiplies the values: p (1 + E_p[s'] - s'), below zero in places."""
        rows, block = _Rows(visibility, q, k, scale, inputs), slice(0, q.shape[2])
        k = k[:, :, : rows.keys(block)]
        r, terms = self._second_queries(q, inputs), (inputs.bias, inputs.sinks)
        weights, centred = rows.weights(block, q, r, k, *terms)
        return Maps(weights - weights * centred)

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


class _Rows:
    """What blocks of query rows see, and with which weights."""

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
        """How many of the first keys the block may see."""
        seen = self.visibility
        ordered = seen.causal and seen.mutual is None and seen.in_place
        return self.total - self.queries + block.stop if ordered else self.total

    def visible(self, block: slice, device: torch.device) -> Bool[Tensor, "#B R K"]:
        """Which of these keys each row of the block sees."""
        if self.places is not None:
            seen, rows = self.visibility, range(block.start, block.stop)
            return see_placed(self.places, self.queries, seen.causal, seen.window, rows)
        token = torch.arange(self.total, device=device)
        rows = token[self.total - self.queries :][block]
        return self.visibility.at(rows, token[: self.keys(block)])

    def weights(
        self,
        block: slice,
        q: Float[Tensor, "B H R D"],
        r: Float[Tensor, "B H R D"],
        k: Float[Tensor, "B Hk K D"],
        bias: Float[Tensor, "#B #H Tq Tk"] | None,
        sinks: Float[Tensor, " H"] | None,
    ) -> tuple[Float[Tensor, "B H R K"], Float[Tensor, "B H R K"]]:
        """p, and s' less its mean under p."""
        logits = few_scores(q, k, self.scale)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if bias is not None:
            logits = logits + bias[:, :, block, : k.shape[2]]
        sinks = None if sinks is None else sinks[:, None, None]
        p = masked_softmax(logits, self.visible(block, k.device)[:, None], sinks)
        other = few_scores(r, k, 1.0)
        return p, other - (p * other).sum(-1, keepdim=True)


class _Covariance(torch.autograd.Function):
    """E_p[s' v] - E_p[s'] O, in fp32 at least; the maps of one block of rows at a time."""

    @staticmethod
    def forward(ctx, rows: _Rows, *tensors: Tensor | None) -> Float[Tensor, "B H Tq D"]:
        ctx.rows = rows
        ctx.save_for_backward(*tensors)
        return torch.cat([_of_block(rows, block, *tensors) for block in rows.blocks()], dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, slope: Float[Tensor, "B H Tq D"]) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = [
            x is not None and need
            for x, need in zip(tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        leaves = [
            None if x is None else x.detach().requires_grad_(need)
            for x, need in zip(tensors, wanted, strict=True)
        ]
        for block in ctx.rows.blocks():
            with torch.enable_grad():
                out = _of_block(ctx.rows, block, *leaves)
            out.backward(slope[:, :, block].to(out.dtype))
        return None, *(x.grad if need else None for x, need in zip(leaves, wanted, strict=True))


def _of_block(
    rows: _Rows,
    block: slice,
    q: Float[Tensor, "B H Tq D"],
    r: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk D"],
    bias: Float[Tensor, "#B #H Tq Tk"] | None,
    sinks: Float[Tensor, " H"] | None,
) -> Float[Tensor, "B H R D"]:
    """The covariance of s' and the values in one block of rows."""
    keys = rows.keys(block)
    k, v = k[:, :, :keys], v[:, :, :keys]
    weights, centred = rows.weights(block, q[:, :, block], r[:, :, block], k, bias, sinks)
    return few_outputs(weights * centred, v)
