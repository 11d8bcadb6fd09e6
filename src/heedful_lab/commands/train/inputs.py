"""Digests of what a training run reads, so that it goes on with the same, and with nothing else."""

import platform
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from heedful.data import text_files
from heedful.hf.adapter_folders import base_of, is_adapter
from heedful.hf.budgets import NAME
from heedful.hf.identity import files_digest
from heedful.hf.stock import gguf_file, is_gguf
from heedful_lab.commands.train.options import SIZES

_OF_A_MODEL = (".safetensors", ".bin", ".json", ".gguf", ".model", ".txt")
_OF_OTHERS = ("training.json", NAME)  # of a run, and of a search


@dataclass(frozen=True)
class RunInputs:
    """Files that a run reads, by name.

    model: as on the command line.
    data: names of texts.
    held_out: of those of the evaluation set.
    tokenizer: a folder, or anything else, which does not count.
    budgets: a file of budgets under which the run trains.
    """

    model: str
    data: tuple[str, ...]
    held_out: tuple[str, ...] = ()
    tokenizer: str | None = None
    budgets: Path | None = None

    def digests(self) -> dict[str, object]:
        """Digests of all of it, as JSON.

        A name on the hub counts by the commit that is cached, a dataset there by its name.

        Raises:
            ValueError: a text is missing, or named twice.
        """
        inputs = {"model": _of_model(self.model), "data": _of_texts(self.data)}
        if self.held_out:
            inputs["held_out"] = _of_texts(self.held_out)
        if self.tokenizer is not None and Path(self.tokenizer).is_dir():
            inputs["tokenizer"] = _of_folder(Path(self.tokenizer))
        if self.budgets is not None and self.budgets.is_file():
            inputs["budgets"] = files_digest([self.budgets])
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
