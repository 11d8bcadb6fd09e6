"""Head shape of the model around a layer, and modules that layers share."""

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

Role = Literal["decoder", "encoder", "cross"]
ROLES = ("decoder", "encoder", "cross")
"""Where an attention module stands: causal self-attention, two-sided, or over another row."""


@dataclass(frozen=True)
class HeadShape:
    """Heads of one attention layer.

    Arguments:
        heads: query heads.
        key_heads: key and value heads; divides `heads`.
        dim: head dim of queries and keys (and values).
        hidden: width of the layer's input.
        layer: index of the layer, from 0, among those of its role.
        role: `"decoder"` (causal self-attention), `"encoder"` (two-sided self-attention) or
            `"cross"` (queries of a decoder, keys of an encoder's row).
        source: width of what keys and values are made of; `None` is `hidden`.
    """

    heads: int
    key_heads: int
    dim: int
    hidden: int
    layer: int
    role: Role = field(default="decoder", repr=False)
    source: int | None = field(default=None, repr=False)

    @property
    def depth_factor(self) -> float:
        """lambda_init = 0.8 - 0.6 exp(-0.3 layer), Differential Transformer section 2.1."""
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer)


class HeadNorm(nn.Module):
    """RMSNorm over each head's output, its weight shared by all heads; statistics in fp32.

    Source: "Multi-Token Attention", arXiv 2504.00927, section 3.4 (group normalisation).
    """

    def __init__(self, dim: int, factor: float = 1.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dtype=torch.float32))
        self.factor, self.eps = factor, eps
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.weight.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (self.weight * self.factor)).to(x.dtype)


class WideLinear(nn.Linear):
    """A linear layer in fp32 that computes in the wider precision of its input and its weight."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if x.dtype != weight.dtype:
            wide = torch.promote_types(x.dtype, weight.dtype)
            x, weight = x.to(wide), weight.to(wide)
            bias = None if bias is None else bias.to(wide)
        return nn.functional.linear(x, weight, bias)
