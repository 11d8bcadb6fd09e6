"""Standard softmax attention, the baseline: torch's scaled_dot_product_attention."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.shape import HeadShape
from heedful.ops import Visibility
from heedful.ops.common.standard import standard_attention
from heedful.ops.impl import Impl


@dataclass(frozen=True)
class Standard:
    """Standard attention; no parameters."""

    def build(self, shape: HeadShape) -> "StandardAttention":
        """The layer for one attention module."""
        return StandardAttention()


class StandardAttention(nn.Module):
    """SDPA under a `Visibility`."""

    needs_past_queries = False
    impl: Impl = "auto"  # all are SDPA

    def reset_parameters(self) -> None:
        """Nothing to reset."""

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
        """Softmax attention; padded queries get zeros. `hidden` is not used."""
        visibility = Visibility() if visibility is None else visibility
        queries, keys = q.shape[2], k.shape[2]
        if visibility.plain:
            out = standard_attention(q, k, v, causal=visibility.causal, scale=scale)
            if out is not None:
                return out
        visible = visibility.dense(queries, keys, q.device)[:, None]
        blind = ~visible.any(-1, keepdim=True)  # such a row would divide by zero: let it see all
        grouped = q.shape[1] != k.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible | blind, scale=scale, enable_gqa=grouped
        )
        return out.masked_fill(blind, 0)
