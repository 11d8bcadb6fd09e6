"""Eviction policies as commands name them."""

import importlib.util
import sys
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.eviction import POLICIES as LIBRARY
from heedful.eviction import Eviction
from heedful.hf.budgets import read_budgets
from heedful.hf.cache.new import attention_modules
from heedful_lab.commands.options import CacheDtype, is_users_policy
from heedful_lab.rivals.retention import LowestGate

POLICIES = (*LIBRARY, LowestGate)
"""Those that commands know by name."""


@runtime_checkable
class CacheOptions(Protocol):
    """The options of a command whose model has a cache."""

    budget: str | None
    eviction: str
    seed: int


def cache_dtype_of(name: CacheDtype) -> torch.dtype | None:
    """Value of `dtype` in `heedful.new_cache` for a command's `--cache-dtype`."""
    return torch.int8 if name == "int8" else None


def reads_budgets(options: CacheOptions) -> bool:
    """Test whether the budgets of the model's folder apply."""
    return options.budget is None and options.eviction != "none"


def policy_of(options: CacheOptions, model: PreTrainedModel) -> Eviction | bool | None:
    """The eviction policy of a command; `None` is the model's own, `False` none."""
    if options.eviction == "none":
        return False
    if options.budget is None:
        return None
    if options.budget.isdecimal():
        return policy_named(options.eviction, model, int(options.budget), **arguments_of(options))
    path = Path(options.budget)
    if not path.is_file():
        raise UserError(
            f"budget must be a number of tokens, or a budgets.json that heedful budget wrote, got "
            f"{options.budget!r}"
        )
    policy = read_budgets(path, model)
    if options.eviction not in ("auto", spelled(type(policy).__name__)):
        raise UserError(
            f"eviction={options.eviction!r} is not what {path} was searched for, "
            f"{spelled(type(policy).__name__)}; leave --eviction out, or give a number of tokens"
        )
    return policy


def arguments_of(options: CacheOptions) -> dict:
    """Arguments of a command's policy beside the budget."""
    return {"seed": options.seed} if options.eviction == "random" else {}


def policy_named(name: str, model: nn.Module, tokens: int | tuple[int, ...], **options) -> Eviction:
    """The eviction policy of a name on the command line; `auto` is what suits the mechanism.

    Arguments:
        name: such as `streaming-llm`.
        model: for which the policy is.
        tokens: the budget.
        options: for the policy.
    """
    if name == "auto":
        name = _suited(model)
    if is_users_policy(name):
        return _users_policy(name)(tokens=tokens, **options)
    kind = {spelled(policy.__name__): policy for policy in POLICIES}[name]
    return kind(tokens=tokens, **options)


def _users_policy(name: str) -> type[Eviction]:
    """The class of a policy in a user's file: MODULE:CLASS, where MODULE may be a path.

    Raises:
        ValueError: there is no such module or class, or it is not a policy.
    """
    module, _, kind = name.rpartition(":")
    path = Path(module if module.endswith(".py") else module.replace(".", "/") + ".py")
    try:
        if path.is_file():  # in the folder where the command runs
            spec = importlib.util.spec_from_file_location(path.stem, path)
            found = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = found  # dataclasses look their module up
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"eviction={name!r}: {module} cannot be imported ({error})") from None
    policy = getattr(found, kind, None)
    if not isinstance(policy, type) or not issubclass(policy, Eviction):
        raise UserError(
            f"eviction={name!r}: {module} has no policy {kind}, which must be a class derived from "
            "heedful.eviction.Eviction"
        )
    return policy


def _suited(model: nn.Module) -> str:
    """The policy that suits the mechanism of all layers."""
    names = {module.heedful.running for module in attention_modules(model)}
    suited = {"F": "most-hidden", "gate": "lowest-gate"}
    return suited.get(names.pop(), "streaming-llm") if len(names) == 1 else "streaming-llm"


def spelled(name: str) -> str:
    """A policy's class name as the command line spells it: `StreamingLLM` is `streaming-llm`."""
    names = {"H2O": "h2o", "TOVA": "tova", "StreamingLLM": "streaming-llm", "SnapKV": "snap-kv"}
    names |= {"KeyDiff": "keydiff"}
    words = "".join("-" + c.lower() if c.isupper() else c for c in name)
    return names.get(name, words.lstrip("-"))
