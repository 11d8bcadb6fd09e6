"""Save and load converted models.

A checkpoint is transformers' own folder with two differences: the weights hold the mechanism's
parameters beside the model's, and `config.json` says `"model_type": "heedful"` with the model's own
configuration deep inside it. So the Auto classes fail by name where they do not know the mechanism,
and a family's own class fails by what it reads beside it. Neither drops the mechanism. What the
Auto classes need to open it is in `heedful.auto_classes`.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from heedful.auto_classes import (
    MODEL_TYPE,
    REFUSED_ELSEWHERE,
    SHIM,
    SHIM_TEXT,
    HeedfulConfig,
    auto_map,
    register_config,
)
from heedful.hf import budgets as beside
from heedful.hf.versions import ignoring, implementation_of
from heedful.nn import Role, to_json
from heedful.ops.impl import Impl

FORMAT = 2


def save_converted(
    model: PreTrainedModel,
    base: type,
    save: Callable,
    folder: str | os.PathLike,
    options: dict,
) -> None:
    """Write a converted model of the family's class `base`, by that class's `save`.

    Files appear in `folder` only once all are written.
    """
    conversion = model._heedful
    if options.get("push_to_hub"):
        raise ValueError("push_to_hub is not supported: save to a folder, then upload the folder")
    if options.get("variant"):
        raise ValueError("variant is not supported: save to a folder of its own")
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"save_directory must be a folder, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as made:
        converted = use_cache_settings(model), model.config.architectures
        set_use_cache(model, conversion._before["use_cache"])
        try:
            save(made, **options)
        finally:
            set_use_cache(model, converted[0])
            model.config.architectures = converted[1]
        written = Path(made) / "config.json"
        if written.exists():  # only the main process of a distributed run writes
            inner = json.loads(written.read_text())
            inner["architectures"] = [base.__name__]
            auto = _auto_class(base, model.config)
            outer = {
                # transformers serve looks up this name in transformers and has no other way in.
                "architectures": [auto or HeedfulModel.__name__],
                "model_type": MODEL_TYPE,
                "auto_map": auto_map(auto),
                **REFUSED_ELSEWHERE,
                "heedful": {
                    "format": FORMAT,
                    "mechanisms": [
                        {"mechanism": to_json(mechanism), "layers": list(layers)}
                        | _where(conversion.where[mechanism])
                        for mechanism, layers in conversion.mechanisms.items()
                    ],
                    "base": inner,
                },
            }
            written.write_text(json.dumps(outer, indent=2) + "\n")
            (Path(made) / SHIM).write_text(SHIM_TEXT)
        if written.exists():
            _carry_budgets(model, folder, Path(made), changed="state_dict" in options)
        # config.json first: from then on no stock loader can take the folder for a stock model.
        files = sorted(Path(made).iterdir(), key=lambda path: path.name != "config.json")
        for path in files:
            if (target := folder / path.name).is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        if files:  # weights of an earlier save, in more or fewer files, would be loaded instead
            for path in _weights(folder) - {folder / path.name for path in files}:
                path.unlink()


def _where(roles: tuple[Role, ...]) -> dict:
    """In which attention a mechanism stands; a decoder's self-attention goes without saying."""
    return {} if roles == ("decoder",) else {"where": list(roles)}


def _carry_budgets(model: PreTrainedModel, folder: Path, made: Path, changed: bool) -> None:
    """Budgets go with the weights that they were searched for, and with no others."""
    own = None if changed or model._heedful.eviction is None else model._heedful._budgets
    if own is not None and beside.is_of(json.loads(own)["model"], model):
        (made / beside.NAME).write_text(own)
        return
    old = folder / beside.NAME
    if old.is_file() and (changed or not beside.belongs(old, model)):
        old.unlink()


def load(
    folder: str | os.PathLike,
    *,
    impl: Impl = "auto",
    budgets: bool = True,
    verify: bool | None = None,
    **options,
) -> PreTrainedModel:
    """Load a converted model that `save_pretrained` wrote.

    Arguments:
        folder: the checkpoint's folder.
        impl: which implementation of the operators runs, as for `convert`.
        budgets: take what `heedful budget` found, if the folder has a `budgets.json`: new caches of
            the model then evict. `heedful.new_cache(model, eviction=False)` keeps everything.
        verify: prove that the conversion changes nothing but the attention, as for `convert`.
        options: for transformers' `from_pretrained`, such as `dtype` or `device_map`.

    Returns:
        The converted model in eval mode, as `from_pretrained` gives it. `heedful.revert(model)`
        takes the mechanism out.

    Raises:
        ValueError: no such checkpoint, an incompatible version, damaged parameters, or budgets of
            another model.
    """
    from heedful.hf.convert import restore

    for name in ("attn_implementation", "config", "output_loading_info", "state_dict"):
        if options.get(name):
            raise ValueError(f"{name} is not an option of heedful.load; leave it out")
    register()
    folder = Path(folder)
    about = saved_conversion(folder)
    inner = about["base"]
    tensors = _read_parameters(folder)
    named = [name for name in inner.get("architectures") or [] if isinstance(name, str)]
    config = AutoConfig.for_model(**inner | {"architectures": named})
    family = _family(inner, config)
    # The mechanism's parameters are expected here, so transformers need not report them.
    model, found = ignoring(family, r"\.heedful\.").from_pretrained(
        folder, config=config, output_loading_info=True, **options
    )
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{folder} lacks weights of the model: {', '.join(missing)}")
    model.__class__ = family
    model.name_or_path = ""  # PEFT would read the folder as one of the family's, and be refused
    restore(model, about["mechanisms"], tensors, impl, verify)
    if budgets:
        beside.take_budgets(folder, model)
    return model


