"""Give a transformers model another attention mechanism, and take it back."""

import copy
import inspect
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import Eviction
from heedful.hf.adapters import holds_adapter
from heedful.hf.after_eviction import AfterEviction
from heedful.hf.attention import (
    IMPLEMENTATION,
    NAME,
    ROTATION,
    before_attention,
    register_attention,
)
from heedful.hf.converted_model import ConvertedModel, caches, converted_class, family_of
from heedful.hf.evicting.hook import remove
from heedful.hf.family.call import ForgetCall, ReadCall
from heedful.hf.family.modules import (
    Attention,
    find_attention,
    find_mlp,
    head_shape,
    only_attention_mixes,
    parameter_device,
    terms_of,
)
from heedful.hf.family.rotation import rotation_of
from heedful.hf.plan import Assignment, make_plan, mechanism_at, settled_roles
from heedful.hf.proof import prove
from heedful.hf.save import set_use_cache, use_cache_settings
from heedful.hf.versions import CacheName, implementation_of, newer_than_tested, set_implementation
from heedful.nn import (
    Layer,
    MechanismConfig,
    MultiTokenAttention,
    Role,
    Selective,
    Standard,
    StandardAttention,
)
from heedful.nn.layer import ModuleInfo, Rotation, Term
from heedful.ops.impl import Impl, check_impl


class UndoInfo(NamedTuple):
    """Data needed to undo a conversion, beside its hooks.

    implementations: attention implementations by configuration.
    use_cache: settings of `use_cache` by configuration.
    """

    implementations: list[tuple[PreTrainedConfig, str | None]]
    use_cache: dict


