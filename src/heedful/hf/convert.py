"""Give a transformers model another attention mechanism, and take it back."""

import copy
import functools
import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from heedful.hf.attention import (
    IMPLEMENTATION,
    NAME,
    converted_attention,
    register_attention,
    unpickle,
)
from heedful.hf.checkpoint import save_converted, set_use_cache, use_cache_settings
from heedful.hf.families import (
    find_attention,
    find_mlp,
    head_shape,
    only_attention_mixes,
    parameter_device,
)
from heedful.hf.mask import ForgetDocuments, ReadDocuments
from heedful.nn import Mechanism, StandardAttention, from_json, mechanism, to_json
from heedful.ops.impl import Impl, check_impl


@dataclass
class Conversion:
    """What `convert` did to a model.

    model: the converted model, the same object that was given.
    mechanism: its configuration.
    layers: indices of the converted layers.
    """

    model: PreTrainedModel = field(repr=False)
    mechanism: Mechanism
    layers: tuple[int, ...]
    _before: dict = field(repr=False)

    def revert(self) -> PreTrainedModel:
        """Take the mechanism out again; the model computes and saves what it did before."""
        return revert(self.model)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The mechanism's own parameters by name, to train alone or faster."""
        marked = f".{NAME}."
        return {name: p for name, p in self.model.named_parameters() if marked in name}


class _ScaledInput(NamedTuple):
    """A forward hook that multiplies a module's input; a class, so that models can be copied."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple) -> tuple:
        return inputs[0] * self.factor, *inputs[1:]


class ConvertedModel:
    """Mixed into a family's model class: saves the mechanism, refuses to lose it silently."""

    def generate(self, *args, **kwargs):
        """As the family's; without a cache where the mechanism has none yet."""
        if needs_past_queries(self):
            kwargs = without_cache(kwargs)
        return super().generate(*args, **kwargs)

    def train(self, mode: bool = True):
        """As torch's; warns where an adapter of PEFT would leave the mechanism behind."""
        own = self._heedful.parameters().values() if "_heedful" in self.__dict__ else ()
        if mode and own and not any(p.requires_grad for p in own) and holds_adapter(self):
            warnings.warn(
                "this adapter neither trains nor saves the mechanism's parameters: give LoraConfig "
                "modules_to_save=['heedful'], or save the converted model itself as well",
                stacklevel=2,
            )
        return super().train(mode)

    def __reduce_ex__(self, protocol: int) -> tuple:
        return unpickle, (_converted_model, type(self).__mro__[2]), self.__getstate__()

    def save_pretrained(self, save_directory, **options) -> None:
        """Save in transformers' layout, with the mechanism in `config.json`; see `heedful.load`."""
        save_converted(self, self._heedful, super().save_pretrained, save_directory, options)

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


