"""The layer contract: what a mechanism's layer declares, gets, and returns."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.nn.shape import HeadShape, Role
from heedful.ops import Visibility
from heedful.ops.common.terms import Terms
from heedful.ops.grouped.groups import Groups
from heedful.ops.impl import Impl
from heedful.ops.mta.filtered import Newest

Need = Literal["input", "source", "token_ids", "positions", "rotation"]
Term = Literal["bias", "softcap", "sinks", "dropout"]
"""Changes that a model's family may make to logits and weights, beside scale and mask."""
TERMS: frozenset[Term] = frozenset(get_args(Term))
Tail = Literal["queries", "keys"]


@runtime_checkable
class Rotation(Protocol):
    """A model's rotary embedding, at any positions, between tokens too; it keeps lengths."""

    def __call__(
        self, x: Float[Tensor, "B H n D"], positions: Float[Tensor, "#B n"]
    ) -> Float[Tensor, "B H n D"]:
        """`x` rotated to these positions."""


class Shared:
    """Values that the layers of one forward pass share, by key.

    No dict: accelerate hands every module copies of the dicts in its arguments, and what one layer
    leaves in a copy, no other finds.
    """

    def __init__(self) -> None:
        self._values: dict = {}

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __getitem__(self, key: object) -> object:
        return self._values[key]

    def __setitem__(self, key: object, value: object) -> None:
        self._values[key] = value


class Stream(NamedTuple):
    """Numbers that a layer needs of every token for the next one, beside its key and value.

    name: of the stream; a policy that reads a running one needs it by this name.
    running: whether later queries change it. It is `LayerOutput.state` then, a number per selector
        and key (`"F"` is how strongly a token is masked). Else `Layer.rows` makes it, once.
    """

    name: str
    running: bool = False


class LayerInputs(NamedTuple):
    """Inputs of a layer beside queries, keys and values: those its `needs` name, else `None`.

    input: the attention module's input, `[B, T, E]`; of the new tokens, where a cache holds others.
    source: in cross-attention what keys and values are made of, `[B, Tk, Es]`.
    token_ids: ids of the same tokens, `[B, T]`.
    positions: their positions, `[B or 1, T]`.
    state: what an earlier call returned as `LayerOutput.state`, for the first `Ts` keys, `[B, S,
        Ts]`; `None` at the first token.
    rows: what `Layer.rows` gave for all keys, those of earlier calls first, each `[B, S, Tk, Ds]`;
        `None` where the call holds all tokens.
    rotation: the rotary embedding, with the positions; `None` where the model has none.
    shared: what the layers of one forward pass keep for each other.
    bias: what the model's family adds to the logits that enter the softmax, `[1 or B, 1 or H, Tq,
        Tk]`: T5's relative position bias. Always handed over: a layer that does
        not add it (no `"bias"` in `takes`) does not support such a family.
    softcap: where the family caps its logits (Gemma 2), the largest size of one before the bias is
        added. Handed over like the bias, to layers that cap (`"softcap" in takes`).
    sinks: where the family has them (GPT-OSS), a logit per query head in the softmax's sum alone,
        `[H]`. Handed over like the bias, to layers that have sinks (`"sinks" in takes`).
    newest: the newest tokens as they are, the new ones last, of a layer with a tail of keys, whose
        keys are then what `Layer.cached_keys` made of all. `None` where the call holds all tokens.
    dropout: while a model trains with attention dropout, the share of weights to drop. Handed over
        like the bias, to layers that drop (`"dropout" in takes`).
    new: in a step of a cache, of few queries and without gradients or autocast, how many of the
        last queries are of new tokens. The outputs of these alone are read, and nothing needs a
        check. `None` in every other call.
    """

    input: Float[Tensor, "B T E"] | None = None
    source: Float[Tensor, "B Tk Es"] | None = None
    token_ids: Int[Tensor, "B T"] | None = None
    positions: Int[Tensor, "#B T"] | None = None
    state: Float[Tensor, "B S Ts"] | None = None
    rows: Mapping[str, Float[Tensor, "B S Tk Ds"]] | None = None
    rotation: Rotation | None = None
    shared: Shared | dict | None = None
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " H"] | None = None
    dropout: float = 0.0
    newest: Newest | None = None
    new: int | None = None

    def before(self, later: int, tokens: int) -> "LayerInputs":
        """Inputs of `tokens` of the new tokens that are followed by `later` ones."""
        if self.newest is not None:
            rest = self._replace(newest=None).before(later, tokens)
            return rest._replace(newest=self.newest.before(later))
        if self.bias is not None:
            rows, keys = (n - later for n in self.bias.shape[2:])
            own = self.bias[:, :, max(0, rows - tokens) : rows, :keys]
            return self._replace(bias=None).before(later, tokens)._replace(bias=own)

        def cut(x: Tensor) -> Tensor:
            stop = x.shape[1] - later
            return x[:, max(0, stop - tokens) : stop]

        return self._replace(**{name: cut(x) for name, x in self._per_token()})

    def terms(
        self, q: Float[Tensor, "B H Tq D"], visibility: Visibility | None, scale: float | None
    ) -> Terms:
        """The operators' terms in a call with these queries, unchecked and without dropout."""
        visibility = Visibility() if visibility is None else visibility
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return Terms(visibility, scale, self.bias, self.softcap, self.sinks)

    def with_bias(self, bias: Float[Tensor, "#B #H Tq Tk"]) -> "LayerInputs":
        """The same, with this beside what the family adds to the logits."""
        return self._replace(bias=bias if self.bias is None else self.bias + bias)

    def joined(self, more: "LayerInputs") -> "LayerInputs":
        """Inputs of these tokens and those of the next call; the rest is that call's."""
        first, second = dict(self._per_token()), dict(more._per_token())
        both = first.keys() & second.keys()
        return more._replace(**{x: torch.cat([first[x], second[x]], dim=1) for x in both})

    def _per_token(self) -> list[tuple[str, Tensor]]:
        names = ("input", "token_ids", "positions")
        return [(name, x) for name in names if (x := getattr(self, name)) is not None]


