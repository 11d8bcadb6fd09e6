"""The KV cache of a converted model, as its users have it.

Each attention layer has its part (base.py); eviction/ chooses what leaves under a budget.
"""

from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, EncoderDecoderCache

from heedful.checks import UserError, check_whole
from heedful.eviction import Eviction
from heedful.eviction.policy import layer_budgets
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.crossing import CrossLayerCache
from heedful.hf.cache.file import fill, policy_of, read_cache, write_cache
from heedful.hf.cache.int8 import is_int8
from heedful.hf.cache.owner import Reference
from heedful.hf.cache.places import cache_for, cache_places, layer_cache, stock_layers
from heedful.hf.evicting.hook import install
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.evicting.new import check_static, decoder_modules, evicting_layers
from heedful.hf.evicting.proof import prove
from heedful.hf.family.modules import attention_modules, parameter_device


class KVCache(Cache):
    """The cache that `new_cache` makes: one of transformers, with its size in bytes."""

    def __init__(self, layers: list, meter: Meter, offloading: bool = False) -> None:
        super().__init__(
            layers=layers, offloading=offloading, offload_only_non_sliding=not offloading
        )
        self.meter, self.model = meter, Reference(None)

    def save(self, path: str | PathLike) -> None:
        """Write what is cached as one file of safetensors, whole or not at all.

        `heedful.load_cache` opens it with the same model. The file has no room for later tokens.

        Arguments:
            path: the file.

        Raises:
            ValueError: a layer keeps more than tokens one by one (grouped attention), calls may be
                taken back, the policy has an argument that JSON has no form for, or the cache was
                unpickled.
        """
        write_cache(Path(path), self.layers, self.model())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that the cache has now, room for later tokens included."""
        return self.meter.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that `nbytes` has been, temporary copies included."""
        return self.meter.peak_nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes that it would take without eviction and reserve, in the model's own precision.

        `bf16_nbytes` is what compression is counted against.
        """
        return sum(layer.whole_nbytes for layer in self._attention_layers)

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of a full bfloat16 cache of the same tokens without reserve."""
        return sum(layer.bf16_nbytes for layer in self._attention_layers)

    @property
    def contents_nbytes(self) -> int:
        """Bytes of what is cached, without room for later tokens."""
        return self.nbytes - sum(layer.reserve_nbytes for layer in self._attention_layers)

    @property
    def tokens(self) -> list[int]:
        """Number of tokens that each attention layer has cached."""
        return [layer.length for layer in self._attention_layers]

    def positions(self) -> list[Int[Tensor, "B n"]]:
        """Positions of each attention layer's cached tokens in their sequences, ascending."""
        return [layer.positions() for layer in self._attention_layers]

    @property
    def _attention_layers(self) -> list[AttentionCache | EvictingLayer]:
        return attention_layers(self)


