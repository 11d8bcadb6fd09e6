"""Digests of what a training run reads, so that it goes on with the same, and with nothing else."""

import platform
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from heedful.data import text_files
from heedful.hf.adapter_folders import base_of, is_adapter
from heedful.hf.budgets import NAME
from heedful.hf.identity import files_digest
from heedful.hf.stock import gguf_file, is_gguf
from heedful_lab.commands.options import RECALL
from heedful_lab.commands.train.options import EVICT, SIZES, Training

_OF_A_MODEL = (".safetensors", ".bin", ".json", ".gguf", ".model", ".txt")
_OF_OTHERS = ("training.json", NAME)  # of a run, and of a search


def run_inputs(options: Training) -> dict[str, object]:
    """Digests of the model, the texts, the tokenizer and the budgets, as JSON.

    Raises:
        ValueError: a text is missing, or named twice.
    """
    texts = tuple(x for part in options.parts() for x in part.data if x != RECALL)
    inputs = digests(options.model, texts, options.held_out, options.tokenizer)
    budgets = Path(options.model) / NAME
    if options.recipe == EVICT and budgets.is_file():
        inputs["budgets"] = files_digest([budgets])
    return inputs


def digests(
    model: str, data: tuple[str, ...], held_out: tuple[str, ...], tokenizer: str | None
) -> dict[str, object]:
    """Digests of a model, of texts and of a tokenizer, as JSON.

    A name on the hub counts by the commit that is cached, a dataset there by its name.

    Raises:
        ValueError: a text is missing, or named twice.
    """
    inputs = {"model": _of_model(model), "data": _of_texts(data)}
    if held_out:
        inputs["held_out"] = _of_texts(held_out)
    if tokenizer is not None and Path(tokenizer).is_dir():
        inputs["tokenizer"] = _of_folder(Path(tokenizer))
    return inputs


def _of_model(name: str) -> str | list[str]:
    path = Path(name)
    if name in SIZES:
        return name
    if is_adapter(path):
        return [_of_folder(path), str(_of_model(base_of(path)))]
    if is_gguf(name):
        path = gguf_file(name)
    if path.is_dir():
        return _of_folder(path)
    if path.is_file():
        return files_digest([path])
    return _cached_commit(name) or name


def _cached_commit(name: str) -> str | None:
    """The commit of a repository on the hub that this machine has a copy of, without asking."""
    owner, *rest = name.split("/")
    repository, file = "/".join([owner, *rest[:1]]), "/".join(rest[1:]) or "config.json"
    try:
        cached = try_to_load_from_cache(repository, file)
    except HFValidationError:
        return None
    return Path(cached).parent.name if isinstance(cached, str) else None


def _of_folder(folder: Path) -> str:
    files = (x for x in folder.iterdir() if x.suffix in _OF_A_MODEL and x.is_file())
    return files_digest(sorted(x for x in files if x.name not in _OF_OTHERS))


def _of_texts(names: tuple[str, ...]) -> dict[str, str]:
    """A digest of each text; a text may belong to several parts of a mixture."""
    if not names:
        return {"the Python standard library": platform.python_version()}
    each = ((name, text_files([name])[0][1]) for name in names)
    return {name: name if files is None else files_digest(files) for name, files in each}
