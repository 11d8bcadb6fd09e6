"""A retention gate: each token says how much a cache should keep it, when it comes."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.nn.layer import NO_INPUTS, LayerInputs, LayerOutput, StandardForm, check_inputs
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility
from heedful.ops.common.precision import without_autocast


@dataclass(frozen=True)
class RetentionGate:
    r"""Standard attention, and a gate per token that `heedful.eviction.LowestGate` evicts by.

    $$ g_j = x_j w $$

    for the layer's input $x_j$, one w per layer. The gate changes no output. It is what selective
    attention is not: it predicts a token's use from the token alone, once, where F says which later
    tokens have masked it. The gates start equal, so that the oldest tokens are evicted first, and
    are trained from attention maps beside a frozen base, as selectors are (recipe `hide`).

    Source: the idea is that of Faysse et al., "Self-Pruned Key-Value Attention", arXiv 2605.14037,
        whose gate per key head is squashed, biases the logits of keys beyond a local window by its
        logarithm, is trained with the model by the next token, and is cut at a threshold. Here
        whole tokens are evicted down to a budget, so only the order counts. Of the paper the
        abstract and an author's summary were read.
    """

    def build(self, shape: HeadShape) -> "RetentionGateAttention":
        """The layer for one attention module."""
        return RetentionGateAttention(self, shape)


class RetentionGateAttention(StandardAttention):
    """The gates of one layer, beside SDPA; a cache keeps one fp32 per token."""

    needs = frozenset({"input"})
    keeps = ("gate",)

    def __init__(self, config: RetentionGate, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config, self.roles = config, frozenset({"decoder"})
        self.retention = WideLinear(shape.hidden, 1, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Zero: all tokens are alike."""
        self.retention.weight.zero_()

    def standard_form(self) -> StandardForm:
        """Standard attention, whatever the gates are."""
        return StandardForm()

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
        """Softmax attention; `state` is the gate of every key."""
        out = super().forward(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
        return out._replace(state=self.gates(k.shape[2], inputs))

    def gates(self, keys: int, inputs: LayerInputs) -> Float[Tensor, "B 1 {keys}"]:
        """The gate of every key: those of the state, and of the tokens that came since.

        Arguments:
            keys: how many there are.
            inputs: of the call; its input holds the newest tokens.

        Raises:
            ValueError: tokens since the state are not in the input.
        """
        check_inputs(self, inputs)
        cached = 0 if inputs.state is None else inputs.state.shape[2]
        new = inputs.input[:, max(0, inputs.input.shape[1] - keys + cached) :]
        if new.shape[1] < keys - cached:
            raise ValueError(
                f"inputs.input must hold all {keys - cached} tokens since inputs.state, whose "
                f"gates are kept, got {inputs.input.shape[1]}"
            )
        gates = without_autocast(self.retention)(new).mT
        return gates if inputs.state is None else torch.cat([inputs.state, gates], dim=2)