def _family(inner: dict, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a saved configuration names, else the causal model of its type."""
    for name in inner.get("architectures") or []:
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"the checkpoint names no model class of this transformers (architectures="
            f"{inner.get('architectures')}, model_type={inner.get('model_type')!r})"
        )
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def use_cache_settings(model: PreTrainedModel) -> dict[str, bool | None]:
    """Whether the model caches by default, in each of its configurations that says so."""
    holders = {name: getattr(model, name, None) for name in ("config", "generation_config")}
    return {name: x.use_cache for name, x in holders.items() if hasattr(x, "use_cache")}


def set_use_cache(model: PreTrainedModel, settings: dict[str, bool | None]) -> None:
    """Set what `use_cache_settings` told."""
    for name, value in settings.items():
        getattr(model, name).use_cache = value


def _weights(folder: Path) -> set[Path]:
    shard = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
    return {path for path in folder.iterdir() if shard.fullmatch(path.name)}


def _read_parameters(folder: Path) -> dict[str, Tensor]:
    """The mechanism's parameters."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys() if ".heedful." in key}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); copy or save it again") from None
    return tensors


def saved_conversion(folder: Path) -> dict:
    """What a folder's `config.json` says of the conversion, checked: mechanisms and the base."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"folder must be a checkpoint with a config.json, got {folder}")
    try:
        saved = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the checkpoint is damaged") from None
    if not isinstance(saved, dict):
        raise ValueError(f"{path} must hold a JSON object; the checkpoint is damaged")
    if saved.get("model_type") != MODEL_TYPE:
        raise ValueError(
            f"{folder} holds a plain {saved.get('model_type')!r} model without a mechanism: load "
            "it with AutoModelForCausalLM.from_pretrained, then heedful.convert it"
        )
    about = saved.get("heedful")
    version = about.get("format") if isinstance(about, dict) else None
    if version == 1:  # one mechanism for all of its layers
        one = {name: about.get(name) for name in ("mechanism", "layers")}
        about = {"format": FORMAT, "mechanisms": [one], "base": about.get("base")}
        version = FORMAT
    if version != FORMAT:
        raise ValueError(
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
            raise ValueError(f"{path} has no valid {key!r}; the checkpoint is damaged")
    if not isinstance(about.get("base"), dict):
        raise ValueError(f"{path} has no valid 'base'; the checkpoint is damaged")
    if about["base"].get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{path} holds a model of type {about['base'].get('model_type')!r}, which this "
            "transformers does not know; the checkpoint is damaged or needs a newer transformers"
        )
    return about


_AUTO = {
    "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForSeq2SeqLM": transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "AutoModelForMaskedLM": transformers.MODEL_FOR_MASKED_LM_MAPPING,
}


def _auto_class(family: type, config: PreTrainedConfig) -> str | None:
    """The name of the Auto class that makes this class of such a configuration, if one here."""
    known = (name for name, models in _AUTO.items() if models.get(type(config), None) is family)
    return next(known, None)


class HeedfulModel(PreTrainedModel):
    """What transformers' Auto classes call to open a converted checkpoint."""

    config_class = HeedfulConfig

    @classmethod
    def from_pretrained(cls, folder, *args, config=None, **options) -> PreTrainedModel:
        """As `heedful.load`."""
        # The Auto classes take it out of their options and put it into the configuration.
        if config is not None and implementation_of(config) is not None:
            options["attn_implementation"] = implementation_of(config)
        return load(folder, **options)


def register() -> None:
    """Teach transformers' Auto classes the checkpoints of converted models; repeats do nothing.

    `heedful.load` and `heedful.convert` do it too. Call it in a process that hands the path of a
    saved folder to a tool which knows the Auto classes alone.
    """
    register_config()
    for name in _AUTO:
        getattr(transformers, name).register(HeedfulConfig, HeedfulModel, exist_ok=True)
