"""Differential attention, second version: two queries per head share its key and value."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.layer import NO_INPUTS, LayerInputs, LayerOutput, Maps, check_inputs
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility


@dataclass(frozen=True)
class DifferentialV2:
    """The second version: two queries per head share its key and value, and lambda is per token.

    ```text
    out = softmax(q1 k) v - sigmoid(x w) softmax(q2 k) v
    ```

    A model keeps its projections: its queries are the first of each pair, and the layer projects
    the second. So there are H D E + H E more parameters than in the model (H heads of D, input of
    E channels). No head norm; a family's own norm of queries is of the first alone. *Not* the
    identity at first: a baseline to train from scratch. A family's position bias and sinks, which
    the publication has not, are those of both queries.

    Source: Ye et al., "Differential Transformer V2" (January 2026), and the authors' code beside
    it. How they start the projections is not said; here the second queries start as from a normal
    distribution with std E ** -0.5, and w at zero, so every lambda at one half.
    """

    def build(self, shape: HeadShape) -> "DifferentialV2Attention":
        """The layer for one attention module."""
        return DifferentialV2Attention(shape)


class DifferentialV2Attention(StandardAttention):
    """The second queries and the lambdas of one layer; SDPA of twice as many query heads."""

    any_heads = False
    needs = frozenset({"input", "rotation"})

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.roles = frozenset({"decoder"})
        self.query = WideLinear(shape.hidden, shape.heads * shape.dim, bias=False)
        self.lam = WideLinear(shape.hidden, shape.heads, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Second queries at random, every lambda at one half."""
        nn.init.normal_(self.query.weight, std=self.query.in_features**-0.5)
        self.lam.weight.zero_()

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
        """Output of each head's first query, less lambda times that of its second."""
        options = {"visibility": visibility, "scale": scale, "inputs": _of_pairs(inputs)}
        both = super().forward(self._pairs(q, inputs), k, v, **options).output
        lam = self.lambdas(inputs, q.shape[2]).to(both.dtype)
        return LayerOutput(both[:, 0::2] - lam * both[:, 1::2])

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The difference of the two maps, per head; entries may be negative."""
        options = {"visibility": visibility, "scale": scale, "inputs": _of_pairs(inputs)}
        both = super().maps(self._pairs(q, inputs), k, **options).weights
        lam = self.lambdas(inputs, q.shape[2]).to(both.dtype)
        return Maps(both[:, 0::2] - lam * both[:, 1::2])

    def _pairs(
        self, q: Float[Tensor, "B H Tq D"], inputs: LayerInputs
    ) -> Float[Tensor, "B heads Tq D"]:
        """The model's queries, each with a second one beside it, rotated to its position."""
        check_inputs(self, inputs)
        second = self.query(inputs.input[:, -q.shape[2] :]).to(q.dtype)
        second = second.unflatten(2, (q.shape[1], -1)).transpose(1, 2)
        if inputs.rotation is not None:
            second = inputs.rotation(second, inputs.positions[:, -q.shape[2] :])
        return torch.stack([q, second], dim=2).flatten(1, 2)

    def lambdas(self, inputs: LayerInputs, queries: int) -> Float[Tensor, "B H Tq 1"]:
        """Of the last queries, between zero and one, per head."""
        return self.lam(inputs.input[:, -queries:]).sigmoid().transpose(1, 2)[..., None]


def _of_pairs(inputs: LayerInputs) -> LayerInputs:
    """Repeat the family's terms of a head for both of its queries: position bias and sink."""
    bias, sinks = inputs.bias, inputs.sinks
    if bias is not None and bias.shape[1] > 1:
        bias = bias.repeat_interleave(2, dim=1)
    return inputs._replace(bias=bias, sinks=None if sinks is None else sinks.repeat_interleave(2))