def convert(
    model: PreTrainedModel,
    mechanism: Mechanism | str,
    layers: Iterable[int] | None = None,
    *,
    impl: Impl = "auto",
) -> Conversion:
    """Replace the attention of a transformers causal language model, in place.

    The projections, rotary embedding, norms and cache of the model's family stay; only what
    happens between queries, keys and values changes. With an identity-initialised mechanism
    (`standard`, `mta`, `talking-heads`, or `Selective(selector="extra")`) the outputs are those of
    standard attention until training moves the new parameters.

    Arguments:
        model: a decoder-only model that routes through transformers' attention interface, from a
            configuration or loaded; on any device, also `meta`.
        mechanism: a configuration (`MultiToken`, `TalkingHeads`, `Selective`, `Differential`,
            `Standard`) or a name of `heedful.nn.NAMES`.
        layers: indices of the layers to convert; default all. The others keep standard attention.
        impl: which implementation of the operators runs; not saved with the model.

    Returns:
        The `Conversion`; its `model` is the given model, its `revert()` undoes it.

    Raises:
        ValueError: the model cannot be converted, is converted already, or does not fit the
            mechanism. The model is left as it was.
    """
    if not isinstance(model, PreTrainedModel):
        way = "load one with AutoModelForCausalLM"
        if type(model).__module__.startswith("peft."):
            way = "convert the model before get_peft_model"
        raise ValueError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; {way}"
        )
    if holds_adapter(model):
        raise ValueError(
            "model holds adapters of PEFT, which would neither train nor save the mechanism: "
            "convert the model first, then get_peft_model(model, LoraConfig(..., "
            "modules_to_save=['heedful']))"
        )
    if isinstance(model, ConvertedModel):
        raise ValueError(
            f"model is converted already ({model._heedful.mechanism}); call heedful.revert(model) "
            "before converting it again"
        )
    check_impl(impl)
    config = _mechanism(mechanism)
    found = find_attention(model)
    chosen = _layers(layers, found)
    built = {}
    for index in chosen:
        with parameter_device(found[index]):
            built[index] = config.build(head_shape(found[index]))
        built[index].impl = impl

    scaled = [
        (find_mlp(model, found[index]), factor)
        for index, layer in built.items()
        if (factor := getattr(layer, "input_factor", 1.0)) != 1.0
    ]

    _own_config(model)
    configs = {id(module.config): module.config for module in found.values()}
    before = {
        "hooks": [mlp.register_forward_pre_hook(_ScaledInput(factor)) for mlp, factor in scaled],
        "attn_implementations": [(x, x._attn_implementation) for x in configs.values()],
        "use_cache": use_cache_settings(model),
    }
    register_attention()
    for module_config in configs.values():
        module_config._attn_implementation = IMPLEMENTATION
    before["hooks"] += _read_documents(model, only_attention_mixes(model, found))
    for index, module in found.items():
        module.__class__ = converted_attention(type(module))
        module.heedful = built.get(index, StandardAttention()).train(model.training)
    model.__class__ = _converted_model(type(model))
    model._heedful = Conversion(model, config, tuple(built), before)
    if needs_past_queries(model):
        set_use_cache(model, dict.fromkeys(before["use_cache"], False))
    return model._heedful


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `convert`: the model's classes, parameters, settings and outputs are as they were.

    Raises:
        ValueError: the model is not converted.
    """
    if not isinstance(model, ConvertedModel):
        raise ValueError(f"model is not converted: {type(model).__name__} has nothing to revert")
    conversion = model._heedful
    del model._heedful
    model.__class__ = type(model).__mro__[2]
    for module in model.modules():
        if hasattr(type(module), "__mro__") and type(module).__name__.startswith("Heedful"):
            module.__class__ = type(module).__mro__[2]
            del module.heedful
    for hook in conversion._before["hooks"]:
        hook.remove()
    for config, implementation in conversion._before["attn_implementations"]:
        config._attn_implementation = implementation
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


def restore(
    model: PreTrainedModel, data: dict, layers: list[int], tensors: dict, impl: Impl
) -> Conversion:
    """Convert a freshly loaded model to a saved mechanism and give it the saved parameters."""
    conversion = convert(model, from_json(data), layers, impl=impl)
    own = conversion.parameters()
    problems = [f"{name} is missing" for name in sorted(set(own) - set(tensors))]
    problems += [f"{name} is not expected" for name in sorted(set(tensors) - set(own))]
    for name in set(own) & set(tensors):
        if own[name].shape != tensors[name].shape:
            problems.append(f"{name} has shape {tuple(tensors[name].shape)}")
        elif not bool(tensors[name].isfinite().all()):
            problems.append(f"{name} holds NaN or infinity")
    if problems:
        raise ValueError(f"the checkpoint does not fit {to_json(conversion.mechanism)}: {problems}")
    for name, parameter in own.items():
        parameter.data = tensors[name].to(parameter.device)  # in the precision it was saved in
    return conversion


def needs_past_queries(model: nn.Module) -> bool:
    """Whether a layer's newest output needs earlier queries, which no cache holds yet."""
    layers = (getattr(module, NAME, None) for module in model.modules())
    return any(layer.needs_past_queries for layer in layers if layer is not None)


def holds_adapter(model: nn.Module) -> bool:
    """Whether PEFT has put its layers into the model."""
    return any(type(module).__module__.split(".")[0] == "peft" for module in model.modules())


def without_cache(options: dict) -> dict:
    """Options of `generate` with `use_cache=False`; what cannot go without a cache is refused."""
    for name in ("past_key_values", "assistant_model", "prompt_lookup_num_tokens"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} needs a cache, and this mechanism has none yet (it needs what earlier "
                f"queries did, beside keys and values); generate without {name}"
            )
    config = options.get("generation_config")
    if options.get("use_cache") or getattr(config, "use_cache", False):
        warnings.warn(
            "this mechanism has no cache yet, so generate goes on without one, as with "
            "use_cache=False: the same tokens, the whole row read again for each of them",
            stacklevel=3,
        )
    return options | {"use_cache": False}


def _mechanism(given: Mechanism | str) -> Mechanism:
    if isinstance(given, str):
        return mechanism(given)
    if not isinstance(given, Mechanism):
        raise ValueError(
            f"mechanism must be a name or a configuration such as heedful.MultiToken(), got "
            f"{given!r}"
        )
    return given


def _layers(layers: Iterable[int] | None, found: dict[int, nn.Module]) -> list[int]:
    if layers is None:
        return list(found)
    whole = isinstance(layers, Iterable) and not isinstance(layers, str)
    layers = list(layers) if whole else layers
    if not whole or not all(isinstance(i, int) and not isinstance(i, bool) for i in layers):
        raise ValueError(f"layers must be layer indices such as [0, 2], got {layers!r}")
    chosen = sorted(set(layers))
    if unknown := [index for index in chosen if index not in found]:
        raise ValueError(f"layers must be among 0 to {max(found)}, got {unknown}")
    if not chosen:
        raise ValueError("layers must name at least one layer, got none; None converts all")
    return chosen


def _read_documents(model: PreTrainedModel, apart: bool) -> list:
    """Let every model inside that takes positions tell which tokens are packed documents.

    But for a head, which hands them on to the model below it, where masks are made.
    """
    hooks = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel) or module.base_model is not module:
            continue
        names = tuple(inspect.signature(module.forward).parameters)
        if "position_ids" in names:
            read = ReadDocuments(names, apart)
            hooks.append(module.register_forward_pre_hook(read, with_kwargs=True))
            hooks.append(module.register_forward_hook(ForgetDocuments(), always_call=True))
    return hooks


def _own_config(model: PreTrainedModel) -> None:
    """Give the model a copy of its configuration, which other models may share."""
    copies: dict[int, object] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        if isinstance(held := getattr(module, "config", None), PreTrainedConfig):
            module.config = copies.get(id(held), held)