class EncoderDecoderKVCache(EncoderDecoderCache):
    """Cache of an encoder-decoder, by `new_cache`: two caches that count their bytes together."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of both caches now."""
        return self.self_attention_cache.nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that they ever were."""
        return self.self_attention_cache.peak_nbytes

    @property
    def whole_nbytes(self) -> int:
        """Bytes that they would take without eviction, in the model's own precision."""
        return sum(x.whole_nbytes for x in (self.self_attention_cache, self.cross_attention_cache))

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of full bfloat16 caches of the same tokens without reserve."""
        return sum(x.bf16_nbytes for x in (self.self_attention_cache, self.cross_attention_cache))

    @property
    def contents_nbytes(self) -> int:
        """Bytes of what is cached, without room for later tokens."""
        caches = (self.self_attention_cache, self.cross_attention_cache)
        return self.nbytes - sum(y.reserve_nbytes for x in caches for y in x._attention_layers)

    @property
    def tokens(self) -> list[int]:
        """Number of tokens of the target that each layer has cached."""
        return self.self_attention_cache.tokens

    def positions(self) -> list[Int[Tensor, "B n"]]:
        """Positions of these in their sequences, ascending."""
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
    slack: int = 0,
    static: bool = False,
    dtype: torch.dtype | None = None,
    offloading: bool = False,
    verify: bool = True,
) -> KVCache | EncoderDecoderKVCache:
    """An empty cache for `cache=`, of a converted model or of a decoder of transformers as it is.

    A model that is not converted keeps its own attention, to the last bit until the first eviction.
    Its attention modules get a hook each (`heedful.hf.evicting.hook`), which leaves other caches
    alone. The cache of a converted encoder-decoder has two parts, `self_attention_cache` and
    `cross_attention_cache`; budgets and the dtype are of the first.

    Arguments:
        model: a model of transformers.
        eviction: which tokens leave when a layer's budget is full; see `heedful.eviction`. `None`
            takes the budgets that came with the model (`budgets.json` in its folder), if any;
            `False` keeps everything.
        slack: how many tokens more than its budget's a layer may cache before it evicts all of
            these at once; a query then attends to at most `tokens + slack`. Only of a model that is
            not converted.
        static: make tensors of `tokens + slack` slots whose shapes never change, so that a decoded
            token is one graph of `torch.compile` for any length. Only of a model that is not
            converted, under a policy that reads no attention weights and has a budget for every
            layer without a window of its own.
        dtype: `torch.int8` quantizes the cached tokens; by default they stay as the
            model computes them.
        offloading: keep keys and values in the CPU's memory, but those of the layer at work.
        verify: prove by a few tokens, when a model that is not converted gets its first cache, that
            its family is supported exactly.

    Returns:
        The cache; of an encoder-decoder, an `EncoderDecoderKVCache`.

    Raises:
        ValueError: the policy needs a converted model, the family keeps its tokens in another way
            or is not proven to be supported, the policy or the dtype does not support the
            mechanism, or nothing of the model is on a CUDA device to offload from.
    """
    int8 = is_int8(dtype)
    if offloading and "cuda" not in (devices := _device_types(model)):
        raise UserError(
            f"offloading=True (cache_implementation='offloaded') needs a model on a CUDA device, "
            f"this one is on {', '.join(sorted(devices))}; leave it out"
        )
    attention = attention_modules(model)
    if not attention and attention_modules(model, "encoder"):
        raise UserError(
            f"model must have a decoder: {type(model).__name__} is an encoder, which keeps nothing "
            "between calls"
        )
    policy = _policy(model, eviction)
    check_whole("slack", slack, 0)
    if not isinstance(static, bool):
        raise UserError(f"static must be True or False, got {static!r}")
    if static and offloading:
        raise UserError(
            "static must be False with offloading=True, which moves tensors that a compiled graph "
            "would look for; leave one of them out"
        )
    if not attention or not attention[0].heedful.host.attends:
        return _unconverted(model, policy, slack, static, int8, offloading, verify)
    if slack:
        raise UserError(
            f"slack must be 0 for a converted model, got {slack}; it is for models as they are"
        )
    if static:
        raise UserError(
            "static must be False for a converted model, whose cache grows; it is for models as "
            "they are"
        )
    layers = stock_layers(model)
    places = cache_places(attention, layers)
    budgets = layer_budgets(policy, len(places))
    meter = Meter()
    for (index, module), budget in zip(places.items(), budgets, strict=True):
        sliding = getattr(layers[index], "sliding_window", None)
        layers[index] = cache_for(module, sliding, budget, meter, int8)
    own = KVCache(layers, meter, offloading)
    own.model = Reference(model)
    if not model.config.is_encoder_decoder:
        return own
    return EncoderDecoderKVCache(own, KVCache(_source_layers(model, meter), meter))


def _unconverted(
    model: nn.Module,
    policy: Eviction | None,
    slack: int,
    static: bool,
    int8: bool,
    offloading: bool,
    verify: bool,
) -> KVCache:
    """The cache of a model of transformers as it is; arguments as of `new_cache`."""
    placements, layers = unconverted_placements(model, policy), stock_layers(model)
    modules, windows = [x.module for x in placements], [x.window for x in placements]
    places = {module.layer_idx: module for module in modules}
    if static:
        check_static(model, modules, policy)
    budgets, meter = layer_budgets(policy, len(modules)), Meter()
    parts = evicting_layers(modules, budgets, windows, slack, meter, int8, static)
    observed = policy is not None and policy.observes != 0
    hooks = install(places, observed)
    if verify:
        prove(model, places, windows, hooks, observed, static)
    for index, part in zip(places, parts, strict=True):
        layers[index] = part
    cache = KVCache(layers, meter, offloading)
    cache.model = Reference(model)
    return cache


class Placement(NamedTuple):
    """An attention module of a decoder as it is, and how far back its queries see."""

    module: nn.Module
    window: int | None


def unconverted_placements(model: nn.Module, policy: Eviction | None) -> list[Placement]:
    """The attention modules of a decoder as it is, each of which has a layer of a cache to itself.

    Raises:
        ValueError: the policy needs a converted model, or the family keeps its tokens in another
            way.
    """
    modules = decoder_modules(model, policy)
    layers = stock_layers(model)
    places = cache_places(modules, layers)
    if others := sorted({type(x).__name__ for i, x in enumerate(layers) if i not in places}):
        raise UserError(
            f"model: {type(model).__name__} has layers that keep their tokens in "
            f"{', '.join(others)}, which a cache of heedful cannot replace; leave cache out"
        )
    return [Placement(x, getattr(layers[i], "sliding_window", None)) for i, x in places.items()]


def load_cache(
    path: str | PathLike,
    model: nn.Module,
    eviction: Eviction | None = None,
    *,
    offloading: bool = False,
    verify: bool = True,
) -> KVCache:
    """A cache from a file of `KVCache.save`, which goes on bit for bit as the one that was saved.

    Arguments:
        path: the file.
        model: that the cache was made with: the same weights in the same precision, the same
            adapter, mechanism and configuration.
        eviction: the policy of the cache, where it is one of your own; one of heedful's is in the
            file.
        offloading, verify: as of `new_cache`.

    Returns:
        The cache. A copy of it for each question (`copy.deepcopy`) leaves it as it is.

    Raises:
        ValueError: there is no such file, it is damaged, of another version or another model, or
            its policy is another, or one of your own that is not handed over.
    """
    contents = read_cache(Path(path), model)
    policy = policy_of(contents, eviction)
    dtype = torch.int8 if contents.int8 else None
    cache = new_cache(
        model, policy or False, slack=contents.slack, dtype=dtype, offloading=offloading,
        verify=verify,
    )  # fmt: skip
    unconverted = isinstance(cache.layers[0], EvictingLayer)
    modules = decoder_modules(model, policy) if unconverted else attention_modules(model)
    fill(cache.layers, contents, [parameter_device(x) for x in modules])
    if offloading:
        for layer in cache.layers[1:]:  # the first is the next one at work
            layer.offload()
    return cache


def _device_types(model: nn.Module) -> set[str]:
    return {p.device.type for p in model.parameters()}


def _policy(model: nn.Module, eviction: object) -> Eviction | None:
    """The policy that `new_cache` was called with, or the model's own."""
    if eviction is None:
        eviction = getattr(getattr(model, "_heedful", None), "eviction", None)
    if eviction is not None and eviction is not False and not isinstance(eviction, Eviction):
        raise UserError(
            f"eviction must be a policy such as heedful.eviction.StreamingLLM(tokens=256), None or "
            f"False, got {eviction!r}"
        )
    return eviction or None


