"""Differential attention as a layer."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.nn.layer import (
    NO_INPUTS,
    TERMS,
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
    Step,
    parameter,
)
from heedful.nn.shape import ROLES, HeadNorm, HeadShape
from heedful.ops import Visibility, differential_attention
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.reference import multi_token_attention_map


@dataclass(frozen=True)
class Differential:
    """The published differential layer: consecutive heads form pairs that share joined values.

    It keeps a model's projections and halves its heads, so it is *not* the identity at
    initialisation: it is a baseline to train from scratch.

    Source: Ye et al., "Differential Transformer", arXiv 2410.05258, section 2.
    """

    def build(self, shape: HeadShape) -> "DifferentialAttention":
        """The layer for one attention module."""
        return DifferentialAttention(shape)


class DifferentialAttention(Layer):
    """Lambda vectors and norm of one differential layer."""

    roles = frozenset(ROLES)
    takes = TERMS

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        for name, count in (("heads", shape.heads), ("key heads", shape.key_heads)):
            if count % 2:
                raise UserError(
                    f"differential attention pairs heads, so the model's {name} must be even, got "
                    f"{count}"
                )
        self.start = shape.depth_factor
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, parameter(shape.dim))
        self.norm = HeadNorm(2 * shape.dim, 1 - self.start)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Lambda vectors from N(0, 0.1), norm weight one."""
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            nn.init.normal_(vector, std=0.1)
        self.norm.reset_parameters()

    @property
    def lam(self) -> Float[Tensor, ""]:
        """exp(q1 k1) - exp(q2 k2) + lambda_init, equation 2."""
        first = (self.lambda_q1 * self.lambda_k1).sum().exp()
        second = (self.lambda_q2 * self.lambda_k2).sum().exp()
        return first - second + self.start

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
        """H / 2 heads of twice the width, in the shape of H heads."""
        joined = torch.cat([v[:, 0::2], v[:, 1::2]], dim=-1)
        out = differential_attention(
            q, k, joined, lam=self.lam, bias=inputs.bias, softcap=inputs.softcap,
            sinks=inputs.sinks, dropout_p=inputs.dropout, visibility=visibility, scale=scale,
            impl=self.impl,
        )  # fmt: skip
        out = self.norm(out)
        return LayerOutput(out.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2))

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The difference of the two maps, per pair of heads; entries may be negative."""
        both = self._both(q, k, visibility, scale, inputs)
        return Maps(both[:, 0::2] - self.lam.to(both.dtype) * both[:, 1::2])

    def steps(
        self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS
    ) -> list[Step]:
        """The two maps of each pair."""
        both = self._both(q, k, visibility, scale, inputs)
        return [Step("first map", both[:, 0::2], False), Step("second map", both[:, 1::2], False)]

    def _both(
        self,
        q: Tensor,
        k: Tensor,
        visibility: Visibility | None,
        scale: float | None,
        inputs: LayerInputs,
    ) -> Float[Tensor, "B H Tq Tk"]:
        group = q.shape[1] // k.shape[1]  # pairs share pairs of key heads
        k = k.unflatten(1, (-1, 2)).repeat_interleave(group, dim=1).flatten(1, 2)
        return multi_token_attention_map(q, k, Parameters(), inputs.terms(q, visibility, scale))