@dataclass
class Conversion:
    """Result of `convert` on a model.

    model: the converted model, the same object.
    mechanisms: the layers' indices by mechanism; all others have standard attention.
    where: by mechanism, in which attention these layers have it: `"decoder"`, `"encoder"`,
        `"cross"`.
    hooks: what `revert` removes, by `remove()`: the handles of hooks. More may be added.
    eviction: the policy of caches that `new_cache` and `generate` make, as `budgets.json` says.
    after_eviction: lets LoRA act once a cache has evicted; `None` without such LoRA.
    matrices: a digest of the LoRA weights that the model was opened with.
    """

    model: PreTrainedModel = field(repr=False)
    mechanisms: dict[MechanismConfig, tuple[int, ...]]
    where: dict[MechanismConfig, tuple[Role, ...]]
    _undo: UndoInfo = field(repr=False)
    hooks: list = field(repr=False)
    eviction: Eviction | None = None
    after_eviction: AfterEviction | None = field(default=None, repr=False)
    matrices: str | None = field(default=None, repr=False)
    _budgets: str | None = field(default=None, repr=False)  # the text of that file

    @property
    def mechanism(self) -> MechanismConfig:
        """The one mechanism; raises where there are several."""
        if len(self.mechanisms) > 1:
            raise UserError(
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


class Placement(NamedTuple):
    """An attention module and what the conversion puts into it.

    config: the mechanism of its layer; `None` where the plan leaves standard attention.
    rotation: the rotary embedding, for layers that rotate by themselves.
    mlp: the MLP beside it, where the layer scales its input too.
    """

    attention: Attention
    layer: Layer
    config: MechanismConfig | None
    rotation: Rotation | None
    mlp: nn.Module | None


class _ScaledInput(NamedTuple):
    """A forward hook that multiplies a module's input; a class, so that models can be copied."""

    factor: float

    def __call__(self, module: nn.Module, inputs: tuple) -> tuple:
        return inputs[0] * self.factor, *inputs[1:]


def convert(
    model: PreTrainedModel,
    mechanism: MechanismConfig | str | Mapping[MechanismConfig | str, Iterable[int]],
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
            or fails the verification. The model is left as it was.

    Warns:
        UserWarning: a model with pretrained weights (it has a `name_or_path`, and norms or biases
            that are no longer those of an initialisation) gets selective attention whose selector
            is one of its own heads, which changes its outputs at once.
    """
    conversion = replace_attention(model, mechanism, layers, where=where, impl=impl, verify=verify)
    masks = [x for x in conversion.mechanisms if _masks_at_once(x)]
    if masks and model.name_or_path and _is_trained(model):
        selector = f"head {masks[0].head}" if masks[0].selector == "head" else "its selector"
        warnings.warn(
            f"{selector} masks tokens from now on, so the pretrained model's outputs change until "
            'it is trained: heedful.Selective(selector="extra") leaves them unchanged, and '
            "heedful.load(base, adapter=...) opens trained selectors",
            stacklevel=2,
        )
    return conversion


def _is_trained(model: nn.Module) -> bool:
    """Test whether some norm or bias is no longer constant, as initialisation leaves it.

    A model from the configuration of a checkpoint has the checkpoint's name, and no weights of it.
    """
    vectors = [p.detach() for p in model.parameters() if p.ndim < 2 and p.numel() > 1]
    if any(p.device.type == "meta" for p in vectors):
        return False
    return not vectors or any(bool((p != p[0]).any()) for p in vectors)


def _masks_at_once(mechanism: MechanismConfig) -> bool:
    return isinstance(mechanism, Selective) and mechanism.selector != "extra"


def replace_attention(
    model: PreTrainedModel,
    mechanism: MechanismConfig | str | Mapping[MechanismConfig | str, Iterable[int]],
    layers: Iterable[int] | None = None,
    *,
    where: Role | Iterable[Role] | Mapping | None = None,
    impl: Impl = "auto",
    verify: bool | None = None,
    attends: bool = True,
) -> Conversion:
    """Convert a model as `convert` does, without a warning: its parameters are restored or trained.

    Arguments, returns and errors: as of `convert`; without `attends` the family's attention stays
    in place, and the layers only say which tokens a cache evicts.
    """
    _check_convertible(model)
    check_impl(impl)
    if attends and (newer_than_tested() if verify is None else verify):
        prove(model, replace_attention)
    modules = list(find_attention(model).values())
    plan = make_plan(mechanism, layers, where, modules, type(model).__name__)
    placements = [_placement(model, attention, plan, impl) for attention in modules]
    defined = {(placement.config, placement.attention.role) for placement in placements}
    roles = settled_roles(plan, defined, type(model).__name__)
    _check_changes(placements, type(model).__name__)
    # All checks have passed: the model changes from here on.
    undo, hooks = (_install if attends else _install_beside)(model, placements)
    model.__class__ = converted_class(type(model))
    mechanisms = {config: assignment.layers for config, assignment in plan.items()}
    model._heedful = Conversion(model, mechanisms, roles, undo, hooks)
    own_cache = caches(model, exactly=True)
    for placement in placements:
        placement.layer.host = placement.layer.host._replace(own_cache=own_cache, attends=attends)
    if attends and not caches(model):
        set_use_cache(model, dict.fromkeys(undo.use_cache, False))
    return model._heedful


def _check_convertible(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        way = "load one with AutoModelForCausalLM"
        if type(model).__module__.startswith("peft."):
            way = "convert the model before get_peft_model, and call heedful.get_peft_model"
        raise UserError(
            f"model must be a transformers PreTrainedModel, got {type(model).__name__}; {way}"
        )
    if holds_adapter(model):
        raise UserError(
            "model holds adapters of PEFT, which would neither train nor save the mechanism: "
            "convert the model first, then heedful.get_peft_model(model, LoraConfig(...))"
        )
    if isinstance(model, ConvertedModel):
        raise UserError(
            f"model is converted already ({', '.join(map(str, model._heedful.mechanisms))}); call "
            "heedful.revert(model) before converting it again"
        )


def _placement(
    model: PreTrainedModel,
    attention: Attention,
    plan: dict[MechanismConfig, Assignment],
    impl: Impl,
) -> Placement:
    """Build the plan's layer for an attention module; nothing of the model changes."""
    module, terms, shape = attention.module, terms_of(attention.module), head_shape(attention)
    config = mechanism_at(plan, attention)
    with parameter_device(module):
        layer = (config or Standard()).build(shape)
        if config and not _is_defined(config, layer, attention, terms, plan[config].explicit):
            config, layer = None, Standard().build(shape)
    layer.impl, layer.host = impl, ModuleInfo(terms)
    return Placement(
        attention,
        layer,
        config,
        rotation_of(model, module) if "rotation" in layer.needs else None,
        find_mlp(model, module) if layer.input_factor != 1.0 else None,
    )


def _check_changes(placements: list[Placement], model: str) -> None:
    """Raise where a mechanism of every n-th layer changes none, as n are too many."""
    for config in {placement.config for placement in placements} - {None, Standard()}:
        layers = [placement.layer for placement in placements if placement.config == config]
        if all(_is_standard(layer) for layer in layers):
            every = "conv_every" if hasattr(config, "conv_every") else "every"
            raise UserError(
                f"mechanism {config} changes none of the {len(layers)} layers of {model} that it "
                f"was given; give it a smaller `{every}`, other options or other layers"
            )


def _is_standard(layer: Layer) -> bool:
    """Test whether a layer is standard attention for good: it has nothing to learn."""
    plain = isinstance(layer, MultiTokenAttention) or type(layer) is StandardAttention
    changes = layer.window is not None or layer.input_factor != 1.0
    return plain and not changes and next(layer.parameters(), None) is None


def _is_defined(
    config: MechanismConfig,
    layer: Layer,
    attention: Attention,
    terms: frozenset[Term],
    explicit: bool,
) -> bool:
    """Test whether a mechanism is defined in a module; raises where it was named for it."""
    family = type(attention.module).__name__
    if "softcap" in terms - layer.takes:
        raise UserError(
            f"mechanism {config} does not cap logits, as {family} does (softcap); take another "
            "mechanism"
        )
    if "sinks" in terms - layer.takes:
        raise UserError(f"mechanism {config} has no sinks, as {family} does; take another one")
    biased = attention.role != "cross" and "bias" in terms - layer.takes
    if attention.role in layer.roles and not biased:
        return True
    if explicit:
        reason = f"but in {' and '.join(sorted(layer.roles))} attention only"
        if biased:
            reason = "where the family adds a position bias that it does not take"
        raise UserError(
            f"where={attention.role!r}: {config} is not defined there, {reason}; leave it out of "
            "where"
        )
    return False


def _install(model: PreTrainedModel, placements: list[Placement]) -> tuple[UndoInfo, list]:
    """Put layers and hooks into the model; returns what takes them out again, and the hooks."""
    remove(model)  # of caches for models as they are
    _own_config(model)
    attention = [placement.attention for placement in placements]
    configs = {id(x.module.config): x.module.config for x in attention}.values()
    implementations = [(config, implementation_of(config)) for config in configs]
    use_cache = use_cache_settings(model)
    register_attention()
    for config in configs:
        set_implementation(config, IMPLEMENTATION)
    hooks = _call_hooks(model, attention)
    for placement in placements:
        module = placement.attention.module
        setattr(module, NAME, placement.layer.train(model.training))
        hooks.append(module.register_forward_pre_hook(before_attention, with_kwargs=True))
        if placement.mlp is not None:
            scale = _ScaledInput(placement.layer.input_factor)
            hooks.append(placement.mlp.register_forward_pre_hook(scale))
        if "rotation" in placement.layer.needs:
            setattr(module, ROTATION, placement.rotation)
    return UndoInfo(implementations, use_cache), hooks


def _install_beside(model: PreTrainedModel, placements: list[Placement]) -> tuple[UndoInfo, list]:
    """Put layers into the model that leave its attention alone."""
    for placement in placements:
        setattr(placement.attention.module, NAME, placement.layer.train(model.training))
    hooks = _call_hooks(model, [placement.attention for placement in placements])
    return UndoInfo([], use_cache_settings(model)), hooks


def _call_hooks(model: PreTrainedModel, modules: list[Attention]) -> list:
    """Hooks by which every model inside reports packed documents, ids and positions.

    A head hands them on to the model below it, where masks are made, and has none.
    """
    name = CacheName.of(model)
    hooks = [model.register_forward_pre_hook(name, with_kwargs=True)]
    crosses = model.config.is_encoder_decoder and any(x.role == "cross" for x in modules)
    apart = not crosses and only_attention_mixes(model, [x.module for x in modules])
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
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            module.config = copies.get(id(config), config)


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `convert`: the model's classes, parameters, settings and outputs are as they were.

    Arguments:
        model: a converted model.

    Returns:
        The same object, of its former class.

    Raises:
        ValueError: the model is not converted.
    """
    if not isinstance(model, ConvertedModel):
        raise UserError(f"model is not converted: {type(model).__name__} has nothing to revert")
    base = family_of(model)
    if type(model) is not converted_class(base):
        raise UserError(
            f"model: {type(model).__name__} has been given another class since it was converted "
            "(as fully_shard does); save it, heedful.load the folder and revert that"
        )
    conversion = model._heedful
    del model._heedful
    model.__class__ = base
    for handle in conversion.hooks:
        handle.remove()
    for module in [x for x in model.modules() if NAME in x._modules]:
        del module.heedful
        module.__dict__.pop(ROTATION, None)
    if conversion.after_eviction is not None:
        conversion.after_eviction.remove(model)
    undo = conversion._undo
    remove(model)
    for config, implementation in undo.implementations:
        set_implementation(config, implementation)
    set_use_cache(model, undo.use_cache)
    return model


def conversion_of(model: PreTrainedModel) -> Conversion:
    """The conversion of a converted model: its mechanism, layers and own parameters.

    Raises:
        ValueError: the model is not converted.
    """
    if not isinstance(model, ConvertedModel):
        raise UserError(f"model is not converted: {type(model).__name__}; call heedful.convert")
    return model._heedful
