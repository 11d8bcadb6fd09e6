"""The KV cache of a converted model, as its users hold it.

Each attention layer has its part (cached_layer.py); what a budget lets go is chosen in eviction/.
"""

from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from heedful.hf.cached_layer import LayerCache
from heedful.hf.eviction import Eviction
from heedful.hf.families import attends_twice
from heedful.hf.slots import Meter
from heedful.hf.summary_cache import SummaryCache
from heedful.nn import Layer

_STOCK = (DynamicLayer, DynamicSlidingWindowLayer)


class KVCache(Cache):
    """What `new_cache` makes: a cache of transformers that knows its bytes."""

    def __init__(self, layers: list, meter: "Meter", offloading: bool = False) -> None:
        super().__init__(
            layers=layers, offloading=offloading, offload_only_non_sliding=not offloading
        )
        self.meter = meter

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache holds now, room for later tokens included."""
        return self.meter.held

    @property
    def peak_nbytes(self) -> int:
        """The most that they ever were, copies included while they were made."""
        return self.meter.peak

    @property
    def whole_nbytes(self) -> int:
        """What it would hold without eviction, and without room for later tokens."""
        return sum(layer.whole_nbytes for layer in self.layers if isinstance(layer, LayerCache))

    @property
    def tokens(self) -> list[int]:
        """How many tokens each attention layer holds."""
        return [layer.length for layer in self.layers if isinstance(layer, LayerCache)]

    def positions(self) -> list[Int[Tensor, "B n"]]:
        """Where the tokens that each attention layer holds stand in their rows, ascending."""
        return [layer.positions() for layer in self.layers if isinstance(layer, LayerCache)]


def new_cache(
    model: nn.Module,
    eviction: Eviction | Literal[False] | None = None,
    *,
    offloading: bool = False,
) -> KVCache:
    """An empty cache for a converted model, for `past_key_values=`.

    Arguments:
        model: a converted model.
        eviction: which tokens leave when a layer's budget is full; see `heedful.eviction`. `None`
            takes the budgets that came with the model (`budgets.json` in its folder), if any;
            `False` keeps everything.
        offloading: keep keys and values in the CPU's memory, but those of the layer at work.

    Raises:
        ValueError: the model is not converted, its family keeps its tokens in another way, or the
            policy cannot serve the mechanism.
    """
    attention = attention_modules(model)
    if not attention:
        raise ValueError("model must be converted; heedful.convert(model, 'standard') is enough")
    if eviction is None:
        eviction = getattr(getattr(model, "_heedful", None), "eviction", None)
    if eviction is not None and eviction is not False and not isinstance(eviction, Eviction):
        raise ValueError(
            f"eviction must be a policy such as heedful.eviction.StreamingLLM(tokens=256), None or "
            f"False, got {eviction!r}"
        )
    policy = eviction or None
    layers = list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)
    places = cache_places(attention, layers)
    budgets = [None] * len(places) if policy is None else policy.budgets(len(places))
    meter = Meter()
    for (index, module), tokens in zip(places.items(), budgets, strict=True):
        sliding = getattr(layers[index], "sliding_window", None)
        layers[index] = cache_for(module.heedful)(module.heedful, sliding, policy, tokens, meter)
    return KVCache(layers, meter, offloading)


def cache_for(layer: Layer) -> type[LayerCache]:
    """The kind of cache that a layer's mechanism goes on from."""
    return SummaryCache if layer.summarises else LayerCache


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention modules of a converted model, in order."""
    return [m for m in model.modules() if isinstance(getattr(m, "heedful", None), Layer)]


def cache_places(attention: list[nn.Module], layers: list) -> dict[int, nn.Module]:
    """Which layers of a stock cache the attention modules use; raises where they share or mix."""
    places: dict[int, nn.Module] = {}
    for module in attention:
        index = module.layer_idx
        kind = type(layers[index]).__name__ if index < len(layers) else "another layer's cache"
        if index in places or attends_twice(type(module)):
            kind = "a cache that it reads twice"
        elif index < len(layers) and type(layers[index]) in _STOCK:
            kind = ""
        if kind:
            raise ValueError(
                f"model: {type(module).__name__} {index} keeps its tokens in {kind}, which a cache "
                "of heedful cannot replace; leave past_key_values out"
            )
        places[index] = module
    return places


def prepare(cache: Cache, model: nn.Module) -> None:
    """Make an unused stock cache fit the model before anything is recorded in it."""
    for module in attention_modules(model):
        layer_cache(cache, module)


def end_past_recording(cache: Cache) -> None:
    """Let go again: assisted decoding leaves its cache waiting for what may be taken back."""
    for layer in cache.layers:
        if isinstance(layer, LayerCache):
            layer.end_past_recording()


def layer_cache(cache: Cache, module: nn.Module) -> "LayerCache | None":
    """The layer of a cache that an attention module uses, made into one of ours if need be.

    `None` where a stock layer does as well: a mechanism that needs keys and values alone, or the
    first call of a compiled model.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    index, layer, layers = module.layer_idx, module.heedful, cache.layers
    if cache.layer_class_to_replicate is not None:
        while len(layers) <= index:
            layers.append(cache.layer_class_to_replicate())
    found = layers[index] if index < len(layers) else None
    if isinstance(found, LayerCache):
        found.check_owner(layer)
        return found
    if type(found) in _STOCK and found.get_seq_length() == 0 and layer.own_cache:
        if torch.compiler.is_compiling():
            return None  # a graph can fill a stock layer; what needs more refuses to go on from it
        made = cache_for(layer)(layer, getattr(found, "sliding_window", None))
        if getattr(found, "record_past", False):
            made.activate_past_recording()
        layers[index] = made
        return made
    if type(found).__name__.startswith("Static"):
        raise ValueError(
            "past_key_values must not be a static cache: a converted model's cache grows; leave "
            "past_key_values and cache_implementation out, or pass heedful.new_cache(model)"
        )
    if "Quantized" in type(found).__name__:
        raise ValueError(
            "past_key_values must not be a quantized cache, which a converted model does not "
            "serve; leave cache_implementation out, or pass heedful.new_cache(model)"
        )
    if layer.plain_cache or (type(found) in _STOCK and found.get_seq_length() == 0):
        return None  # of an empty one nothing is needed yet
    raise ValueError(
        f"past_key_values holds keys and values only ({type(found).__name__}), and "
        f"{type(layer).__name__} needs more of earlier tokens ({_needs(layer)}): pass "
        "heedful.new_cache(model), or leave past_key_values out"
    )


def _needs(layer: Layer) -> str:
    rows = [f"{layer.past_queries} query rows"] if layer.past_queries else []
    summaries = ["summaries of groups"] if layer.summarises else []
    return ", ".join([*rows, *layer.keeps, *summaries])
