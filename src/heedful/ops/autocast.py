"""What `torch.autocast` means for the operators: it casts their inputs, as SDPA's, and no sums."""

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def cast_inputs(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's precision where it is on, but fp64; else as they are."""
    kind = _active(tensors)
    if kind is None:
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x for x in tensors]


def without_autocast(function: Callable[..., R]) -> Callable[..., R]:
    """The function with autocast off, so that its own choice of precision holds inside."""

    @functools.wraps(function)
    def run(*args, **kwargs) -> R:
        kind = _active(args)
        if kind is None:
            return function(*args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(*args, **kwargs)

    return run


def _active(args: tuple) -> str | None:
    """The kind of device for which autocast is on, if the tensors are on it."""
    kind = next((x.device.type for x in args if isinstance(x, Tensor)), "meta")
    return kind if kind != "meta" and torch.is_autocast_enabled(kind) else None
