"""Budgets of a model's KV cache as a file beside the model, `budgets.json`."""

import dataclasses
import json
from pathlib import Path

from torch import nn

from heedful.eviction import POLICIES, Bounded, Eviction
from heedful.hf.cache.new import new_cache
from heedful.hf.fingerprints import fingerprint, is_of
from heedful.records.files import write_whole

NAME = "budgets.json"
FORMAT = 1


def write_budgets(path: Path, eviction: Eviction, model: nn.Module, about: dict) -> None:
    """Write a policy and its budgets for this model.

    Arguments:
        path: the file.
        eviction: the policy.
        model: the converted model that the budgets are for.
        about: how they were found, for people.

    Raises:
        ValueError: the policy is calibrated.
    """
    if getattr(eviction, "calibration", None) is not None:
        raise ValueError(
            f"eviction: {type(eviction).__name__} has a calibration, which budgets.json does not "
            "hold; write budgets of another policy"
        )
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
    except (ValueError, RecursionError) as error:
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
    eviction = data.get("eviction")
    fields = dict(eviction) if isinstance(eviction, dict) else {}
    name = fields.pop("kind", None)
    kind = next((x for x in (*POLICIES, Bounded) if x.__name__ == name), None)
    if kind is None or set(fields) - _arguments(kind):
        raise ValueError(
            f"budgets {path} names no policy of this version of heedful; search budgets again with "
            "heedful budget"
        )
    try:
        policy = kind(**fields)
        new_cache(model, policy)  # what cannot serve the model raises now
    except (TypeError, ValueError) as error:
        raise ValueError(f"budgets {path}: {error}") from None
    return policy


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
