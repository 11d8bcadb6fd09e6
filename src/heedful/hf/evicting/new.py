"""The layers of an evicting cache for a model as it is, and what such a model must be."""

from collections.abc import Sequence

from torch import nn

from heedful.checks import UserError
from heedful.eviction import Eviction, Window
from heedful.eviction.policy import Budget
from heedful.hf.cache.counters import Meter
from heedful.hf.evicting.hiding import Hiding
from heedful.hf.evicting.layer import READ, EvictingLayer
from heedful.hf.evicting.slots import SlotMap
from heedful.hf.evicting.static import StaticLayer, StaticMap
from heedful.hf.family.modules import NAME, find_attention, parameter_device
from heedful.hf.versions import implementation_of
from heedful.nn import Layer

_SERVED = READ | {"F"}  # needs of a policy, beside attention
_STATIC = ("sdpa", "eager")  # implementations of attention whose masks are of queries and keys


def decoder_modules(model: nn.Module, policy: Eviction | None) -> list[nn.Module]:
    """The attention modules of an unconverted decoder, in order.

    Raises:
        ValueError: an evicting cache does not support it, or the policy needs a converted one.
    """
    if model.config.is_encoder_decoder:
        raise UserError(
            f"model: {type(model).__name__} is an encoder-decoder, whose cache needs a converted "
            "model; heedful.convert(model, 'standard') is enough"
        )
    if others := _not_served(policy):
        raise UserError(
            f"eviction: {type(policy).__name__} needs a converted model, as it reads "
            f"{', '.join(others)}; heedful.convert(model, 'standard') is enough for positions"
        )
    found = find_attention(model, "have a cache that evicts").values()
    modules = [x.module for x in found if x.role == "decoder"]
    if policy is not None and "F" in policy.needs:
        for module, tokens in zip(modules, policy.budgets(len(modules)), strict=True):
            if tokens is not None:
                policy.check(_selectors(module, policy))
    if not modules:
        raise UserError(
            f"model must have a decoder: {type(model).__name__} is an encoder, which keeps nothing "
            "between calls"
        )
    return modules


def needs_conversion(model: nn.Module, policy: Eviction | None) -> bool:
    """Test whether a cache needs a converted model: of encoder-decoders, or for what the policy
    reads."""
    return model.config.is_encoder_decoder or bool(_not_served(policy))


def _not_served(policy: Eviction | None) -> list[str]:
    """Needs of a policy that the cache of an unconverted model does not have."""
    needs = () if policy is None else policy.needs
    return [x for x in needs if x not in _SERVED and not isinstance(x, tuple)]


def evicting_layers(
    modules: Sequence[nn.Module],
    budgets: Sequence[Budget | None],
    windows: Sequence[int | None],
    slack: int,
    meter: Meter,
    int8: bool = False,
    static: bool = False,
) -> list[EvictingLayer]:
    """The cache's layer of every attention module.

    Arguments:
        modules: of an unconverted decoder.
        budgets: of each; `None` keeps all that the window shows.
        windows: how far back each one's queries see; `None` for all tokens.
        slack: how many tokens more may be cached between two evictions.
        meter: counts the whole cache's bytes.
        int8: whether tokens are kept in eight bits per number.
        static: whether shapes never change once there are tokens.
    """
    maps: dict[object, SlotMap] = {}
    layers: list[EvictingLayer] = []
    for module, budget, window in zip(modules, budgets, windows, strict=True):
        if budget is not None and window is not None and window <= budget.tokens:
            budget = None  # the window alone never keeps more
        room = slack
        if static and budget is None:
            budget, room = _of_window(window, module), 0
        if budget is not None and window is not None:
            _check_flash(module)
        device = parameter_device(module)
        same = (None if budget is None else budget.tokens, window, room, device)
        own = budget is not None and bool(budget.policy.needs)
        key = len(layers) if own else same
        first = key not in maps
        hiding = _hiding(module) if own and "F" in budget.policy.needs else None
        kind = StaticMap if static else SlotMap
        slot_map = maps.setdefault(key, kind(budget, window, room, hiding))
        kind = StaticLayer if static else EvictingLayer
        layers.append(kind(module.layer_idx, slot_map, first, meter, int8))
    if static:
        for layer in {layer.map: layer for layer in layers}.values():
            layer.last = True
    return layers


def check_static(model: nn.Module, modules: Sequence[nn.Module], policy: Eviction | None) -> None:
    """Raise unless a cache of fixed shapes can serve the model under the policy.

    Arguments:
        model: unconverted.
        modules: its attention modules.
        policy: of the cache.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    without = "make the cache with static=False"
    name = type(policy).__name__
    if policy is not None and policy.observes != 0:
        raise UserError(
            f"static: {name} reads attention weights, which a static cache does not; take a policy "
            f"such as StreamingLLM, KeyDiff or MostHidden, or {without}"
        )
    if policy is not None and policy.keep_prompt:
        raise UserError(
            f"static: {name} has keep_prompt=True, which a static cache does not support; {without}"
        )
    if getattr(getattr(model, "_heedful", None), "after_eviction", None) is not None:
        raise UserError(
            "static: the model has LoRA whose strength changes as tokens are evicted, which is not "
            f"supported; {without}"
        )
    config = model.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(
            f"static: {type(model).__name__} has layers of chunked attention, which a static cache "
            f"does not support; {without}"
        )
    for module in modules:
        implementation = implementation_of(module.config)
        if implementation not in _STATIC:
            raise UserError(
                f"static: the attention implementation must be one of {', '.join(_STATIC)}, got "
                f"{implementation!r}; model.set_attn_implementation('sdpa'), or {without}"
            )


def _of_window(window: int | None, module: nn.Module) -> Budget:
    """The budget of a layer of a static cache that caches its window and no more."""
    if window is None:
        raise UserError(
            f"static: layer {module.layer_idx} has no budget and keeps every token; give "
            "new_cache a policy with tokens for each layer, or make the cache with static=False"
        )
    return Budget(Window(tokens=window, sinks=0, recent=0), window)


def _selectors(module: nn.Module, policy: Eviction) -> Layer:
    """The layer beside an attention module, whose selectors rank its tokens."""
    layer = getattr(module, NAME, None)
    if layer is None:
        raise UserError(
            f"eviction: {type(policy).__name__} needs selectors, and this model has none: "
            "heedful.load(base, adapter=...) opens trained ones; or take another policy"
        )
    return layer


def _hiding(module: nn.Module) -> Hiding:
    """The sum F by the selectors beside a module."""
    layer = getattr(module, NAME)
    scale = getattr(module, "scaling", layer.shape.dim**-0.5)
    return Hiding(scale, layer.keeps_first)


def _check_flash(module: nn.Module) -> None:
    """Raise where a kernel counts its window along the cached tokens."""
    implementation = implementation_of(module.config) or ""
    if "flash" in implementation:
        raise UserError(
            f"model: {implementation} counts the window of layer {module.layer_idx} along the "
            "cached tokens, of which a budget evicts some; give the layer None tokens, or take "
            "attn_implementation='sdpa'"
        )
