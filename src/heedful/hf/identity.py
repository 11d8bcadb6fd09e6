"""Digests of models and of files: what a kept answer, a search or a run belongs to.

A fingerprint (`fingerprints.py`) finds the same weights again in another precision; a digest finds
exactly one model.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

_LENGTH = 16  # hexadecimal digits: 64 bits, to tell models apart and not to guard them
_ADDED = (".heedful.", ".lora_")  # in the names of an adapter's parameters
# Of a configuration, what decides nothing that a model computes; nor do private names.
_IRRELEVANT = frozenset(
    {"transformers_version", "architectures", "auto_map", "use_cache", "dtype", "torch_dtype"}
)


def model_identity(model: nn.Module) -> dict[str, str]:
    """Digests of all that decides what a model computes, part by part.

    Returns:
        weights: of the base's parameters and buffers, precision included.
        adapter: of the mechanism's parameters and of LoRA.
        mechanism: its configuration in each layer, and when LoRA acts.
        configuration: of the model and of `generate`.
    """
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    added = {name: x for name, x in named.items() if any(mark in name for mark in _ADDED)}
    conversion = getattr(model, "_heedful", None)
    mechanism = [
        [f"{x} in {conversion.where[x]}: {layers}" for x, layers in conversion.mechanisms.items()],
        conversion.after_eviction is not None,
    ] if conversion is not None else []  # fmt: skip
    parts = (getattr(model, name, None) for name in ("config", "generation_config"))
    configuration = [None if x is None else _relevant(x.to_dict()) for x in parts]
    return {
        "weights": tensors_digest((k, x) for k, x in named.items() if k not in added),
        "adapter": tensors_digest(added.items()),
        "mechanism": json_digest(mechanism),
        "configuration": json_digest(configuration),
    }


def cache_identity(model: nn.Module) -> dict[str, str]:
    """As `model_identity`, without how `generate` chooses tokens: what cached keys depend on."""
    own = {"configuration": json_digest(_relevant(model.config.to_dict()))}
    return model_identity(model) | own


def tensors_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of tensors by name: shapes, dtypes and every bit."""
    whole = hashlib.sha256()
    for name, x in sorted(named, key=lambda pair: pair[0]):
        whole.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        whole.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return whole.hexdigest()[:_LENGTH]


def matrices_digest(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """A digest of the LoRA weights among tensors, the same in a model and in PEFT's file.

    Rounded to bfloat16, as adapters keep them; `None` where there are none.
    """
    matrices = {
        name.removeprefix("base_model.model.").replace(".default.", "."): x.to(torch.bfloat16)
        for name, x in named
        if ".lora_" in name
    }
    return tensors_digest(matrices.items()) if matrices else None


def json_digest(value: object) -> str:
    """A digest of what JSON can hold; of anything else its type counts."""
    text = json.dumps(value, sort_keys=True, default=lambda x: type(x).__name__)
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def files_digest(paths: Iterable[Path]) -> str:
    """A digest of files: their names, not their folders, and every byte."""
    whole = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:  # weights need not fit into memory
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.name} {content}\n".encode())
    return whole.hexdigest()[:_LENGTH]


def _relevant(value: object) -> object:
    """A configuration without what decides nothing."""
    if isinstance(value, dict):
        relevant = {str(k): x for k, x in value.items() if k not in _IRRELEVANT}
        return {k: _relevant(x) for k, x in relevant.items() if not k.startswith("_")}
    return [_relevant(x) for x in value] if isinstance(value, list | tuple) else value
