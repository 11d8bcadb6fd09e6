"""Give a transformers model another attention mechanism, and take it back."""

import copy
import functools
import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode

from heedful.eviction import Eviction
from heedful.hf.adapters import holds_adapter, warn_if_left_behind
from heedful.hf.attention import (
    IMPLEMENTATION,
    NAME,
    ROTATION,
    after_attention,
    before_attention,
    register_attention,
)
from heedful.hf.auto_classes import register
from heedful.hf.cache.new import (
    EncoderDecoderKVCache,
    attention_modules,
    cache_places,
    end_past_recording,
    new_cache,
    prepare,
    stock_layers,
)
from heedful.hf.family.call import ForgetCall, ReadCall
from heedful.hf.family.modules import (
    Attention,
    adds_bias,
    caps_logits,
    find_attention,
    find_mlp,
    has_sinks,
    head_shape,
    only_attention_mixes,
    parameter_device,
)
from heedful.hf.family.projections import DOORS, Door, doors
from heedful.hf.family.rotation import rotation_of
from heedful.hf.plan import Part, make_plan, settled
from heedful.hf.proof import prove
from heedful.hf.save import save_converted, set_use_cache, use_cache_settings
from heedful.hf.versions import (
    CacheName,
    OwnCacheInGenerate,
    cache_among,
    generate_options,
    implementation_of,
    makes_dynamic_cache,
    mark_as_given,
    newer_than_tested,
    set_implementation,
)
from heedful.nn import Layer, Mechanism, Role, Standard
from heedful.ops.impl import Impl, check_impl


@dataclass
class Conversion:
    """What `convert` did to a model.

    model: the converted model, the same object that was given.
    mechanisms: the layers' indices by mechanism; all others have standard attention.
    where: by mechanism, in which attention these layers have it: `"decoder"`, `"encoder"`,
        `"cross"`.
    eviction: what new caches of the model do without being told, as `budgets.json` says.
    """

    model: PreTrainedModel = field(repr=False)
    mechanisms: dict[Mechanism, tuple[int, ...]]
    where: dict[Mechanism, tuple[Role, ...]]
    _before: dict = field(repr=False)
    eviction: Eviction | None = None
    _budgets: str | None = field(default=None, repr=False)  # the text of that file

    @property
    def mechanism(self) -> Mechanism:
        """The one mechanism; raises where there are several."""
        if len(self.mechanisms) > 1:
            raise ValueError(
                "this model has several mechanisms: see conversion.mechanisms for their layers"
            )
        return next(iter(self.mechanisms))

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the converted layers."""
        return tuple(sorted(index for layers in self.mechanisms.values() for index in layers))

    def revert(self) -> PreTrainedModel:
        """Take the mechanisms out again; the model computes and saves what it did before."""
        return revert(self.model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The mechanisms' own parameters by name, to train alone or faster."""
        marked = f".{NAME}."
        return {name: p for name, p in self.model.named_parameters() if marked in name}


