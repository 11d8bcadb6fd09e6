"""Selective attention as a layer: which head, or which own projection, selects."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from heedful.checks import UserError, check_choice, is_whole
from heedful.nn.layer import (
    NO_INPUTS,
    TERMS,
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
    Step,
    Stream,
    check_inputs,
)
from heedful.nn.shape import HeadShape, WideLinear
from heedful.nn.standard import attend
from heedful.ops import Visibility, selective_attention
from heedful.ops.common.standard import masked_softmax
from heedful.ops.common.terms import Terms
from heedful.ops.selective.decode import selective_attention_few
from heedful.ops.selective.reference import mask_sums, selection


@dataclass(frozen=True)
class Selective:
    """Selective attention: whose logits select, and whether first tokens are protected.

    Arguments:
        selector: `"head"` (one of the layer's heads, the published form, no parameters),
            `"mean"` (the mean of all heads' logits), `"per-head"` (every head masks for itself),
            `"bilinear"` (own query and key projections of the layer's input), or `"extra"` (the
            same, its key projection zero-initialised: unchanged outputs at initialisation).
        head: the head that selects, for `selector="head"`.
        protect_first: keep the first token of every document from being hidden.
        dim: channels of a separate selector's queries and keys; by default those of a head. A cache
            keeps these keys beside K and V, so a small number saves bytes.
        masks: subtract F from the logits, as published. Else F only ranks the tokens of a cache for
            eviction, and attention stays what it is without the mechanism.

    Source: Leviathan et al., arXiv 2410.02703, section 3 and its ablations.
    """

    selector: Literal["head", "mean", "per-head", "bilinear", "extra"] = "head"
    head: int = 0
    protect_first: bool = True
    dim: int | None = None
    masks: bool = True

    def __post_init__(self) -> None:
        choices = ("head", "mean", "per-head", "bilinear", "extra")
        check_choice("selector", self.selector, choices)
        if not is_whole(self.head, 0) or (self.head and self.selector != "head"):
            raise UserError(
                f"head must be a head index, and only with selector='head', got {self.head!r} with "
                f"selector={self.selector!r}"
            )
        for name in ("protect_first", "masks"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} must be True or False, got {getattr(self, name)!r}")
        own = self.selector in ("bilinear", "extra")
        if not self.masks and not own:
            raise UserError(
                f"masks=False needs a selector of its own (selector='extra' or 'bilinear'), got "
                f"{self.selector!r}, which changes nothing but what a cache evicts"
            )
        if self.dim is not None and not (own and is_whole(self.dim, 1)):
            raise UserError(
                f"dim must be None or a whole number of at least 1, and only with an own selector "
                f"(selector='extra' or 'bilinear'), got {self.dim!r} with "
                f"selector={self.selector!r}"
            )

    def build(self, shape: HeadShape) -> "SelectiveAttention":
        """The layer for one attention module."""
        return SelectiveAttention(self, shape)


class OwnSelector(Layer):
    """A layer that may have a selector of its own: projections of its input to queries and keys."""

    query: WideLinear | None
    key: WideLinear | None

    def add_selector(self, config: "Selective") -> None:
        """Make the projections; a cache keeps the keys."""
        dim = self.shape.dim if config.dim is None else config.dim
        self.query = WideLinear(self.shape.hidden, dim, bias=False)
        self.key = WideLinear(self.shape.hidden, dim, bias=False)
        self.needs = frozenset({"input"})
        self.streams = (Stream("F", running=True), Stream("selector keys"))

    @torch.no_grad()
    def reset_selector(self, config: "Selective") -> None:
        """Normal with std hidden^-1/2, or zero for the extra head's keys."""
        for projection in (self.query, self.key):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)
        if config.selector == "extra":
            self.key.weight.zero_()

    def own_selector(self, q: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The selector's queries of the new tokens and keys of all, `[B, 1, T, Ds]`."""
        if not self.in_step(inputs):
            check_inputs(self, inputs)
        rows = self.rows(inputs) if inputs.rows is None else inputs.rows
        query = self.query(inputs.input[:, -q.shape[2] :])
        return query.to(q.dtype)[:, None], rows["selector keys"].to(q.dtype)

    def selector_weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The weights of an own selector's queries and keys, `[Ds, E]` each.

        By way of the dicts of torch's modules, whose attributes cost a Python call each: a cache
        reads them for every token.
        """
        parts = self._modules
        return parts["query"]._parameters["weight"], parts["key"]._parameters["weight"]

    def rows(self, inputs: LayerInputs) -> dict[str, Float[Tensor, "B 1 T Ds"]]:
        """Keys of an own selector: they are made from the layer's input, which no cache keeps."""
        if self.key is None:
            return {}
        check_inputs(self, inputs)
        return {"selector keys": self.key(inputs.input)[:, None]}


class SelectiveAttention(OwnSelector):
    """Selective attention for one layer; has parameters only with an own selector.

    Defined where there are earlier queries: in a decoder's self-attention alone.
    """

    takes = TERMS
    streams = (Stream("F", running=True),)
    reports_memory = True
    takes_steps = True

    def __init__(self, config: Selective, shape: HeadShape) -> None:
        super().__init__(shape)
        if config.head >= shape.heads:
            raise UserError(
                f"head must be below the model's {shape.heads} heads, got {config.head}"
            )
        self.keeps_first = config.protect_first
        self.config, self.group = config, shape.heads // shape.key_heads
        self.query = self.key = None
        if config.selector in ("bilinear", "extra"):
            self.add_selector(config)
            self.any_heads = True
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Those of an own selector, if any."""
        if self.query is not None:
            self.reset_selector(self.config)

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
        """Attention with what earlier tokens have hidden; `state` is F of every key."""
        selector_q, selector_k = self.selectors(q, k, inputs)
        if not self.config.masks:
            return self._ranked(q, k, v, selector_q, selector_k, visibility, scale, inputs)
        options = {"tau": self.tau, "protect_first": self.config.protect_first}
        if self.in_step(inputs):
            terms = inputs.terms(q, visibility, scale)
            result = selective_attention_few(
                q, k, v, selector_q, selector_k, inputs.state, terms, **options
            )
        else:
            result = selective_attention(
                q, k, v, selector_q=selector_q, selector_k=selector_k, state=inputs.state,
                bias=inputs.bias, softcap=inputs.softcap, sinks=inputs.sinks,
                dropout_p=inputs.dropout, visibility=visibility, scale=scale, impl=self.impl,
                **options,
            )  # fmt: skip
        return LayerOutput(*result)

    def _ranked(
        self, q, k, v, selector_q, selector_k, visibility, scale, inputs: LayerInputs
    ) -> LayerOutput:
        """Standard attention; `state` is F of every key, without a gradient."""
        if self.tau is not None:
            raise UserError(
                "a memory loss trains what F masks, and with masks=False it masks nothing; leave "
                "the loss out, or masks=True"
            )
        visibility = Visibility() if visibility is None else visibility
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        output = attend(q, k, v, visibility=visibility, scale=scale, inputs=inputs, impl=self.impl)
        first = self.config.protect_first
        state = mask_sums(selector_q, selector_k, first, visibility, scale)
        if inputs.state is not None:
            state = state + pad(inputs.state, (0, k.shape[2] - inputs.state.shape[2]))
        return LayerOutput(output, state)

    def maps(self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS) -> Maps:
        """The softmax of what is left of the logits, per head, and what masks what."""
        terms = inputs.terms(q, visibility, scale)
        selectors = self.selectors(q, k, inputs)
        return masked_maps(q, k, selectors, self.config, inputs.state, terms)

    def steps(
        self, q, k, *, visibility=None, scale=None, inputs: LayerInputs = NO_INPUTS
    ) -> list[Step]:
        """The logits, from which nothing is hidden yet."""
        visibility = Visibility() if visibility is None else visibility
        visible = visibility.dense(q.shape[2], k.shape[2], q.device)[:, None]
        spread = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        logits = q @ spread.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        return [Step("logits", logits.masked_fill(~visible, -torch.inf), True)]

    def selectors(self, q: Tensor, k: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
        """The two tensors whose product masks: `[B, 1 or H, T, Ds]` for queries and keys."""
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
        return self.own_selector(q, inputs)


def masked_maps(
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk Tk D"],
    selectors: tuple[Tensor, Tensor],
    config: Selective,
    state: Float[Tensor, "B S Ts"] | None,
    terms: Terms,
) -> Maps:
    """The softmax of logits that are less by F, and what masks what; `state` as of a layer."""
    visibility, scale, bias, softcap, sinks, _ = terms
    masking = selection(*selectors, config.protect_first, visibility, scale)
    f = masking.cumsum(2) - masking
    if state is not None:
        f = f + pad(state, (0, k.shape[2] - state.shape[2]))[:, :, None]
    visible = visibility.dense(q.shape[2], k.shape[2], q.device)[:, None]
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits - f if config.masks else logits
    logits = logits if bias is None else logits + bias
    sinks = None if sinks is None else sinks[:, None, None]
    return Maps(masked_softmax(logits, visible, sinks), masking)
