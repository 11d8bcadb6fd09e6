"""Budgets of a model's KV cache as a file beside the model, `budgets.json`."""

import dataclasses
import hashlib
import json
from pathlib import Path

from torch import nn

from heedful.hf.cache import attention_modules
from heedful.hf.eviction import POLICIES, Eviction
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
    """
    policy = {"kind": type(eviction).__name__, **dataclasses.asdict(eviction)}
    data = {"format": FORMAT, "eviction": policy, "model": fingerprint(model), "about": about}
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
        raise ValueError(f"budgets {path} is not valid JSON ({error}); search them again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(
            f"budgets {path} must be written by heedful budget in format {FORMAT}; search them "
            "again"
        )
    if data.get("model") != fingerprint(model):
        raise ValueError(
            f"budgets {path} belongs to another model, or to this one before it was trained on; "
            "search them again with heedful budget, or delete the file"
        )
    fields = dict(data.get("eviction") or {})
    kinds = {policy.__name__: policy for policy in POLICIES}
    kind = kinds.get(fields.pop("kind", None))
    known = set() if kind is None else {field.name for field in dataclasses.fields(kind)}
    if kind is None or set(fields) - known:
        raise ValueError(
            f"budgets {path} names no policy of this version of heedful; search them again"
        )
    eviction = kind(**fields)
    eviction.budgets(len(attention_modules(model)))
    return eviction


def fingerprint(model: nn.Module) -> str:
    """What tells a model from another one: sizes, mechanisms, and numbers of its weights.

    Sums of a few numbers of every weight, rounded, so that another precision is the same model.
    """
    modules = attention_modules(model)
    parts = [f"{type(m.heedful).__name__} {m.heedful.shape}" for m in modules]
    for name, p in sorted(model.named_parameters()):
        flat = p.detach().flatten()
        few = flat[:: max(1, flat.numel() // 64)].float()
        parts.append(f"{name.rpartition('.')[2]} {tuple(p.shape)} {few.abs().mean().item():.2g}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
