"""Budgets of a model's KV cache as a file beside the model, `budgets.json`."""

import dataclasses
import json
from pathlib import Path

from torch import nn

from heedful.checks import UserError
from heedful.eviction import POLICIES, Eviction
from heedful.files import write_whole
from heedful.hf.cache.new import new_cache
from heedful.hf.fingerprints import fingerprint, is_of
from heedful.hf.identity import matrices_digest

NAME = "budgets.json"
FORMAT = 2


def write_budgets(path: Path, eviction: Eviction, model: nn.Module, about: dict) -> None:
    """Write a policy and its budgets for this model.

    Arguments:
        path: the file.
        eviction: the policy.
        model: the converted model that the budgets are for.
        about: how they were found, for people.

    Raises:
        ValueError: the policy is not one of heedful's own.
    """
    if type(eviction) not in POLICIES:
        raise UserError(
            f"eviction: budgets.json names heedful's own policies, and {type(eviction).__name__} "
            "is not one of them; hand it to heedful.new_cache"
        )
    policy = {"kind": type(eviction).__name__}
    policy |= {name: getattr(eviction, name) for name in _arguments(type(eviction))}
    data = {
        "format": FORMAT,
        "eviction": policy,
        "about": about,
        "model": fingerprint(model),
        "matrices": _matrices_of(model),
    }
    write_whole(path, json.dumps(data, indent=2) + "\n")


def read_budgets(path: Path, model: nn.Module) -> Eviction:
    """The policy of a budgets file.

    Raises:
        ValueError: there is no such file, it is damaged, or it belongs to another model.
    """
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"budgets {path} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"budgets {path} is not valid JSON ({error}); delete it, or search budgets again with "
            "heedful budget"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(
            f"budgets {path} must be a file of heedful budget in format {FORMAT}; delete it, "
            "or search budgets again with heedful budget"
        )
    own, theirs = _matrices_of(model), data.get("matrices")
    if own != theirs:
        raise UserError(
            f"budgets {path} were searched {'with other' if own and theirs else 'without the'} "
            f"LoRA{'' if own else ' that this model lacks' if theirs else ''}: search budgets "
            "again with heedful budget, or delete the file (heedful.load(folder, budgets=False) "
            "leaves it unread)"
        )
    # An adapter with matrices has had its base checked when it was opened.
    fits = is_of if own is None else _is_alike
    if not fits(data.get("model"), model):
        raise UserError(
            f"budgets {path} belongs to another model, or to this one before it was trained on: "
            "search budgets again with heedful budget, or delete the file "
            "(heedful.load(folder, budgets=False) leaves it unread)"
        )
    eviction = data.get("eviction")
    fields = dict(eviction) if isinstance(eviction, dict) else {}
    name = fields.pop("kind", None)
    kind = next((x for x in POLICIES if x.__name__ == name), None)
    if kind is None or set(fields) - _arguments(kind):
        raise UserError(
            f"budgets {path} names no policy of this version of heedful; search budgets again with "
            "heedful budget"
        )
    try:
        policy = kind(**fields)
        new_cache(model, policy)  # raises now if the model does not support it
    except (TypeError, ValueError) as error:
        raise UserError(f"budgets {path}: {error}") from None
    return policy


def _arguments(kind: type[Eviction]) -> set[str]:
    """The arguments of a policy."""
    return {field.name for field in dataclasses.fields(kind) if field.init}


def _is_alike(saved: object, model: nn.Module) -> bool:
    """Test whether a fingerprint has these shapes and this mechanism, whatever the base's weights.

    Merged matrices hide whether the weights below them are those of another quantisation.
    """
    own = fingerprint(model)
    return isinstance(saved, dict) and all(
        saved.get(name) == own[name] for name in ("sizes", "mechanism")
    )


def _matrices_of(model: nn.Module) -> str | None:
    """A digest of the LoRA weights in the model, or of those that were merged into it."""
    live = matrices_digest(model.named_parameters())
    return getattr(getattr(model, "_heedful", None), "matrices", None) if live is None else live


def take_budgets(folder: Path, model: nn.Module) -> None:
    """Let `new_cache` and `generate` do what the `budgets.json` of the model's folder says, if any.

    The cache that a bare call of the model makes for itself keeps everything: calls in training
    make one too, and an eviction has no gradient.

    Raises:
        ValueError: as `read_budgets`.
    """
    path = folder / NAME
    if path.is_file():
        model._heedful.eviction = read_budgets(path, model)
        model._heedful._budgets = path.read_text()


def belongs(path: Path, model: nn.Module) -> bool:
    """Test whether a budgets file is whole and this model's."""
    try:
        read_budgets(path, model)
    except ValueError:
        return False
    return True
