"""Save converted models.

A checkpoint is transformers' own folder with two differences: the weights hold the mechanism's
parameters beside the model's, and `config.json` says `"model_type": "heedful"` with the model's own
configuration deep inside it. So the Auto classes fail by name where they do not know the mechanism,
and a family's own class fails by what it reads beside it. Neither drops the mechanism.

Tools that are given nothing but a path call transformers' Auto classes, and these know a model type
only from the process or from the folder. In the folder stands a shim, a file of one import, named
in `config.json` by `auto_map`: with `trust_remote_code=True` transformers runs it.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from heedful.checks import UserError
from heedful.files import writing_to
from heedful.hf import budgets as saved_budgets
from heedful.hf.fingerprints import is_of
from heedful.nn import MechanismConfig, Role, to_json

FORMAT = 2
MODEL_TYPE = "heedful"
SHIM = "open_with_heedful.py"
AUTO = {
    "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForSeq2SeqLM": transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "AutoModelForMaskedLM": transformers.MODEL_FOR_MASKED_LM_MAPPING,
}

SHIM_TEXT = '''\
"""The weights in this folder are of a model converted by heedful, which must be installed.

To open it, in any of three ways:

    heedful.load(folder)
    heedful.register()                    # then transformers' Auto classes know the folder
    ...from_pretrained(folder, trust_remote_code=True)    # which runs this file
"""

from heedful.hf.auto_classes import HeedfulConfig, HeedfulModel  # noqa: F401
'''

_ADVICE = (
    "heedful: open this folder with heedful.load(folder); with transformers' Auto classes after "
    "heedful.register(); or with these and trust_remote_code=True"
)
# A family's own class reads any configuration and takes its defaults for what it does not find: a
# model of billions of random weights. These fields stop it, each with a message that says why: no
# configuration takes such a vocabulary or text model, and no process knows such an attention.
REFUSED_ELSEWHERE = dict.fromkeys(("attn_implementation", "vocab_size", "text_config"), _ADVICE)


def save_converted(
    model: PreTrainedModel, base: type, save: Callable, folder: str | os.PathLike, options: dict
) -> None:
    """Write a converted model of the family's class `base`, by that class's `save`.

    Files appear in `folder` only once all are written.
    """
    conversion = model._heedful
    if options.get("push_to_hub"):
        raise UserError("push_to_hub is not supported: save to a folder, then upload the folder")
    if options.get("variant"):
        raise UserError("variant is not supported: save to a folder of its own")
    if conversion.after_eviction is not None:
        raise UserError(
            "model has LoRA that acts after an eviction, for which a checkpoint has no "
            "place: keep the adapter's folder, and heedful.load it on its base"
        )
    folder = Path(folder)
    if folder.is_file():
        raise UserError(f"save_directory must be a folder, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    with writing_to(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as staging:
        converted = use_cache_settings(model), model.config.architectures
        set_use_cache(model, conversion._undo.use_cache)
        try:
            save(staging, **options)
        finally:
            set_use_cache(model, converted[0])
            model.config.architectures = converted[1]
        config_file = Path(staging) / "config.json"
        if config_file.exists():  # only the main process of a distributed run writes
            inner = json.loads(config_file.read_text())
            inner["architectures"] = [base.__name__]
            auto = _auto_class(base, model.config)
            outer = {
                # transformers serve looks up this name in transformers and has no other way in.
                "architectures": [auto or "HeedfulModel"],
                "model_type": MODEL_TYPE,
                "auto_map": _auto_map(auto),
                **REFUSED_ELSEWHERE,
                "heedful": {
                    "format": FORMAT,
                    "mechanisms": mechanisms_to_json(conversion.mechanisms, conversion.where),
                    "base": inner,
                },
            }
            config_file.write_text(json.dumps(outer, indent=2) + "\n")
            (Path(staging) / SHIM).write_text(SHIM_TEXT)
        if config_file.exists():
            carry_budgets(model, folder, Path(staging), changed="state_dict" in options)
        # config.json first: from then on no stock loader can take the folder for a stock model.
        files = sorted(Path(staging).iterdir(), key=lambda path: path.name != "config.json")
        for path in files:
            if (target := folder / path.name).is_dir():
                shutil.rmtree(target)
            os.replace(path, target)
        if files:  # weights of an earlier save, in more or fewer files, would be loaded instead
            for path in _weights(folder) - {folder / path.name for path in files}:
                path.unlink()


def mechanisms_to_json(
    mechanisms: dict[MechanismConfig, tuple[int, ...]],
    where: dict[MechanismConfig, tuple[Role, ...]],
) -> list[dict]:
    """Mechanisms with the layers of each and in which attention they stand.

    A decoder's self-attention goes without saying.
    """
    parts = []
    for mechanism, layers in mechanisms.items():
        parts.append({"mechanism": to_json(mechanism), "layers": list(layers)})
        if (roles := where[mechanism]) != ("decoder",):
            parts[-1]["where"] = list(roles)
    return parts


def carry_budgets(model: PreTrainedModel, folder: Path, staging: Path, changed: bool) -> None:
    """Budgets go with the weights that they were searched for, and with no others."""
    own = None if changed or model._heedful.eviction is None else model._heedful._budgets
    if own is not None and is_of((data := json.loads(own))["model"], model):
        # LoRA has been merged into the weights that are saved.
        merged = data.get("matrices") is not None
        text = json.dumps(data | {"matrices": None}, indent=2) + "\n" if merged else own
        (staging / saved_budgets.NAME).write_text(text)
        return
    old = folder / saved_budgets.NAME
    if old.is_file() and (changed or not saved_budgets.belongs(old, model)):
        old.unlink()


def use_cache_settings(model: PreTrainedModel) -> dict[str, bool | None]:
    """Default of `use_cache`, in each of the model's configurations that has one."""
    holders = {name: getattr(model, name, None) for name in ("config", "generation_config")}
    return {name: x.use_cache for name, x in holders.items() if hasattr(x, "use_cache")}


def set_use_cache(model: PreTrainedModel, settings: dict[str, bool | None]) -> None:
    """Set what `use_cache_settings` returned."""
    for name, value in settings.items():
        getattr(model, name).use_cache = value


def _weights(folder: Path) -> set[Path]:
    shard = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
    return {path for path in folder.iterdir() if shard.fullmatch(path.name)}


def _auto_class(family: type, config: PreTrainedConfig) -> str | None:
    """The name of the Auto class that makes this class of such a configuration, if one here."""
    names = (name for name, models in AUTO.items() if models.get(type(config), None) is family)
    return next(names, None)


def _auto_map(auto_class: str | None) -> dict[str, str]:
    """Map `AutoConfig` and the model's own Auto class to the shim, for `config.json`."""
    module = SHIM.removesuffix(".py")
    models = {} if auto_class is None else {auto_class: f"{module}.HeedfulModel"}
    return {"AutoConfig": f"{module}.HeedfulConfig"} | models
