"""Save and load converted models.

A checkpoint is transformers' own folder with two differences: the weights hold the mechanism's
parameters beside the model's, and `config.json` says `"model_type": "heedful"` with the model's own
configuration inside it. So a plain `from_pretrained` that does not know the mechanism fails by name
instead of dropping it.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from heedful.nn import to_json

FORMAT = 1


def save_converted(
    model: PreTrainedModel, conversion, save: Callable, folder: str | os.PathLike, options: dict
) -> None:
    """Write a converted model; files appear in `folder` only once all are written."""
    if options.get("push_to_hub"):
        raise ValueError("push_to_hub is not supported: save to a folder, then upload the folder")
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"save_directory must be a folder, got the file {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    base = type(model).__mro__[2]
    before = conversion._before
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as made:
        converted = (model.config.use_cache, model.generation_config.use_cache)
        model.config.use_cache = before["use_cache"]
        model.generation_config.use_cache = before["generation_use_cache"]
        try:
            save(made, **options)
        finally:
            model.config.use_cache, model.generation_config.use_cache = converted
        written = Path(made) / "config.json"
        if written.exists():  # only the main process of a distributed run writes
            inner = json.loads(written.read_text())
            inner["architectures"] = [base.__name__]
            outer = {
                "architectures": ["HeedfulForCausalLM"],
                "model_type": "heedful",
                "heedful": {
                    "format": FORMAT,
                    "mechanism": to_json(conversion.mechanism),
                    "layers": list(conversion.layers),
                },
                "base": inner,
            }
            written.write_text(json.dumps(outer, indent=2) + "\n")
        # config.json first: from then on no stock loader can take the folder for a stock model.
        for path in sorted(Path(made).iterdir(), key=lambda path: path.name != "config.json"):
            if (target := folder / path.name).is_dir():
                shutil.rmtree(target)
            os.replace(path, target)


def load(folder: str | os.PathLike, **options) -> PreTrainedModel:
    """Load a converted model that `save_pretrained` wrote.

    Arguments:
        folder: the checkpoint's folder.
        options: for transformers' `from_pretrained`, such as `dtype` or `device_map`.

    Returns:
        The converted model in eval mode, as `from_pretrained` gives it. `heedful.revert(model)`
        takes the mechanism out.

    Raises:
        ValueError: no such checkpoint, an incompatible version, or damaged parameters.
    """
    from heedful.hf.convert import restore

    folder = Path(folder)
    saved = _read_config(folder)
    about, inner = saved["heedful"], dict(saved["base"])
    name = (inner.get("architectures") or [""])[0]
    family = getattr(transformers, name, AutoModelForCausalLM)
    config = AutoConfig.for_model(**inner)
    if family is AutoModelForCausalLM:
        family = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # The mechanism's parameters are expected here, so transformers need not report them.
    ignoring = type(
        family.__name__, (family,), {"_keys_to_ignore_on_load_unexpected": [r"\.heedful\."]}
    )
    model = ignoring.from_pretrained(folder, config=config, **options)
    model.__class__ = family
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys() if ".heedful." in key}  # noqa: SIM118
    restore(model, about["mechanism"], about["layers"], tensors)
    return model


def _read_config(folder: Path) -> dict:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"folder must be a checkpoint with a config.json, got {folder}")
    try:
        saved = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); the checkpoint is damaged") from None
    if saved.get("model_type") != "heedful":
        raise ValueError(
            f"{folder} holds a plain {saved.get('model_type')!r} model without a mechanism: load "
            "it with AutoModelForCausalLM.from_pretrained, then heedful.convert it"
        )
    version = saved.get("heedful", {}).get("format")
    if version != FORMAT:
        raise ValueError(
            f"{folder} was written in checkpoint format {version}, this version of heedful reads "
            f"{FORMAT}; load it with the version that wrote it"
        )
    return saved


class HeedfulConfig(PreTrainedConfig):
    """What a saved `config.json` holds, for transformers' Auto classes."""

    model_type = "heedful"


class HeedfulForCausalLM(PreTrainedModel):
    """Lets transformers' Auto classes load converted checkpoints, after `register()`."""

    config_class = HeedfulConfig

    @classmethod
    def from_pretrained(cls, folder, *args, config=None, **options) -> PreTrainedModel:
        """As `heedful.load`."""
        return load(folder, **options)


def register() -> None:
    """Teach transformers' Auto classes the checkpoints of converted models; repeats do nothing."""
    AutoConfig.register("heedful", HeedfulConfig, exist_ok=True)
    AutoModelForCausalLM.register(HeedfulConfig, HeedfulForCausalLM, exist_ok=True)
