"""The KV cache of a converted model, as its users hold it.

Each attention layer has its part (cached_layer.py); what a budget lets go is chosen in eviction/.
"""

from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from heedful.eviction import Eviction
from heedful.hf.cache.crossing import BiasedLayerCache, CrossLayerCache
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.slots import Meter
from heedful.hf.cache.summaries import SummaryCache
from heedful.hf.family.modules import attends_twice
from heedful.nn import HeadShape, Layer, Role

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
        ours = (LayerCache, CrossLayerCache)
        return sum(layer.whole_nbytes for layer in self.layers if isinstance(layer, ours))

    @property
    def tokens(self) -> list[int]:
        """How many tokens each attention layer holds."""
        return [layer.length for layer in self.layers if isinstance(layer, LayerCache)]

    def positions(self) -> list[Int[Tensor, "B n"]]:
        """Where the tokens that each attention layer holds stand in their rows, ascending."""
        return [layer.positions() for layer in self.layers if isinstance(layer, LayerCache)]


class EncoderDecoderKVCache(EncoderDecoderCache):
    """What `new_cache` makes for an encoder-decoder: two caches that count their bytes together."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that both caches hold now."""
        return self.self_attention_cache.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that they ever were."""
        return self.self_attention_cache.peak_nbytes

    @property
    def whole_nbytes(self) -> int:
        """What they would hold without eviction."""
        return sum(x.whole_nbytes for x in (self.self_attention_cache, self.cross_attention_cache))

    @property
    def tokens(self) -> list[int]:
        """How many tokens of the target each layer holds."""
        return self.self_attention_cache.tokens

    def positions(self) -> list[Int[Tensor, "B n"]]:
        """Where these stand in their rows, ascending."""
        return self.self_attention_cache.positions()

    def check_dynamic_cache(self, method: str) -> None:
        """Every method is there."""

    def activate_past_recording(self) -> None:
        for cache in (self.self_attention_cache, self.cross_attention_cache):
            cache.activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens of the target."""
        for cache in (self.self_attention_cache, self.cross_attention_cache):
            cache.crop(tokens_to_remove)


def new_cache(
    model: nn.Module,
    eviction: Eviction | Literal[False] | None = None,
    *,
    offloading: bool = False,
) -> KVCache | EncoderDecoderKVCache:
    """An empty cache for a converted model, for `cache=`.

    That of an encoder-decoder has two parts, `self_attention_cache` and `cross_attention_cache`;
    budgets are of the first.

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
    if not attention and attention_modules(model, "encoder"):
        raise ValueError(
            f"model must have a decoder: {type(model).__name__} is an encoder, which keeps nothing "
            "between calls"
        )
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
    layers = stock_layers(model)
    places = cache_places(attention, layers)
    budgets = [None] * len(places) if policy is None else policy.budgets(len(places))
    meter = Meter()
    for (index, module), tokens in zip(places.items(), budgets, strict=True):
        sliding = getattr(layers[index], "sliding_window", None)
        layers[index] = _kind_for(module)(module.heedful, sliding, policy, tokens, meter)
    own = KVCache(layers, meter, offloading)
    if not model.config.is_encoder_decoder:
        return own
    crossing = {m.layer_idx: m.heedful for m in attention_modules(model, "cross")}
    sources = [CrossLayerCache(crossing[index], meter) for index in sorted(crossing)]
    if sorted(crossing) != list(range(len(crossing))):
        raise ValueError(
            f"model: cross-attention of {type(model).__name__} stands in layers "
            f"{sorted(crossing)} only, which a cache of heedful does not serve; use_cache=False"
        )
    return EncoderDecoderKVCache(own, KVCache(sources, meter))


def attention_modules(model: nn.Module, role: Role = "decoder") -> list[nn.Module]:
    """The attention modules of a converted model that stand there, in order."""
    # PEFT puts a module of its own around a layer that it saves, which answers as the layer does.
    shapes = [(m, getattr(getattr(m, "heedful", None), "shape", None)) for m in model.modules()]
    return [m for m, shape in shapes if isinstance(shape, HeadShape) and shape.role == role]


def stock_layers(model: nn.Module) -> list:
    """The layers of the cache that the decoder's family would make for itself."""
    config = model.config
    if config.is_encoder_decoder:  # its own; the whole model's may count the encoder's layers
        config = attention_modules(model)[0].config
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