NO_INPUTS = LayerInputs()


class GroupingReport(NamedTuple):
    """Statistics of the groups of one forward pass, for training.

    loss: how far the mean size of a group is from the target; has a gradient.
    size: the mean size of a group.
    target: what it should be.
    """

    loss: Float[Tensor, ""]
    size: Float[Tensor, ""]
    target: int


class LayerOutput(NamedTuple):
    """Result of a layer.

    output: `[B, H, Tq, D]`, in the shape of the model's heads.
    state: what the next tokens need to go on from here, one number per key, `[B, S, Tk]`; `None` if
        keys and values (and what `Layer.rows` gave) are all.
    memory: per query what a memory loss adds up, `[B, Tq]`; `None` unless the layer has a `tau`.
    grouping: what is said of the groups that this layer made; `None` unless it learns them.
    """

    output: Float[Tensor, "B H Tq D"]
    state: Tensor | None = None
    memory: Float[Tensor, "B Tq"] | None = None
    grouping: GroupingReport | None = None


class Maps(NamedTuple):
    """Attention matrices of a layer, dense: for inspection.

    weights: the maps that multiply the values, `[B, H, Tq, Tk]` (differential: one per pair).
    masking: how much token p masks token j from later ones, `[B, Hs, Tq, Tk]`; `None` without.
    groups: which token belongs to which group; `None` without.
    """

    weights: Float[Tensor, "B H Tq Tk"]
    masking: Float[Tensor, "B Hs Tq Tk"] | None = None
    groups: Groups | None = None


class Step(NamedTuple):
    """A map on the way to those that multiply the values.

    name: what has been done up to here, for people.
    map: `[B, H, Tq, Tk]`; logits are minus infinity where nothing is seen.
    logits: whether these come before the softmax.
    """

    name: str
    map: Float[Tensor, "B H Tq Tk"]
    logits: bool


class ModuleInfo(NamedTuple):
    """Properties of the attention module that a layer is in, set by the integration.

    terms: what the module's family does to its logits and weights.
    own_cache: whether the module has a layer of a cache to itself.
    attends: whether the layer computes the module's attention; else the family's function does, and
        the layer only says which tokens a cache evicts.
    """

    terms: frozenset[Term] = frozenset()
    own_cache: bool = True
    attends: bool = True


