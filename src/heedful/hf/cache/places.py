"""The layer of a cache that an attention module uses."""

import torch
from torch import nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from heedful.checks import UserError
from heedful.eviction.policy import Budget
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.crossing import BiasedLayerCache, CrossLayerCache
from heedful.hf.cache.filtered import FilteredKeysCache
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.summaries import SummaryCache
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.family.modules import attends_twice, attention_modules
from heedful.nn import Layer

_STOCK = (DynamicLayer, DynamicSlidingWindowLayer)


def stock_layers(model: nn.Module) -> list:
    """The layers of the cache that the decoder's family would make for itself."""
    config = model.config
    if config.is_encoder_decoder:  # its own; the whole model's may count the encoder's layers
        config = attention_modules(model)[0].config
    return list(DynamicCache(config=config.get_text_config(decoder=True)).layers)


def cache_for(
    module: nn.Module,
    sliding: int | None = None,
    budget: Budget | None = None,
    meter: Meter | None = None,
    int8: bool = False,
) -> LayerCache | SummaryCache:
    """The cache of one attention module, of the kind that its mechanism goes on from.

    Arguments:
        module: of a converted model.
        sliding, budget, meter, int8: as of any layer's cache.

    Raises:
        ValueError: the policy or the dtype does not support it.
    """
    check_caches(module.heedful)
    kind = LayerCache
    if module.heedful.summarises:
        kind = SummaryCache
    elif "bias" in module.heedful.host.terms:
        kind = BiasedLayerCache
    elif module.heedful.tails.get("keys"):
        kind = FilteredKeysCache
    return kind(module.heedful, sliding, budget, meter, int8)


def check_caches(layer: Layer) -> None:
    """Raise unless a layer supports a cache."""
    if not layer.caches:
        raise UserError(
            f"cache must be left out: {type(layer).__name__} does not support one; call the "
            "model with use_cache=False, and generate without a cache"
        )


def cache_places(attention: list[nn.Module], layers: list) -> dict[int, nn.Module]:
    """Attention module of each of the cache's layers; raises where they share or mix."""
    places: dict[int, nn.Module] = {}
    for module in attention:
        index = module.layer_idx
        kind = type(layers[index]).__name__ if index < len(layers) else "another layer's cache"
        if index in places or attends_twice(type(module)):
            kind = "a cache that it reads twice"
        elif index < len(layers) and type(layers[index]) in _STOCK:
            kind = ""
        if kind:
            raise UserError(
                f"model: {type(module).__name__} {index} keeps its tokens in {kind}, which a cache "
                "of heedful cannot replace; leave cache out"
            )
        places[index] = module
    return places


def layer_cache(cache: Cache, module: nn.Module) -> AttentionCache | None:
    """The layer of a cache that an attention module uses, made into one of ours if need be.

    `None` where a stock layer does as well: a mechanism that needs keys and values alone, or the
    first call of a compiled model.
    """
    layer, index = module.heedful, module.layer_idx
    if layer.shape.role == "cross":
        return _source_cache(getattr(cache, "cross_attention_cache", None), layer, index)
    cache = getattr(cache, "self_attention_cache", cache)
    part = _part(cache, index)
    if isinstance(part, AttentionCache):
        part.check_owner(layer)
        return part
    if _unused(part) and layer.host.own_cache:
        if torch.compiler.is_compiling():
            return None  # a graph can fill a stock layer; what needs more refuses to go on from it
        own = cache_for(module, getattr(part, "sliding_window", None))
        if getattr(part, "record_past", False):
            own.activate_past_recording()
        cache.layers[index] = own
        return own
    _check_grows(part)
    if layer.plain_cache or _unused(part):
        return None  # of an empty one nothing is needed yet
    raise UserError(
        f"the cache holds keys and values only ({type(part).__name__}), and "
        f"{type(layer).__name__} needs more of earlier tokens ({kept_beside(layer)}): pass "
        "heedful.new_cache(model), or leave cache out"
    )


def _source_cache(cache: Cache | None, layer: Layer, index: int) -> CrossLayerCache | None:
    """The layer of a cross-attention cache that a layer uses, as above."""
    part = _part(cache, index)
    if isinstance(part, CrossLayerCache):
        return part
    if layer.plain_cache:
        return None
    if _unused(part):
        if torch.compiler.is_compiling():
            return None
        cache.layers[index] = CrossLayerCache(layer)
        return cache.layers[index]
    raise UserError(
        f"the cache holds keys and values only of the source, and {type(layer).__name__} "
        f"needs more of earlier tokens ({kept_beside(layer)}): pass heedful.new_cache(model), or "
        "leave cache out"
    )


def _part(cache: Cache | None, index: int) -> CacheLayerMixin | None:
    """A layer of a cache; one that makes its layers as they are needed makes it now."""
    layers = getattr(cache, "layers", ())
    if getattr(cache, "layer_class_to_replicate", None) is not None:
        while len(layers) <= index:
            layers.append(cache.layer_class_to_replicate())
    return layers[index] if index < len(layers) else None


def _unused(part: CacheLayerMixin | None) -> bool:
    """Test whether it is a layer that transformers makes by default, without tokens."""
    return type(part) in _STOCK and part.get_seq_length() == 0


def _check_grows(part: CacheLayerMixin | None) -> None:
    """Raise for the layers of caches that a converted model does not support."""
    if isinstance(part, EvictingLayer):
        raise UserError(
            "the cache was made for a model that is not converted, and this one is; make one with "
            "heedful.new_cache(model)"
        )
    if type(part).__name__.startswith("Static"):
        raise UserError(
            "cache must not be a static cache: a converted model's cache grows; leave "
            "cache and cache_implementation out, or pass heedful.new_cache(model)"
        )
    if "Quantized" in type(part).__name__:
        raise UserError(
            "cache must not be a quantized cache of transformers, which a converted model does not "
            "serve; pass heedful.new_cache(model, dtype=torch.int8)"
        )


def kept_beside(layer: Layer) -> str:
    """Name what a layer needs of earlier tokens beside keys and values."""
    tails = [f"the newest {count} {name}" for name, count in layer.tails.items() if count]
    summaries = ["summaries of groups"] if layer.summarises else []
    return ", ".join([*tails, *(x.name for x in layer.streams), *summaries])
