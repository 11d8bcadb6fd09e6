"""Budgets of a model's KV cache as a file beside the model, `budgets.json`."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

from heedful.eviction import POLICIES, Bounded, Eviction
from heedful.hf.cache.new import attention_modules, new_cache
from heedful.records.files import write_whole

NAME = "budgets.json"
FORMAT = 1

_NUMBERS = 64  # of a model's weights that are written down
_ROUNDING = 2**-8  # relative: what half precision changes, twice over


def write_budgets(path: Path, eviction: Eviction, model: nn.Module, about: dict) -> None:
    """Write a policy and its budgets for this model.

    Arguments:
        path: the file.
        eviction: the policy.
        model: the converted model that the budgets are for.
        about: how they were found, for people.
    """
    policy = {"kind": type(eviction).__name__}
    policy |= {name: getattr(eviction, name) for name in _arguments(type(eviction))}
    data = {"format": FORMAT, "eviction": policy, "about": about, "model": fingerprint(model)}
    write_whole(path, json.dumps(data, indent=2) + "\n")


def read_budgets(path: Path, model: nn.Module) -> Eviction:
    """The policy of a budgets file.

    Raises:
        ValueError: there is no such file, it is damaged, or it belongs to another model.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"budgets {path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(
            f"budgets {path} is not valid JSON ({error}); delete it, or search budgets again with "
            "heedful budget"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(
            f"budgets {path} must be a file of heedful budget in format {FORMAT}; delete it, or "
            "search budgets again with heedful budget"
        )
    if not is_of(data.get("model"), model):
        raise ValueError(
            f"budgets {path} belongs to another model, or to this one before it was trained on: "
            "search budgets again with heedful budget, or delete the file "
            "(heedful.load(folder, budgets=False) leaves it unread)"
        )
    fields = dict(data.get("eviction") or {})
    kinds = {policy.__name__: policy for policy in (*POLICIES, Bounded)}
    kind = kinds.get(fields.pop("kind", None))
    if kind is None or set(fields) - _arguments(kind):
        raise ValueError(
            f"budgets {path} names no policy of this version of heedful; search budgets again with "
            "heedful budget"
        )
    try:
        eviction = kind(**fields)
        new_cache(model, eviction)  # what cannot serve the model raises now
    except (TypeError, ValueError) as error:
        raise ValueError(f"budgets {path}: {error}") from None
    return eviction


def _arguments(kind: type[Eviction]) -> set[str]:
    """The arguments of a policy."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def take_budgets(folder: Path, model: nn.Module) -> None:
    """Let new caches of a converted model do what the `budgets.json` of its folder says, if any.

    Raises:
        ValueError: as `read_budgets`.
    """
    path = folder / NAME
    if path.is_file():
        model._heedful.eviction = read_budgets(path, model)
        model._heedful._budgets = path.read_text()


def belongs(path: Path, model: nn.Module) -> bool:
    """Whether a budgets file is whole and this model's."""
    try:
        read_budgets(path, model)
    except ValueError:
        return False
    return True


def fingerprint(model: nn.Module) -> dict:
    """What tells a converted model from another one, as JSON-ready values."""
    modules = attention_modules(model)
    layers = [f"{type(m.heedful).__name__} {m.heedful.shape}" for m in modules]
    return fingerprint_of(dict(model.named_parameters()), layers)


def fingerprint_of(parameters: Mapping[str, Tensor], layers: Iterable[str] = ()) -> dict:
    """What tells parameters from others, as JSON-ready values.

    `sizes` is a digest of the attention layers and the shapes of all parameters, `weights` are a
    few numbers from all over the parameters.
    """
    named = sorted(parameters.items())
    parts = [*layers, *(f"{name} {tuple(p.shape)}" for name, p in named)]
    weights = []
    for i in range(_NUMBERS):
        p = named[i * len(named) // _NUMBERS][1].detach().flatten()
        place = int(i * 0.618034 % 1 * p.numel())  # spread evenly, whatever the number of layers
        weights.append(float(f"{p[place].item():.6g}"))
    return {"sizes": hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16], "weights": weights}


def is_of(saved: object, model: nn.Module) -> bool:
    """Whether a fingerprint is this model's, be it in another precision."""
    return same_weights(saved, fingerprint(model))


def same_weights(saved: object, own: dict) -> bool:
    """Whether two fingerprints are of the same weights, be it in another precision."""
    if not isinstance(saved, dict) or saved.get("sizes") != own["sizes"]:
        return False
    pairs = zip(saved.get("weights") or (), own["weights"], strict=False)
    near = [math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=1e-7) for a, b in pairs]
    return len(near) == _NUMBERS and all(near)
