"""Write a converted model as a stock checkpoint, where standard attention computes the same."""

import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from heedful.checks import UserError
from heedful.hf.adapters import holds_adapter
from heedful.hf.convert import conversion_of
from heedful.hf.converted_model import converted_class, family_of
from heedful.hf.family.projections import NAME, PROJECTION_HOOKS, ProjectionEdit
from heedful.hf.save import set_use_cache, use_cache_settings
from heedful.nn import Layer, Standard
from heedful.nn.layer import StandardForm
from heedful.records.files import whole_folder

# Families in which the type of a layer decides over its window and nothing else; in others it also
# chooses the rotary embedding. Those without such types are Ministral, which has them, otherwise.
_LAYER_TYPES = ("ministral", "qwen2", "qwen3")
_AS_MINISTRAL = ("llama", "mistral")


class _Seat(NamedTuple):
    """A converted attention module by its path, its layer, and how standard attention does it.

    mechanism: what the layer was converted to, for people.
    """

    path: str
    module: nn.Module
    layer: Layer
    mechanism: str
    form: StandardForm


def export(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Write a converted model as an ordinary one of its family, which needs no heedful.

    Linear knocking heads are multiplied into the projections, in fp64 and rounded once. Windows
    (`Standard(window=...)`, `LocalGlobal`) become `layer_types`; Llama and Mistral, which have
    none, are written as Ministral, which is the same otherwise. A mechanism that is still the
    identity is left out. Budgets and eviction are not exported: engines keep whole caches. The
    model itself does not change.

    Arguments:
        model: a converted model, without an adapter of PEFT around its projections.
        folder: must be new or empty; it appears whole or not at all.

    Raises:
        ValueError: a mechanism cannot be written as standard attention, the family has no windows
            of single layers, a projection is quantised, or `folder` is in use.
    """
    conversion_of(model)  # raises where there is none
    family = family_of(model)
    if type(model) is not converted_class(family):
        raise UserError(
            f"model: {type(model).__name__} has been given another class since it was converted "
            "(as fully_shard does); save it, heedful.load the folder and export that"
        )
    if holds_adapter(model) or conversion_of(model).after_eviction is not None:
        raise UserError(
            "model holds adapters of PEFT, which a stock checkpoint has no place for: merge them "
            "(merge_and_unload), or heedful.load the adapter's folder, which does unless they act "
            "after an eviction only"
        )
    seats = _seats(model)
    own = f".{NAME}."
    weights = {name: x for name, x in model.state_dict().items() if own not in name}
    for seat in seats:
        weights |= _folded(model, seat)
    windows = _windows(model.config, seats)
    config = None if windows is None else _with_windows(model, family, windows)
    with whole_folder(folder) as whole:
        _save(model, family, whole, weights)
        if config is not None:
            (whole / "config.json").write_text(config.to_json_string())


def _seats(model: PreTrainedModel) -> list[_Seat]:
    conversion, seats = conversion_of(model), []
    for path, module in model.named_modules():
        if PROJECTION_HOOKS not in module.__dict__:
            continue
        layer: Layer = getattr(module, NAME)
        index, role = layer.shape.layer, layer.shape.role
        configs = (
            str(config)
            for config, layers in conversion.mechanisms.items()
            if index in layers and role in conversion.where[config]
        )
        mechanism = next(configs, str(Standard()))
        form = layer.standard_form()
        if form is None:
            raise UserError(
                f"model: {mechanism} of layer {index} is not standard attention in other words, so "
                "no stock checkpoint computes it; serve it with transformers serve (multi-token "
                "attention also with vLLM), or heedful.revert(model) takes it out"
            )
        seats.append(_Seat(path, module, layer, mechanism, form))
    return seats


def _folded(model: PreTrainedModel, seat: _Seat) -> dict[str, Tensor]:
    """Weights and biases of an attention module's projections with the matrices in them."""
    changed: dict[str, Tensor] = {}
    if not seat.form.matrices:
        return changed
    parameters = [p for _, p in model.named_parameters(remove_duplicate=False)]
    for hook in getattr(seat.module, PROJECTION_HOOKS):
        if not any(part in seat.form.matrices for part in hook.hook.parts):
            continue
        projection, name = getattr(seat.module, hook.name), f"{seat.path}.{hook.name}"
        if type(projection) not in (nn.Linear, Conv1D):
            raise UserError(
                f"model: {name} is a {type(projection).__name__}, and a matrix of "
                f"{seat.mechanism} is multiplied only into a plain nn.Linear; load the model "
                "without quantisation"
            )
        if sum(p is projection.weight for p in parameters) > 1:
            raise UserError(
                f"model: {name} is shared with another module, which has no matrix of "
                f"{seat.mechanism}; untie its weights first"
            )
        by_channel = projection.weight.detach()
        turned = type(projection) is Conv1D  # which keeps its weight the other way round
        rows = _fold(hook.hook, by_channel.mT if turned else by_channel, seat)
        changed[f"{name}.weight"] = (rows.mT if turned else rows).contiguous()
        if projection.bias is not None:
            bias = _fold(hook.hook, projection.bias.detach()[:, None], seat)
            changed[f"{name}.bias"] = bias[:, 0].contiguous()
    return changed


def _fold(edit: ProjectionEdit, rows: Float[Tensor, "C E"], seat: _Seat) -> Float[Tensor, "C E"]:
    """A projection's rows, one per channel, with the channels of every head multiplied."""
    wide = rows.double()
    if edit.order is not None:
        wide = wide[edit.order.to(rows.device)]
    parts: list[Tensor] = []
    for part, x in zip(edit.parts, wide.split(edit.widths), strict=True):
        if (matrix := seat.form.matrices.get(part)) is not None:
            heads = x.unflatten(0, (-1, seat.layer.shape.dim))
            x = (matrix.double().mT @ heads).flatten(0, 1)
        parts.append(x)
    wide = torch.cat(parts)
    return (wide if edit.back is None else wide[edit.back.to(rows.device)]).to(rows.dtype)


def _windows(config: PreTrainedConfig, seats: list[_Seat]) -> list[int | None] | None:
    """The window of every layer; `None` where the mechanisms add none to the family's own."""
    if all(seat.form.window is None for seat in seats):
        return None
    kind = config.model_type
    if kind not in (*_LAYER_TYPES, *_AS_MINISTRAL):
        raise UserError(
            f"model: a checkpoint of type {kind!r} cannot give layers windows of their own; that "
            f"can {', '.join((*_LAYER_TYPES, *_AS_MINISTRAL))}. Serve it with transformers serve, "
            "or heedful.revert(model) takes the windows out"
        )
    windows: list[int | None] = []
    for seat in sorted(seats, key=lambda seat: seat.layer.shape.layer):
        # What the module says of itself: in Qwen by its type, in Mistral by the model.
        own = getattr(seat.module, "sliding_window", getattr(config, "sliding_window", None))
        both = [x for x in (own, seat.form.window) if x is not None]
        windows.append(min(both, default=None))
    if len(different := {x for x in windows if x is not None}) > 1:
        raise UserError(
            f"model: layers have windows of {', '.join(map(str, sorted(different)))} tokens, and a "
            "stock checkpoint has one for all; convert with one window"
        )
    return windows


def _with_windows(
    model: PreTrainedModel, family: type, windows: list[int | None]
) -> PreTrainedConfig:
    """The configuration of a model whose layers have these windows, of which one is a number."""
    config = model.config
    fields = config.to_dict()
    kind, name = config.model_type, family.__name__
    if kind in _AS_MINISTRAL:
        _check_is_ministral(config, family)
        kind, name = "ministral", "MinistralForCausalLM"
        defaults = CONFIG_MAPPING[kind]().to_dict()
        fields = {key: x for key, x in fields.items() if key in defaults} | {"model_type": kind}
    kinds = ["full_attention" if x is None else "sliding_attention" for x in windows]
    fields |= {
        "architectures": [name],
        "layer_types": kinds,
        "sliding_window": next(x for x in windows if x is not None),
        "use_cache": model._heedful._stock.use_cache.get("config", True),
    }
    if kind.startswith("qwen"):
        # The second is read where layer_types are not: the first layers up to it are global.
        first = kinds.index("sliding_attention")
        fields |= {"use_sliding_window": True, "max_window_layers": first}
    return CONFIG_MAPPING[fields.pop("model_type")](**fields)


def _check_is_ministral(config: PreTrainedConfig, family: type) -> None:
    """Raise unless a Llama or Mistral is a Ministral but for windows."""
    reason = None
    if not family.__name__.endswith("ForCausalLM"):
        reason = f"{family.__name__} is no causal language model"
    elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        reason = "its projections or its MLP have a bias"
    if reason is not None:
        raise UserError(
            f"model: windows of single layers are written as Ministral has them, which this "
            f"{config.model_type} is not because {reason}; serve it with transformers serve, or "
            "heedful.revert(model) takes the windows out"
        )


def _save(model: PreTrainedModel, family: type, folder: Path, weights: dict[str, Tensor]) -> None:
    """The family's own `save_pretrained` of these weights, under the family's own name."""
    converted = use_cache_settings(model), model.config.architectures
    set_use_cache(model, model._heedful._stock.use_cache)
    try:
        family.save_pretrained(model, folder, state_dict=weights)
    finally:
        set_use_cache(model, converted[0])
        model.config.architectures = converted[1]
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"architectures": [family.__name__]}, indent=2)
        + "\n"
    )