class Layer(nn.Module):
    """Base of all mechanisms' layers: attention on queries, keys and values of one module.

    The constructor initialises every parameter. The caller (the integration with transformers, a
    model of one's own) provides what the attributes declare and guesses nothing.

    The mechanism declares, on its class or in its constructor:

    roles: where the mechanism is defined; in others it raises.
    takes: which of the family's terms `forward` applies, from `inputs`.
    needs: what `forward` gets in `inputs`.
    streams: what a cache keeps per token beside K and V; at most one of them is running.
    tails: on how many earlier rows of `"queries"` the newest output depends, and of `"keys"` as
        they are. With a tail of keys, a cache keeps what `cached_keys` makes of keys, and of the
        newest tokens the keys as well.
    newest_keys: of how many of the newest tokens a cache must have all, in order.
    keys_ahead: how many later tokens' keys change what `cached_keys` makes of one.
    keeps_first: whether the first token of a sequence must never leave a cache.
    window: how many tokens a query sees, itself included, whatever the model says; `None` for all.
    input_factor: what multiplies the input of the attention module and of the MLP beside it.
    any_heads: whether each head is computed from its own queries, keys and values alone, so that
        other heads than those of `shape` will do as well, as on one of several devices.
    reports_memory: whether `forward` returns memory while `tau` is set.
    summarises: whether it keeps summaries of tokens, and goes on from a cache made for these.
    learns_groups: whether `forward` returns what training needs to know of its groups.
    caches: whether it goes on from a cache at all; else a model with it has none.
    takes_steps: whether `forward` has a shorter way for a cache's steps, see `LayerInputs.new`.

    The integration sets once:

    host: what the attention module around it does.
    impl: which implementation runs; a choice for a machine, not of the mechanism.

    Training sets:

    tau: cap of the memory in `LayerOutput.memory`; `None` for no memory.
    """

    roles: frozenset[Role] = frozenset({"decoder"})
    takes: frozenset[Term] = frozenset()
    needs: frozenset[Need] = frozenset()
    streams: tuple[Stream, ...] = ()
    tails: Mapping[Tail, int] = MappingProxyType({})
    newest_keys: int = 0
    keys_ahead: int = 0
    keeps_first: bool = False
    window: int | None = None
    input_factor: float = 1.0
    any_heads: bool = False
    reports_memory: bool = False
    summarises: bool = False
    learns_groups: bool = False
    caches: bool = True
    takes_steps: bool = False

    host: ModuleInfo = ModuleInfo()
    impl: Impl = "auto"
    tau: float | None = None

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def plain_cache(self) -> bool:
        """True if keys and values are all that the next token needs."""
        return not (any(self.tails.values()) or self.streams or self.summarises)

    def in_step(self, inputs: LayerInputs) -> bool:
        """Test for a cache's step, in which the dense form of few queries runs unchecked."""
        dense = self.impl in ("auto", "tiled", "composed")
        return dense and inputs.new is not None and not inputs.dropout

    @property
    def running(self) -> str | None:
        """Name of the stream that is `LayerOutput.state`; `"F"` where tokens mask earlier ones."""
        return next((x.name for x in self.streams if x.running), None)

    def rows(self, inputs: LayerInputs) -> dict[str, Float[Tensor, "B S T Ds"]]:
        """The other streams of these tokens, by name; a cache joins them along the tokens."""
        return {}

    def cached_keys(
        self, k: Float[Tensor, "B Hk T D"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B heads T W"]:
        """Form the keys that a cache keeps, from these and those around them.

        Arguments:
            k: after the rotary embedding.
            segments: the document of each, negative for padding; `None` where all are of one.
        """
        return k

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
        """Attention of the last `Tq` of the `Tk` tokens, as the operators have it.

        Arguments:
            q, k, v: after the rotary embedding; keys and values may have fewer heads.
            visibility: which keys each query sees; `None` is causal.
            scale: factor on the logits; default `D ** -0.5`.
            inputs: what `needs` names, the bias, the soft cap and the sinks.
        """
        raise NotImplementedError

    def maps(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        inputs: LayerInputs = NO_INPUTS,
    ) -> Maps:
        """The attention maps of the same call, whole: for short rows."""
        raise NotImplementedError

    def steps(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        inputs: LayerInputs = NO_INPUTS,
    ) -> list[Step]:
        """The maps on the way to `Maps.weights`, in order, where the mechanism changes any."""
        return []


@runtime_checkable
class MechanismConfig(Protocol):
    """Configuration of a mechanism: a frozen dataclass, whose class name files know it by.

    Fields hold numbers, texts, flags, `None`, and tuples of these. It makes the layer of each
    attention module that it is given to.
    """

    def build(self, shape: HeadShape) -> Layer:
        """The layer for one attention module, with all parameters initialised."""


def check_inputs(layer: Layer, inputs: LayerInputs) -> None:
    """Raise unless the inputs hold everything that the layer needs, and no term that it ignores."""
    for name in sorted(TERMS - layer.takes):
        value = getattr(inputs, name)
        if value is not None and (name != "dropout" or value):
            raise UserError(
                f"inputs.{name} must be left out for {type(layer).__name__}, which does not apply "
                "it; take another mechanism"
            )
    for name in LayerInputs._fields:
        if name in layer.needs - {"rotation"} and getattr(inputs, name) is None:
            raise UserError(
                f"{type(layer).__name__} needs {name} beside q, k and v: pass inputs=LayerInputs("
                f"{name}=...)"
            )


def check_defaults(visibility: Visibility, names: tuple[str, ...], reason: str) -> None:
    """Raise where a visibility says more than the layer supports; `reason` says why, and what to
    do."""
    for name in names:
        value = getattr(visibility, name)
        if value is not getattr(Visibility(), name):
            raise UserError(f"visibility.{name} must be its default, got {value}: {reason}")


def parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter of a mechanism; in fp32, whatever the model's precision."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32))
