"""Standard softmax attention, the baseline: torch's scaled_dot_product_attention."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.nn.shape import HeadShape
from heedful.ops import Visibility


@dataclass(frozen=True)
class Standard:
    """Standard attention; no parameters."""

    def build(self, shape: HeadShape) -> "StandardAttention":
        """The layer for one attention module."""
        return StandardAttention()


class StandardAttention(nn.Module):
    """SDPA under a `Visibility`."""

    needs_past_queries = False

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
        sdpa = torch.nn.functional.scaled_dot_product_attention
        grouped = q.shape[1] != k.shape[1]
        # SDPA's is_causal aligns unequal lengths at the top, Visibility at the bottom.
        if visibility.plain and (queries == keys or queries == 1 or not visibility.causal):
            causal = visibility.causal and queries > 1
            return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        visible = visibility.dense(queries, keys, q.device)[:, None]
        blind = ~visible.any(-1, keepdim=True)  # such a row would divide by zero: let it see all
        out = sdpa(q, k, v, attn_mask=visible | blind, scale=scale, enable_gqa=grouped)
        return out.masked_fill(blind, 0)