def _source_layers(model: nn.Module, meter: Meter) -> list[CrossLayerCache]:
    """The layers of an encoder-decoder's cross-attention cache."""
    crossing = {m.layer_idx: m.heedful for m in attention_modules(model, "cross")}
    if sorted(crossing) != list(range(len(crossing))):
        raise UserError(
            f"model: cross-attention of {type(model).__name__} stands in layers "
            f"{sorted(crossing)} only, which a cache of heedful does not support; use_cache=False"
        )
    return [CrossLayerCache(crossing[index], meter) for index in sorted(crossing)]


def prepare(cache: Cache, model: nn.Module) -> None:
    """Make an unused stock cache fit the model before anything is recorded in it."""
    for module in (*attention_modules(model), *attention_modules(model, "cross")):
        layer_cache(cache, module)


def end_past_recording(cache: Cache) -> None:
    """Evict again: assisted decoding leaves its cache waiting for what may be taken back."""
    for layer in attention_layers(cache):
        layer.end_past_recording()


def expect_prompt(cache: Cache, tokens: int) -> None:
    """Let a cache know that the prompt has so many tokens, in calls of any size."""
    for layer in attention_layers(cache):
        layer.counters.expected = tokens


def attention_layers(cache: Cache | None) -> list[AttentionCache | EvictingLayer]:
    """The layers of a cache that are heedful's, those of a source included."""
    own = getattr(cache, "self_attention_cache", cache)
    sources = getattr(cache, "cross_attention_cache", None)
    layers = (*getattr(own, "layers", ()), *getattr(sources, "layers", ()))
    return [layer for layer in layers if isinstance(layer, AttentionCache | EvictingLayer)]
