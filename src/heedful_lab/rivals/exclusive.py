"""Exclusive attention: what a head reads, without what points along its token's own value."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError
from heedful.nn.layer import NO_INPUTS, LayerInputs, LayerOutput
from heedful.nn.shape import HeadShape
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility


@dataclass(frozen=True)
class Exclusive:
    r"""Standard attention whose outputs are orthogonal to the query's own value; no parameters.

    $$ O_i \leftarrow O_i - (O_i \cdot \hat v_i)\, \hat v_i, \qquad \hat v_i = v_i / |v_i| $$

    Source: Zhai, "Exclusive Self Attention", arXiv 2603.09078.
    """

    def build(self, shape: HeadShape) -> "ExclusiveAttention":
        """The layer for one attention module."""
        return ExclusiveAttention(self, shape)


class ExclusiveAttention(StandardAttention):
    """SDPA and a projection; in self-attention alone, where a query has a value of its own."""

    def __init__(self, config: Exclusive, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config, self.roles = config, frozenset({"decoder", "encoder"})

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
        """Softmax attention, less its projection on the values of the queries' own tokens."""
        if visibility is not None and visibility.queries is not None:
            raise UserError(
                "visibility.queries is given, so the queries are other tokens than the keys, and "
                "exclusive attention needs each query's own value; use it in self-attention"
            )
        result = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
        # Norms and products in fp32 at least: of what is left after the difference, half precision
        # would leave little.
        wide = torch.promote_types(result.output.dtype, torch.float32)
        own = torch.nn.functional.normalize(v[:, :, -q.shape[2] :].to(wide), dim=-1)
        own = own.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out = result.output.to(wide)
        out = out - (out * own).sum(-1, keepdim=True) * own
        return result._replace(output=out.to(result.output.dtype))
