"""Selective attention as a layer: which head, or which own projection, selects."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.shape import HeadShape, WideLinear, check_choice, is_whole
from heedful.ops import Visibility, selective_attention
from heedful.ops.impl import Impl


@dataclass(frozen=True)
class Selective:
    """What selects, and whether first tokens are protected.

    Arguments:
        selector: `"head"` (one of the layer's heads, the published form, no parameters),
            `"mean"` (the mean of all heads' logits), `"per-head"` (every head hides for itself),
            `"bilinear"` (own query and key projections of the layer's input), or `"extra"` (the
            same, its key projection zero-initialised: unchanged outputs at initialisation).
        head: the head that selects, for `selector="head"`.
        protect_first: keep the first token of every document from being hidden.

    Source: Leviathan et al., arXiv 2410.02703, section 3 and its ablations.
    """

    selector: Literal["head", "mean", "per-head", "bilinear", "extra"] = "head"
    head: int = 0
    protect_first: bool = True

    def __post_init__(self) -> None:
        choices = ("head", "mean", "per-head", "bilinear", "extra")
        check_choice("selector", self.selector, choices)
        if not is_whole(self.head, 0) or (self.head and self.selector != "head"):
            raise ValueError(
                f"head must be a head index, and only with selector='head', got {self.head!r} with "
                f"selector={self.selector!r}"
            )
        if not isinstance(self.protect_first, bool):
            raise ValueError(f"protect_first must be True or False, got {self.protect_first!r}")

    def build(self, shape: HeadShape) -> "SelectiveAttention":
        """The layer for one attention module."""
        return SelectiveAttention(self, shape)


class SelectiveAttention(nn.Module):
    """Selective attention for one layer; has parameters only with an own selector."""

    needs_past_queries = True
    impl: Impl = "auto"  # a choice for a machine, not of the mechanism

    def __init__(self, config: Selective, shape: HeadShape) -> None:
        super().__init__()
        if config.head >= shape.heads:
            raise ValueError(
                f"head must be below the model's {shape.heads} heads, got {config.head}"
            )
        self.config, self.shape = config, shape
        self.group = shape.heads // shape.key_heads
        self.query = self.key = None
        if config.selector in ("bilinear", "extra"):
            self.query = WideLinear(shape.hidden, shape.dim, bias=False)
            self.key = WideLinear(shape.hidden, shape.dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Own projections: normal with std hidden^-1/2, or zero for the extra head's keys."""
        if self.query is None:
            return
        for projection in (self.query, self.key):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        if self.config.selector == "extra":
            self.key.weight.zero_()

    def forward(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        hidden: Float[Tensor, "B Tk E"] | None = None,
    ) -> Float[Tensor, "B H Tq D"]:
        """Attention with what earlier tokens have hidden; `hidden` is the layer's input."""
        selector_q, selector_k = self.selectors(q, k, hidden)
        return selective_attention(
            q,
            k,
            v,
            selector_q=selector_q,
            selector_k=selector_k,
            protect_first=self.config.protect_first,
            visibility=visibility,
            scale=scale,
            impl=self.impl,
        ).output

    def selectors(self, q: Tensor, k: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """The two tensors whose product hides: `[B, 1 or H, T, Ds]` for queries and keys."""
        match self.config.selector:
            case "head":
                head = self.config.head
                return q[:, head : head + 1], k[:, head // self.group : head // self.group + 1]
            case "per-head":
                return q, k.repeat_interleave(self.group, dim=1)
            case "mean":
                joined = q.transpose(1, 2).flatten(2)[:, None] / q.shape[1]
                spread = k.repeat_interleave(self.group, dim=1)
                return joined, spread.transpose(1, 2).flatten(2)[:, None]
        if hidden is None:
            raise ValueError(
                f"selector={self.config.selector!r} projects the layer's input: pass it as hidden"
            )
        return (
            self.query(hidden[:, -q.shape[2] :]).to(q.dtype)[:, None],
            self.key(hidden).to(q.dtype)[:, None],
        )
