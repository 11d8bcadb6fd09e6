"""Load converted models that `save_pretrained` wrote."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from heedful.checks import UserError
from heedful.hf import budgets as saved_budgets
from heedful.hf.adapter_folders import base_of, is_adapter, load_adapter
from heedful.hf.restore import read_parameters, restore
from heedful.hf.save import FORMAT, MODEL_TYPE
from heedful.hf.versions import ignoring
from heedful.nn import MechanismConfig
from heedful.ops.impl import Impl


def load(
    folder: str | os.PathLike | PreTrainedModel,
    *,
    adapter: str | os.PathLike | None = None,
    impl: Impl = "auto",
    budgets: bool = True,
    convert: bool = False,
    verify: bool | None = None,
    mechanisms: Iterable[type[MechanismConfig]] = (),
    **options,
) -> PreTrainedModel:
    """Load a converted model that `save_pretrained` wrote, or a base with an adapter.

    Arguments:
        folder: the checkpoint's folder; or an adapter's, which knows the name of its base. With
            `adapter`, the base: a folder, a name on the hub, a GGUF file, `smollm2`, or the model
            itself, which is converted in place.
        adapter: a folder of `heedful.save_adapter`. LoRA is merged into the weights, unless it
            acts once a cache has evicted only.
        impl: which implementation of the operators runs, as for `convert`.
        budgets: take what `heedful budget` found, if the folder has a `budgets.json`: caches that
            `heedful.new_cache` and `generate` make then evict, and the one that a bare call of the
            model makes keeps everything. `heedful.new_cache(model, eviction=False)` does so too.
        convert: put the mechanism in place of the model's attention also where it only ranks tokens
            for eviction (`Selective(masks=False)`, what the recipes `hide` and `evict` train): to
            train it, or to see its maps. By default such a model keeps its own attention, and its
            logits are the base's, to the last bit, until its cache evicts.
        verify: prove that the conversion changes nothing but the attention, as for `convert`.
        mechanisms: classes of configurations that the folder names and heedful does not have: of
            mechanisms of your own. Nothing that a folder names is imported.
        options: for transformers' `from_pretrained`, such as `dtype` or `device_map`.

    Returns:
        The converted model in eval mode, as `from_pretrained` gives it. `heedful.revert(model)`
        takes the mechanism out.

    Raises:
        ValueError: no such checkpoint, a mechanism that is not known, an incompatible version,
            damaged parameters, budgets of another model, or an adapter of another base.
    """
    for name in ("attn_implementation", "config", "output_loading_info", "state_dict"):
        if options.get(name):
            raise UserError(f"{name} is not an option of heedful.load; leave it out")
    if adapter is None and not isinstance(folder, PreTrainedModel) and is_adapter(folder):
        folder, adapter = base_of(folder), folder
    if adapter is not None:
        own = {"impl": impl, "budgets": budgets, "verify": verify, "convert": convert}
        return load_adapter(folder, adapter, mechanisms=mechanisms, **own, **options)
    folder = Path(folder)
    about = saved_conversion(folder)
    inner = about["base"]
    tensors = read_parameters(folder)
    architectures = [name for name in inner.get("architectures") or [] if isinstance(name, str)]
    config = AutoConfig.for_model(**inner | {"architectures": architectures})
    family = _family(inner, config)
    # The mechanism's parameters are expected here, so transformers need not report them.
    model, report = ignoring(family, r"\.heedful\.").from_pretrained(
        folder, config=config, output_loading_info=True, **options
    )
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"{folder} lacks weights of the model: {', '.join(missing)}")
    model.__class__ = family
    model.name_or_path = ""  # PEFT would read the folder as one of the family's, and be refused
    restore(model, about["mechanisms"], tensors, impl, verify, convert or None, mechanisms)
    if budgets:
        saved_budgets.take_budgets(folder, model)
    return model


def _family(inner: dict, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a saved configuration names, else the causal model of its type."""
    for name in inner.get("architectures") or []:
        candidate = getattr(transformers, str(name), None)
        if isinstance(candidate, type) and issubclass(candidate, PreTrainedModel):
            return candidate
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"the checkpoint names no model class of this transformers (architectures="
            f"{inner.get('architectures')}, model_type={inner.get('model_type')!r})"
        )
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def saved_conversion(folder: Path) -> dict:
    """Read and check the conversion in a folder's `config.json`: mechanisms and the base."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"folder must be a checkpoint with a config.json, got {folder}")
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); the checkpoint is damaged") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path} must hold a JSON object; the checkpoint is damaged")
    return conversion_in(saved, path)


def conversion_in(saved: dict, path: str | os.PathLike) -> dict:
    """Check the conversion in the contents of a `config.json`; `path` is its name."""
    folder = Path(path).parent
    if saved.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"{folder} holds a plain {saved.get('model_type')!r} model without a mechanism: load "
            "it with AutoModelForCausalLM.from_pretrained, then heedful.convert it"
        )
    about = saved.get("heedful")
    version = about.get("format") if isinstance(about, dict) else None
    if version != FORMAT:
        raise UserError(
            f"{folder} was written in checkpoint format {version}, this version of heedful reads "
            f"{FORMAT}; load it with the version that wrote it"
        )
    parts = about.get("mechanisms")
    whole = isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts)
    for key, kind, default in (
        ("mechanism", dict, None),
        ("layers", list, None),
        ("where", list, []),
    ):
        if not whole or not all(isinstance(part.get(key, default), kind) for part in parts):
            raise UserError(f"{path} has no valid {key!r}; the checkpoint is damaged")
    if not isinstance(about.get("base"), dict):
        raise UserError(f"{path} has no valid 'base'; the checkpoint is damaged")
    if about["base"].get("model_type") not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"{path} holds a model of type {about['base'].get('model_type')!r}, which this "
            "transformers does not know; the checkpoint is damaged or needs a newer transformers"
        )
    return about