def _kind_for(module: nn.Module) -> type[LayerCache]:
    """The kind of cache that a module's mechanism goes on from."""
    if module.heedful.summarises:
        return SummaryCache
    return BiasedLayerCache if "bias" in module.heedful.host.terms else LayerCache


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
                "of heedful cannot replace; leave cache out"
            )
        places[index] = module
    return places


def prepare(cache: Cache, model: nn.Module) -> None:
    """Make an unused stock cache fit the model before anything is recorded in it."""
    for module in (*attention_modules(model), *attention_modules(model, "cross")):
        layer_cache(cache, module)


def end_past_recording(cache: Cache) -> None:
    """Let go again: assisted decoding leaves its cache waiting for what may be taken back."""
    own = getattr(cache, "self_attention_cache", cache)
    sources = getattr(cache, "cross_attention_cache", None)
    for layer in (*own.layers, *getattr(sources, "layers", ())):
        if isinstance(layer, LayerCache | CrossLayerCache):
            layer.end_past_recording()


def layer_cache(cache: Cache, module: nn.Module) -> "LayerCache | CrossLayerCache | None":
    """The layer of a cache that an attention module uses, made into one of ours if need be.

    `None` where a stock layer does as well: a mechanism that needs keys and values alone, or the
    first call of a compiled model.
    """
    if module.heedful.shape.role == "cross":
        return _of_source(cache, module)
    cache = getattr(cache, "self_attention_cache", cache)
    index, layer, layers = module.layer_idx, module.heedful, cache.layers
    if cache.layer_class_to_replicate is not None:
        while len(layers) <= index:
            layers.append(cache.layer_class_to_replicate())
    found = layers[index] if index < len(layers) else None
    if isinstance(found, LayerCache):
        found.check_owner(layer)
        return found
    if type(found) in _STOCK and found.get_seq_length() == 0 and layer.host.own_cache:
        if torch.compiler.is_compiling():
            return None  # a graph can fill a stock layer; what needs more refuses to go on from it
        made = _kind_for(module)(layer, getattr(found, "sliding_window", None))
        if getattr(found, "record_past", False):
            made.activate_past_recording()
        layers[index] = made
        return made
    if type(found).__name__.startswith("Static"):
        raise ValueError(
            "cache must not be a static cache: a converted model's cache grows; leave "
            "cache and cache_implementation out, or pass heedful.new_cache(model)"
        )
    if "Quantized" in type(found).__name__:
        raise ValueError(
            "cache must not be a quantized cache, which a converted model does not "
            "serve; leave cache_implementation out, or pass heedful.new_cache(model)"
        )
    if layer.plain_cache or (type(found) in _STOCK and found.get_seq_length() == 0):
        return None  # of an empty one nothing is needed yet
    raise ValueError(
        f"the cache holds keys and values only ({type(found).__name__}), and "
        f"{type(layer).__name__} needs more of earlier tokens ({kept_beside(layer)}): pass "
        "heedful.new_cache(model), or leave cache out"
    )


def _of_source(cache: Cache, module: nn.Module) -> CrossLayerCache | None:
    """The layer of a cache that a cross-attention module uses, as above."""
    index, layer = module.layer_idx, module.heedful
    sources = getattr(cache, "cross_attention_cache", None)
    layers = getattr(sources, "layers", ())
    if getattr(sources, "layer_class_to_replicate", None) is not None:
        while len(layers) <= index:
            layers.append(sources.layer_class_to_replicate())
    found = layers[index] if index < len(layers) else None
    if isinstance(found, CrossLayerCache) or layer.plain_cache:
        return found if isinstance(found, CrossLayerCache) else None
    if type(found) in _STOCK and found.get_seq_length() == 0:
        if torch.compiler.is_compiling():
            return None
        layers[index] = CrossLayerCache(layer)
        return layers[index]
    raise ValueError(
        f"the cache holds keys and values only of the source, and {type(layer).__name__} "
        f"needs more of earlier tokens ({kept_beside(layer)}): pass heedful.new_cache(model), or "
        "leave cache out"
    )


def kept_beside(layer: Layer) -> str:
    """What a layer needs of earlier tokens beside keys and values, in words."""
    rows = [f"{layer.past_queries} query rows"] if layer.past_queries else []
    inputs = [f"{layer.past_inputs} tokens' rows"] if layer.past_inputs else []
    summaries = ["summaries of groups"] if layer.summarises else []
    return ", ".join([*rows, *inputs, *layer.keeps, *summaries])
