"""Dex: a learned part of what heads have read is taken away again, in a pretrained model."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.checks import UserError, is_whole
from heedful.nn.layer import NO_INPUTS, LayerInputs, LayerOutput, parameter
from heedful.nn.shape import HeadShape
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility


@dataclass(frozen=True)
class Dex:
    r"""Standard attention, less a learned linear function of some heads' outputs.

    $$ O_h \leftarrow O_h - \lambda\, O_h W_D $$

    with one $\lambda$ and one $W_D$ for all of a layer's heads: what is subtracted stands for the
    second map of differential attention. $\lambda$ starts at zero, so that a converted model is
    unchanged.

    Arguments:
        heads: which heads; `None` for all.

    Source: Kong et al., "Understanding Differential Transformer Unchains Pretrained
        Self-Attentions", arXiv 2505.16333.
    """

    heads: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.heads is None:
            return
        several = isinstance(self.heads, tuple | list)
        if not (several and self.heads and all(is_whole(head, 0) for head in self.heads)):
            raise UserError(
                f"heads must be a tuple of head numbers from 0 on, or None for all, got "
                f"{self.heads!r}"
            )
        if len(set(self.heads)) < len(self.heads):
            raise UserError(f"heads must name each head once, got {self.heads!r}")
        object.__setattr__(self, "heads", tuple(sorted(self.heads)))

    def build(self, shape: HeadShape) -> "DexAttention":
        """The layer for one attention module."""
        return DexAttention(self, shape)


class DexAttention(StandardAttention):
    """The matrix and the factor of one layer."""

    any_heads = False

    def __init__(self, config: Dex, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        if config.heads is not None and config.heads[-1] >= shape.heads:
            raise UserError(
                f"heads must be below the model's {shape.heads} heads, got {config.heads[-1]}"
            )
        self.config = config
        self.matrix, self.factor = parameter(shape.dim, shape.dim), parameter(1)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The factor zero; the matrix normal with std dim^-1/2, so that the factor has a slope."""
        nn.init.normal_(self.matrix, std=self.shape.dim**-0.5)
        self.factor.zero_()

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
        """Softmax attention, and what the chosen heads lose of it."""
        result = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
        out = result.output.to(torch.promote_types(result.output.dtype, self.matrix.dtype))
        less = self.factor.to(out.dtype) * (out @ self.matrix.to(out.dtype))
        if self.config.heads is not None:
            selected = torch.zeros(out.shape[1], dtype=torch.bool, device=out.device)
            selected[list(self.config.heads)] = True
            less = less.masked_fill(~selected[:, None, None], 0)
        return result._replace(output=(out - less).to(result.output.dtype))
