"""A retention gate: each token says how much a cache should keep it, when it comes; its policy."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from heedful.checks import UserError, is_whole
from heedful.eviction import CachedTokens, Eviction
from heedful.nn.layer import (
    NO_INPUTS,
    LayerInputs,
    LayerOutput,
    Maps,
    Stream,
    check_defaults,
    check_inputs,
)
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import Standard, StandardAttention
from heedful.ops import Visibility
from heedful.ops.common.precision import without_autocast

_OPEN = 5.0  # where gates that act start: sigmoid(5) = 0.993
_ROWS = 128  # query rows whose bias is in memory at once
_ORDER = (
    "gates act on keys that are further back than a window; use gates with a window in causal "
    "self-attention, without images, or RetentionGate(window=None)"
)


@dataclass(frozen=True)
class RetentionGate:
    r"""Standard attention, and a gate per token that `LowestGate` evicts by.

    $$ g_j = x_j w $$

    for the layer's input $x_j$, one w per layer. The gate is what selective attention is not: it
    predicts a token's use from the token alone, once, where F says which later tokens have masked
    it.

    Without a window the gate changes no output. The gates start equal, so that the oldest tokens
    are evicted first, and are trained from attention maps beside a frozen base, as selectors are
    (recipe `hide`). With one it acts on keys that are further back:

    $$ \mathrm{softmax}_j\Big(s\, q_i \cdot k_j
       + [i - j \ge \mathrm{window}] \log\frac{\sigma(g_j)}{\sigma(5)}\Big)\, v_j, \qquad
       g_j = x_j w + b $$

    so that it learns with the model, from the next token and a memory loss. w starts at zero and b
    at 5: a converted model is unchanged.

    Arguments:
        window: how many of a query's newest tokens, its own included, no gate acts on; `None` for
            gates that change no output.

    Source: Szilvasy et al., "Self-Pruned Key-Value Attention: Learning When to Write by Predicting
        Future Utility", arXiv 2605.14037, as its abstract and an author's summary have it. There
        every key head has a gate, which is cut at a threshold, and nothing but the next token
        trains it. Here whole tokens are evicted down to a budget, so a layer has one gate per
        token. The memory loss, the form without a window, and the division by the gate at its
        start are added here.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not is_whole(self.window, 1):
            raise UserError(
                f"window must be a whole number of tokens of at least 1, or None (gates that "
                f"change no output), got {self.window!r}"
            )

    def build(self, shape: HeadShape) -> "RetentionGateAttention":
        """The layer for one attention module."""
        kind = RetentionGateAttention if self.window is None else SelfPrunedAttention
        return kind(self, shape)


