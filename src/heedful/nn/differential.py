"""Differential attention as a layer: pairs of heads, the learned lambda, and the head norm."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.shape import HeadNorm, HeadShape
from heedful.ops import Visibility, differential_attention
from heedful.ops.impl import Impl


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


class DifferentialAttention(nn.Module):
    """Lambda vectors and norm of one differential layer."""

    needs_past_queries = False
    impl: Impl = "auto"  # a choice for a machine, not of the mechanism

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        for name, count in (("heads", shape.heads), ("key heads", shape.key_heads)):
            if count % 2:
                raise ValueError(
                    f"differential attention pairs heads, so the model's {name} must be even, got "
                    f"{count}"
                )
        self.shape, self.start = shape, shape.depth_factor
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, nn.Parameter(torch.empty(shape.dim, dtype=torch.float32)))
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
        hidden: Tensor | None = None,
    ) -> Float[Tensor, "B H Tq D"]:
        """H / 2 heads of twice the width, in the shape of H heads; `hidden` is not used."""
        joined = torch.cat([v[:, 0::2], v[:, 1::2]], dim=-1)
        out = differential_attention(
            q, k, joined, lam=self.lam, visibility=visibility, scale=scale, impl=self.impl
        )
        out = self.norm(out)
        return out.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)