class _ScaledInput(NamedTuple):
    """A forward hook that multiplies a module's input; a class, so that models can be copied."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple) -> tuple:
        return inputs[0] * self.factor, *inputs[1:]


class ConvertedModel(OwnCacheInGenerate):
    """Mixed into a family's model class: saves the mechanism, refuses to lose it silently."""

    def generate(self, *args, **kwargs):
        """As the family's; without a cache where the family keeps its tokens in one of its own."""
        if not caches(self):
            kwargs = without_cache(kwargs)
        return super().generate(*args, **generate_options(kwargs))

    def cache_for_generate(self, generation_config, cache: Cache | None, mode) -> Cache | None:
        """A cache of ours where transformers would make a dynamic one."""
        kinds = (None, "dynamic", "offloaded")
        implementation = generation_config.cache_implementation
        ours = generation_config.use_cache is not False and caches(self, exactly=True)
        if cache is not None and ours:
            prepare(cache, self)
            if mode != GenerationMode.ASSISTED_GENERATION and not generation_config.is_assistant:
                end_past_recording(cache)
            if isinstance(cache, EncoderDecoderKVCache) and implementation is None:
                mark_as_given(cache)
                return cache
        elif ours and implementation in kinds:
            made = new_cache(self, offloading=implementation == "offloaded")
            if generation_config.is_assistant:
                made.activate_past_recording()
            return made
        elif implementation not in kinds:
            raise ValueError(
                f"cache_implementation={implementation!r} is not served by a converted model: its "
                "cache grows (static ones do not) and keeps more than keys and values (quantized "
                "ones do not); leave it out, or 'offloaded'"
            )
        return None

    def generate_batch(self, *args, **kwargs) -> None:
        """Refused: continuous batching puts another attention and another cache in place."""
        raise ValueError(
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
        return _empty, (_family_of(self),), self.__getstate__()

    def save_pretrained(self, save_directory, **options) -> None:
        """Save in transformers' layout, with the mechanism in `config.json`; see `heedful.load`."""
        save_converted(self, _family_of(self), super().save_pretrained, save_directory, options)

    def set_attn_implementation(self, attn_implementation, *args, **kwargs) -> None:
        """Refused: another implementation would switch the mechanism off."""
        if attn_implementation != IMPLEMENTATION:
            raise ValueError(
                f"attn_implementation={attn_implementation!r} would switch the mechanism off "
                "silently; call heedful.revert(model) first"
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)


@functools.cache
def _converted_model(base: type) -> type:
    return type(f"Heedful{base.__name__}", (ConvertedModel, base), {"__module__": __name__})


def _family_of(model: ConvertedModel) -> type:
    """The family's own class of a converted model, whatever was put in front of it since."""
    order = type(model).__mro__
    return order[order.index(OwnCacheInGenerate) + 1]


def _empty(base: type) -> ConvertedModel:
    """An empty model of a converted class, which exists in no file that pickle could import."""
    register_attention()  # in a process that has converted nothing yet
    cls = _converted_model(base)
    return cls.__new__(cls)


def convert(
    model: PreTrainedModel,
    mechanism: Mechanism | str | Mapping[Mechanism | str, Iterable[int]],
    layers: Iterable[int] | None = None,
    *,
    where: Role | Iterable[Role] | Mapping | None = None,
    impl: Impl = "auto",
    verify: bool | None = None,
) -> Conversion:
    """Replace the attention of a transformers model, in place.

    The projections, rotary embedding, norms and cache of the model's family stay; only what
    happens between queries, keys and values changes. With an identity-initialised mechanism
    (`standard`, `mta`, `talking-heads`, or `Selective(selector="extra")`) the outputs are those of
    standard attention until training moves the new parameters.

    Arguments:
        model: a decoder, an encoder-decoder or an encoder that routes through transformers'
            attention interface, from a configuration or loaded; on any device, also `meta`.
        mechanism: a configuration (`MultiToken`, `TalkingHeads`, `Selective`, `Differential`,
            `Standard`) or a name of `heedful.nn.NAMES`; or several with the layers of each, as in
            `{"mta": [0, 4], heedful.Standard(window=256): [1, 2, 3]}`.
        layers: indices of the layers to convert; default all. The others keep standard attention.
        where: in which attention: `"decoder"` (its self-attention), `"encoder"`, `"cross"` (from
            the decoder to the encoder), several of them, or these by mechanism; default wherever
            the mechanism is defined. The others keep standard attention.
        impl: which implementation of the operators runs; not saved with the model.
        verify: run a few tokens through the model as it is and converted to `standard`, and refuse
            it unless what reaches its attention, and what becomes of the output, is the same to the
            last bit: without a mask, with padding, and in `generate` with a cache. Default
            only where this transformers is newer than heedful is tested with.

    Returns:
        The `Conversion`; its `model` is the given model, its `revert()` undoes it.

    Raises:
        ValueError: the model cannot be converted, is converted already, does not fit the mechanism,
            or fails the proof. The model is left as it was.
    """
    if not isinstance(model, PreTrainedModel):
        way = "load one with AutoModelForCausalLM"
        if type(model).__module__.startswith("peft."):
            way = "convert the model before get_peft_model, and call heedful.get_peft_model"
        raise ValueError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; {way}"
        )
    if holds_adapter(model):
        raise ValueError(
            "model holds adapters of PEFT, which would neither train nor save the mechanism: "
            "convert the model first, then heedful.get_peft_model(model, LoraConfig(...))"
        )
    if isinstance(model, ConvertedModel):
        raise ValueError(
            f"model is converted already ({', '.join(map(str, model._heedful.mechanisms))}); call "
            "heedful.revert(model) before converting it again"
        )
    check_impl(impl)
    if newer_than_tested() if verify is None else verify:
        prove(model, convert)
    placed = find_attention(model)
    plan = make_plan(mechanism, layers, where, placed.values(), type(model).__name__)
    built: dict[str, Layer] = {}
    roles: dict[Mechanism, set[Role]] = {config: set() for config in plan}
    for path, one in placed.items():
        built[path], config = _build(one, plan)
        built[path].impl, built[path].biased = impl, adds_bias(one.module)
        built[path].capped, built[path].sunk = caps_logits(one.module), has_sinks(one.module)
        if config is not None:
            roles[config].add(one.role)
    stands = settled(plan, roles, type(model).__name__)
    found = {path: one.module for path, one in placed.items()}
    hinged = {path: _doors(found[path], layer) for path, layer in built.items()}
    rotations = {
        path: rotation_of(model, found[path])
        for path, layer in built.items()
        if "rotation" in layer.needs
    }
    scaled = [
        (find_mlp(model, found[path]), layer.input_factor)
        for path, layer in built.items()
        if layer.input_factor != 1.0
    ]

    _own_config(model)
    configs = {id(module.config): module.config for module in found.values()}
    before = {
        "hooks": [mlp.register_forward_pre_hook(_ScaledInput(factor)) for mlp, factor in scaled],
        "attn_implementations": [(x, implementation_of(x)) for x in configs.values()],
        "use_cache": use_cache_settings(model),
    }
    register()
    register_attention()
    for module_config in configs.values():
        set_implementation(module_config, IMPLEMENTATION)
    before["hooks"] += _read_calls(model, placed.values())
    for path, module in found.items():
        module.heedful = built[path].train(model.training)
        before["hooks"] += [
            module.register_forward_pre_hook(before_attention, with_kwargs=True),
            module.register_forward_hook(after_attention, always_call=True),
        ]
        if path in rotations:
            setattr(module, ROTATION, rotations[path])
        setattr(module, DOORS, hinged[path])
        for door in hinged[path]:
            door.follow()
    model.__class__ = _converted_model(type(model))
    mechanisms = {config: part.layers for config, part in plan.items()}
    model._heedful = Conversion(model, mechanisms, stands, before)
    own = caches(model, exactly=True)
    for layer in built.values():
        layer.own_cache = own
    if not caches(model):
        set_use_cache(model, dict.fromkeys(before["use_cache"], False))
    return model._heedful


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `convert`: the model's classes, parameters, settings and outputs are as they were.

    Raises:
        ValueError: the model is not converted.
    """
    if not isinstance(model, ConvertedModel):
        raise ValueError(f"model is not converted: {type(model).__name__} has nothing to revert")
    base = _family_of(model)
    if type(model) is not _converted_model(base):
        raise ValueError(
            f"model: {type(model).__name__} has been given another class since it was converted "
            "(as fully_shard does); save it, heedful.load the folder and revert that"
        )
    conversion = model._heedful
    del model._heedful
    model.__class__ = base
    for module in [x for x in model.modules() if DOORS in x.__dict__]:
        del module.heedful
        module.__dict__.pop(ROTATION, None)
        for door in module.__dict__.pop(DOORS):
            door.follow()
            door.close()
    for hook in conversion._before["hooks"]:
        hook.remove()
    for config, implementation in conversion._before["attn_implementations"]:
        set_implementation(config, implementation)
    set_use_cache(model, conversion._before["use_cache"])
    return model


def conversion_of(model: PreTrainedModel) -> Conversion:
    """The conversion of a converted model: its mechanism, layers and own parameters.

    Raises:
        ValueError: the model is not converted.
    """
    if not isinstance(model, ConvertedModel):
        raise ValueError(f"model is not converted: {type(model).__name__}; call heedful.convert")
    return model._heedful


def caches(model: PreTrainedModel, *, exactly: bool = False) -> bool:
    """Whether the model can go on from what earlier calls left.

    With `exactly`, whether a cache of heedful can stand in for the family's own; without, also
    whether the family's own holds all that the mechanism needs.
    """
    modules = attention_modules(model)
    both = (*modules, *attention_modules(model, "cross"))
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
    """Options of `generate` with `use_cache=False`; what cannot go without a cache is refused."""
    cache = {"cache": cache_among(options)}
    for name in ("cache", "assistant_model", "prompt_lookup_num_tokens"):
        if (options | cache).get(name) is not None:
            raise ValueError(
                f"{name} needs a cache, and this family's own holds keys and values only, which is "
                f"not enough for this mechanism; generate without {name}"
            )
    config = options.get("generation_config")
    if getattr(config, "is_assistant", False):
        raise ValueError(
            "assistant_model must have a cache, and its family's own is not enough for its "
            "mechanism; take a draft model with another mechanism"
        )
    if options.get("use_cache") or getattr(config, "use_cache", False):
        warnings.warn(
            "this family's cache is not enough for this mechanism, so generate goes on without "
            "one, as with use_cache=False: the same tokens, the whole row read again for each",
            stacklevel=3,
        )
    if config is None:
        return options | {"use_cache": False}
    config = copy.deepcopy(config)
    config.use_cache = False
    return {name: x for name, x in options.items() if name != "use_cache"} | {
        "generation_config": config
    }


def _build(one: Attention, plan: dict[Mechanism, Part]) -> tuple[Layer, Mechanism | None]:
    """The layer that stands in an attention module, and its mechanism if the plan has it there."""
    shape = head_shape(one)
    with parameter_device(one.module):
        for config, part in plan.items():
            if one.role not in part.roles or one.index not in part.layers:
                continue
            layer = config.build(shape)
            if caps_logits(one.module) and not layer.takes_softcap:
                raise ValueError(
                    f"mechanism {config} does not cap logits, as {type(one.module).__name__} does "
                    "(softcap); take another mechanism"
                )
            if has_sinks(one.module) and not layer.takes_sinks:
                raise ValueError(
                    f"mechanism {config} has no sinks, as {type(one.module).__name__} does; take "
                    "another mechanism"
                )
            unbiased = one.role == "cross" or layer.takes_bias or not adds_bias(one.module)
            if one.role in layer.roles and unbiased:
                return layer, config
            if part.asked:
                reason = f"but in {' and '.join(sorted(layer.roles))} attention only"
                if not unbiased:
                    reason = "where the family adds a position bias that it does not take"
                raise ValueError(
                    f"where={one.role!r}: {config} is not defined there, {reason}; leave it out of "
                    "where"
                )
        return Standard().build(shape), None


def _doors(module: nn.Module, layer: Layer) -> list[Door]:
    """The projections that the layer changes."""
    if "unrotated" not in layer.needs:
        return []
    return doors(module, layer)


def _read_calls(model: PreTrainedModel, found: Iterable[Attention]) -> list:
    """Let every model inside tell of packed documents, ids and positions.

    But for a head, which hands them on to the model below it, where masks are made.
    """
    name = CacheName.of(model)
    hooks, found = [model.register_forward_pre_hook(name, with_kwargs=True)], list(found)
    crosses = model.config.is_encoder_decoder and any(one.role == "cross" for one in found)
    apart = not crosses and only_attention_mixes(model, [one.module for one in found])
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module.base_model is not module:
            continue
        names = tuple(inspect.signature(module.forward).parameters)
        if "position_ids" in names or "input_ids" in names:
            read = ReadCall(names, apart, crosses)
            hooks.append(module.register_forward_pre_hook(read, with_kwargs=True))
            hooks.append(module.register_forward_hook(ForgetCall(), always_call=True))
    return hooks


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a copy of its configuration, which other models may share."""
    copies: dict[int, object] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if isinstance(held := getattr(module, "config", None), PreTrainedConfig):
            module.config = copies.get(id(held), held)
