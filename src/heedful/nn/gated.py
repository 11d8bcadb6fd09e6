"""Gated attention: what a head has read passes a gate that its token opens."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checks import check_choice
from heedful.nn.layer import NO_INPUTS, LayerInputs, LayerOutput, check_inputs
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility


@dataclass(frozen=True)
class Gated:
    r"""Standard attention whose outputs are gated by the layer's input.

    $$ O_h \leftarrow O_h \odot \sigma(x W_h) $$

    Arguments:
        per: a gate for every `"channel"` of every head, or one per `"head"`.
        start: `"published"` starts from a random projection, so near one half; `"identity"` from
            zero with the gate doubled, so that a converted model is unchanged.

    Source: Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708, the gate
        after SDPA.
    """

    per: Literal["channel", "head"] = "channel"
    start: Literal["published", "identity"] = "published"

    def __post_init__(self) -> None:
        check_choice("per", self.per, ("channel", "head"))
        check_choice("start", self.start, ("published", "identity"))

    def build(self, shape: HeadShape) -> "GatedAttention":
        """The layer for one attention module."""
        return GatedAttention(self, shape)


class GatedAttention(StandardAttention):
    """The gate of one layer."""

    any_heads = False
    needs = frozenset({"input"})

    def __init__(self, config: Gated, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config, self.roles = config, frozenset({"decoder", "encoder"})
        outputs = shape.heads * (shape.dim if config.per == "channel" else 1)
        self.gate = WideLinear(shape.hidden, outputs, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with std hidden^-1/2, or zero."""
        if self.config.start == "identity":
            self.gate.weight.zero_()
        else:
            nn.init.normal_(self.gate.weight, std=self.gate.in_features**-0.5)

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
        """Softmax attention, each head's output times its gate."""
        check_inputs(self, inputs)
        result = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
        opening = torch.sigmoid(self.gate(inputs.input[:, -q.shape[2] :]))
        if self.config.start == "identity":
            opening = 2 * opening
        opening = opening.unflatten(2, (q.shape[1], -1)).transpose(1, 2)
        return result._replace(output=(result.output * opening).to(q.dtype))