class RetentionGateAttention(StandardAttention):
    """The gates of one layer, beside SDPA; a cache keeps one fp32 per token."""

    needs = frozenset({"input"})
    streams = (Stream("gate", running=True),)

    def __init__(self, config: RetentionGate, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.config, self.roles = config, frozenset({"decoder"})
        self.retention = WideLinear(shape.hidden, 1, bias=config.window is not None)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Weights of zero, so that all tokens are alike; gates that act start nearly open."""
        self.retention.weight.zero_()
        if self.retention.bias is not None:
            self.retention.bias.fill_(_OPEN)

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
        if cached > keys:
            raise UserError(
                f"inputs.state must have gates of at most the {keys} keys, got {cached}"
            )
        new = inputs.input[:, max(0, inputs.input.shape[1] - keys + cached) :]
        if new.shape[1] < keys - cached:
            raise UserError(
                f"inputs.input must hold all {keys - cached} tokens since inputs.state, whose "
                f"gates are kept, got {inputs.input.shape[1]}"
            )
        gates = without_autocast(self.retention)(new).mT
        return gates if inputs.state is None else torch.cat([inputs.state, gates], dim=2)


class SelfPrunedAttention(RetentionGateAttention):
    """Gates that act on the logits of keys beyond a window, as a bias for some rows at a time.

    A backward pass computes the rows again, so that no bias of all rows is kept.
    """

    takes = frozenset({"bias", "softcap", "sinks"})
    streams = ()
    caches = False
    reports_memory = True

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
        """Softmax attention under the gates; `state` is the gate of every key.

        Memory per query is tau times what the gates take of the keys that they act on, the sum of
        1 - sigmoid(gate).
        """
        view = self._view(visibility)
        queries, keys = q.shape[2], k.shape[2]
        gates = self.gates(keys, inputs)
        view.check(q.shape[0], queries, keys)
        parts = []
        for start in range(0, max(queries, 1), _ROWS):
            stop = min(start + _ROWS, queries)
            seen = keys - queries + stop
            of_rows = (
                q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen], gates[:, :, :seen],
                view.part(0, seen), scale, inputs.before(queries - stop, stop - start),
            )  # fmt: skip
            if torch.is_grad_enabled() and queries > _ROWS:
                part = checkpoint(
                    self._rows, *of_rows, use_reentrant=False, preserve_rng_state=False
                )
            else:
                part = self._rows(*of_rows)
            parts.append(part)
        outputs, memories = zip(*parts, strict=True)
        memory = None if self.tau is None else torch.cat(memories, dim=1)
        return LayerOutput(torch.cat(outputs, dim=2), gates, memory)

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The softmax, per head."""
        view = self._view(visibility)
        gates = self.gates(k.shape[2], inputs)
        inputs = inputs.with_bias(self.logit_bias(gates, q.shape[2], view))
        return super().maps(q, k, visibility=visibility, scale=scale, inputs=inputs)

    def logit_bias(
        self, gates: Float[Tensor, "B 1 Tk"], queries: int, visibility: Visibility
    ) -> Float[Tensor, "B 1 Tq Tk"]:
        """Bias of the gates on the logits of so many queries: zero within the window."""
        added = logsigmoid(gates) - logsigmoid(gates.new_tensor(_OPEN))
        return added[:, :, None] * self._far(queries, gates, visibility)[:, None]

    def _rows(
        self,
        q: Float[Tensor, "B H R D"],
        k: Float[Tensor, "B Hk K D"],
        v: Float[Tensor, "B Hk K D"],
        gates: Float[Tensor, "B 1 K"],
        view: Visibility,
        scale: float | None,
        inputs: LayerInputs,
    ) -> tuple[Float[Tensor, "B H R D"], Float[Tensor, "B R"] | None]:
        """Output and memory of the last rows of so many keys."""
        queries, keys = q.shape[2], k.shape[2]
        inputs = inputs.with_bias(self.logit_bias(gates, queries, view))
        standard = StandardAttention.forward
        out = standard(self, q, k, v, visibility=view, scale=scale, inputs=inputs).output
        if self.tau is None:
            return out, None
        acted_on = self._far(queries, gates, view) & view.dense(queries, keys, q.device)
        return out, self.tau * (torch.sigmoid(-gates) * acted_on).sum(2)

    def _view(self, visibility: Visibility | None) -> Visibility:
        """The visibility to use; raises where keys are not all earlier tokens of the sequence."""
        view = Visibility() if visibility is None else visibility
        check_defaults(view, ("causal", "mutual", "queries"), _ORDER)
        return view

    def _far(
        self, queries: int, gates: Float[Tensor, "B 1 K"], view: Visibility
    ) -> Bool[Tensor, "#B R K"]:
        """Visible keys that the gates act on."""
        near = replace(view, window=self.config.window)
        return ~near.dense(queries, gates.shape[2], gates.device)


@dataclass(frozen=True)
class LowestGate(Eviction):
    """Evicts the token with the lowest retention gate; of equal ones the oldest.

    It needs `RetentionGate`. A gate is set when its token comes and never changes, so a
    token that is evicted under one budget would be under every smaller one.

    Source: see `RetentionGate`.
    """

    needs = ("gate",)

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The gate."""
        return cached.number
