"""The class of a converted model: generates with caches of heedful, saves the mechanism with it."""

import copy
import functools
import warnings

from transformers import Cache, PreTrainedModel
from transformers.generation import GenerationMode

from heedful.checks import UserError
from heedful.hf.adapters import warn_if_left_behind
from heedful.hf.attention import IMPLEMENTATION, register_attention
from heedful.hf.cache.new import (
    EncoderDecoderKVCache,
    attention_layers,
    attention_modules,
    end_past_recording,
    expect_prompt,
    new_cache,
    prepare,
)
from heedful.hf.cache.places import cache_places, stock_layers
from heedful.hf.family.modules import layers_of
from heedful.hf.save import save_converted
from heedful.hf.versions import (
    OwnCacheInGenerate,
    cache_among,
    cache_of,
    generate_options,
    makes_dynamic_cache,
    mark_as_given,
)


class ConvertedModel(OwnCacheInGenerate):
    """Mixed into a family's model class: saves the mechanism, raises where it would be lost."""

    def generate(self, *args, **kwargs):
        """As the family's; without a cache where the family keeps its tokens in one of its own."""
        if not caches(self):
            kwargs = without_cache(kwargs)
        kwargs = generate_options(kwargs)
        given = cache_among(kwargs)
        recorded = any(layer.record_past for layer in attention_layers(given))
        output = super().generate(*args, **kwargs)
        if not recorded and not _is_assistant(self, kwargs):
            for cache in (given, cache_of(output)):
                end_past_recording(cache)
        return output

    def cache_for_generate(
        self, generation_config, cache: Cache | None, mode, prompt: int | None
    ) -> Cache | None:
        """A cache of heedful where transformers would make a dynamic one."""
        own = self._own_cache(generation_config, cache, mode)
        for part in (cache, own):
            expect_prompt(part, prompt or 0)
        return own

    def _own_cache(self, generation_config, cache: Cache | None, mode) -> Cache | None:
        """As `cache_for_generate`, before the cache knows of the prompt."""
        kinds = (None, "dynamic", "offloaded")
        implementation = generation_config.cache_implementation
        ours = generation_config.use_cache is not False and caches(self, exactly=True)
        if cache is not None and ours:
            if attends(self):
                prepare(cache, self)
            if mode != GenerationMode.ASSISTED_GENERATION and not generation_config.is_assistant:
                end_past_recording(cache)
            if isinstance(cache, EncoderDecoderKVCache) and implementation is None:
                mark_as_given(cache)
                return cache
        elif ours and implementation in kinds:
            new = new_cache(self, offloading=implementation == "offloaded")
            if generation_config.is_assistant:
                new.activate_past_recording()
            return new
        elif implementation not in kinds and attends(self):
            raise UserError(
                f"cache_implementation={implementation!r} is not supported by a converted model: "
                "its cache grows (static ones do not) and keeps more than keys and values "
                "(quantized ones do not; heedful.new_cache(model, dtype=torch.int8) quantizes); "
                "leave it out, or 'offloaded'"
            )
        return None

    def generate_batch(self, *args, **kwargs) -> None:
        """Not supported: continuous batching puts another attention and another cache in place."""
        raise UserError(
            "generate_batch (continuous batching) has an attention and a cache of its own, which "
            "would switch the mechanism off; call generate() with a padded batch, or "
            "heedful.revert(model) first"
        )

    init_continuous_batching = generate_batch

    def train(self, mode: bool = True):
        """As torch's; warns where an adapter of PEFT would leave the mechanism behind."""
        if mode and "_heedful" in self.__dict__:
            warn_if_left_behind(self, list(self._heedful.parameters().values()))
        return super().train(mode)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return _empty, (family_of(self),), self.__getstate__()

    def save_pretrained(self, save_directory, **options) -> None:
        """Save in transformers' layout, with the mechanism in `config.json`; see `heedful.load`."""
        save_converted(self, family_of(self), super().save_pretrained, save_directory, options)

    def set_attn_implementation(self, attn_implementation, *args, **kwargs) -> None:
        """Raises where another implementation would switch the mechanism off."""
        if attends(self) and attn_implementation != IMPLEMENTATION:
            raise UserError(
                f"attn_implementation={attn_implementation!r} would switch the mechanism off "
                "silently; call heedful.revert(model) first"
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)


def attends(model: PreTrainedModel) -> bool:
    """Test whether the mechanism computes the model's attention, not only ranks cached tokens."""
    return all(layer.host.attends for layer in layers_of(model))


def _is_assistant(model: PreTrainedModel, options: dict) -> bool:
    """Test whether `generate` drafts for another model, which takes tokens back afterwards."""
    config = options.get("generation_config") or model.generation_config
    return bool(getattr(config, "is_assistant", False))


@functools.cache
def converted_class(base: type) -> type:
    """The class of converted models of a family."""
    return type(f"Heedful{base.__name__}", (ConvertedModel, base), {"__module__": __name__})


def family_of(model: ConvertedModel) -> type:
    """The family's own class of a converted model, whatever was put in front of it since."""
    order = type(model).__mro__
    return order[order.index(OwnCacheInGenerate) + 1]


def _empty(base: type) -> ConvertedModel:
    """An empty model of a converted class, which exists in no file that pickle could import."""
    register_attention()  # in a process that has converted nothing yet
    cls = converted_class(base)
    return cls.__new__(cls)


def caches(model: PreTrainedModel, *, exactly: bool = False) -> bool:
    """Test whether the model can continue from the state of earlier calls.

    With `exactly`, whether a cache of heedful can stand in for the family's own; without, also
    whether the family's own holds all that the mechanism needs.
    """
    modules = attention_modules(model)
    both = (*modules, *attention_modules(model, "cross"))
    if not exactly and not attends(model):
        return True
    if not all(module.heedful.caches for module in both):
        return False
    if not modules or (not exactly and all(module.heedful.plain_cache for module in both)):
        return True
    if not makes_dynamic_cache(model):
        return False
    try:
        cache_places(modules, stock_layers(model))
    except ValueError:
        return False
    return True


def without_cache(options: dict) -> dict:
    """Options of `generate` with `use_cache=False`; what needs a cache raises."""
    cache = {"cache": cache_among(options)}
    for name in ("cache", "assistant_model", "prompt_lookup_num_tokens"):
        if (options | cache).get(name) is not None:
            raise UserError(
                f"{name} needs a cache, and this family's own holds keys and values only, which is "
                f"not enough for this mechanism; generate without {name}"
            )
    config = options.get("generation_config")
    if getattr(config, "is_assistant", False):
        raise UserError(
            "assistant_model must have a cache, and its family's own is not enough for its "
            "mechanism; take a draft model with another mechanism"
        )
    if options.get("use_cache") or getattr(config, "use_cache", False):
        warnings.warn(
            "this family's cache is not enough for this mechanism, so generate goes on without "
            "one, as with use_cache=False: the same tokens, the whole sequence read again for each",
            stacklevel=3,
        )
    if config is None:
        return options | {"use_cache": False}
    config = copy.deepcopy(config)
    config.use_cache = False
    return {name: x for name, x in options.items() if name != "use_cache"} | {
        "generation_config": config
    }
