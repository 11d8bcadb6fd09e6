"""Standard softmax attention, the baseline: torch's scaled_dot_product_attention."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError, is_whole
from heedful.nn.layer import (
    NO_INPUTS,
    TERMS,
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
)
from heedful.nn.shape import ROLES, HeadShape
from heedful.ops import Visibility, multi_token_attention
from heedful.ops.common.few import FEW
from heedful.ops.common.standard import standard_attention
from heedful.ops.impl import Impl
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.reference import multi_token_attention_map


@dataclass(frozen=True)
class Standard:
    """Standard attention; no parameters.

    Arguments:
        window: how many tokens a query sees, itself included; `None` is the model's own choice. A
            narrower window of the model's stays. With it a model can have local layers beside
            global ones. In an encoder it counts to either side; in cross-attention, where nothing
            is near, there is none.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not is_whole(self.window, 1):
            raise UserError(
                f"window must be a whole number of tokens of at least 1, or None, got "
                f"{self.window!r}"
            )

    def build(self, shape: HeadShape) -> "StandardAttention":
        """The layer for one attention module."""
        return StandardAttention(self, shape)


@dataclass(frozen=True)
class LocalGlobal:
    """Standard attention with a sliding window, but for every n-th layer, which sees everything.

    The layers `every - 1`, `2 * every - 1` and so on are the global ones; no parameters.

    Arguments:
        window: how many tokens a query of the local layers sees, itself included. A narrower
            window of the model's stays.
        every: one layer in this many is global.

    Source: Gemma Team, "Gemma 3 Technical Report", arXiv 2503.19786, which has these defaults.
    """

    window: int = 1024
    every: int = 6

    def __post_init__(self) -> None:
        for name in ("window", "every"):
            if not is_whole(getattr(self, name), 1):
                raise UserError(
                    f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}"
                )

    def build(self, shape: HeadShape) -> "StandardAttention":
        """The layer for one attention module."""
        is_global = shape.layer % self.every == self.every - 1
        layer = StandardAttention(Standard(None if is_global else self.window), shape)
        layer.roles = frozenset({"decoder", "encoder"})
        return layer


class StandardAttention(Layer):
    """SDPA under a `Visibility`; every `impl` is SDPA.

    But with a bias of the family's, logits that it caps, sinks, or dropout: with a bias SDPA's mask
    would hold a map for every row and head, and the gradient of the bias another, SDPA has neither
    cap nor sinks, and with dropout it keeps whole maps on a CPU, so that the operator without its
    steps stands in. It does so too on a CPU for documents, padding and windows: SDPA would take a
    mask of all pairs there and compute them all.
    """

    any_heads = True
    takes = TERMS

    def __init__(self, config: Standard, shape: HeadShape) -> None:
        super().__init__(shape)
        self.config, self.window = config, config.window
        self.roles = frozenset(ROLES) - ({"cross"} if config.window else set())

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
        """Softmax attention; padded queries get zeros."""
        visibility = self._visibility(visibility, k)
        options = {"visibility": visibility, "scale": scale, "inputs": inputs, "impl": self.impl}
        return LayerOutput(attend(q, k, v, **options))

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The softmax, per head."""
        visibility = self._visibility(visibility, k)
        terms = inputs.terms(q, visibility, scale)
        return Maps(multi_token_attention_map(q, k, Parameters(), terms))

    def _visibility(self, visibility: Visibility | None, k: Tensor) -> Visibility:
        visibility = Visibility() if visibility is None else visibility
        window = self.window
        # Of keys in place none is further back than there are keys; of others one may be.
        if window is None or (visibility.in_place and window >= k.shape[2]):
            return visibility
        if visibility.window is not None and visibility.window <= window:
            return visibility
        return replace(visibility, window=window)


def attend(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    v: Float[Tensor, "B Hk Tk D"],
    *,
    visibility: Visibility,
    scale: float | None,
    inputs: LayerInputs = NO_INPUTS,
    impl: Impl = "auto",
) -> Float[Tensor, "B H Tq D"]:
    """Softmax attention with the terms of a family; padded queries get zeros."""
    queries, keys = q.shape[2], k.shape[2]
    more = inputs.bias is not None or inputs.softcap is not None or inputs.sinks is not None
    more, plain = more or inputs.dropout, visibility.plain
    if more or (queries > FEW and not plain and q.device.type == "cpu"):
        return multi_token_attention(
            q, k, v, bias=inputs.bias, softcap=inputs.softcap, sinks=inputs.sinks,
            dropout_p=inputs.dropout, visibility=visibility, scale=scale,
            impl="reference" if impl == "reference" else "auto",
        )  # fmt: skip
    if plain:
        out = standard_attention(q, k, v, causal=visibility.causal, scale=scale)
        if out is not None:
            return out
    visible = visibility.dense(queries, keys, q.device)[:, None]
    blind = ~visible.any(-1, keepdim=True)  # such a row would divide by zero: let it see all
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible | blind, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.masked_fill(blind, 0)
