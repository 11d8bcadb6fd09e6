"""Which implementation of an operator runs, and why another cannot."""

import importlib.util
import logging
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "tiled", "fused"]
IMPLS = ("auto", "reference", "tiled", "fused")
UNTRIED = (
    "the fused kernels are right in Triton's interpreter and compile for an H200, but have not "
    "run on a GPU yet; until they have, impl='fused' asks for them"
)

_log = logging.getLogger("heedful")
_logged: set[str] = set()


def choose(operator: str, impl: str, unfused: Callable[[], str | None]) -> str:
    """The implementation to run for `impl`; asking for one that cannot serve raises.

    Arguments:
        operator: name of the operator, for the message.
        impl: `"auto"`, `"reference"`, `"tiled"` or `"fused"`. `auto` takes `tiled`, and logs it
            once per operator.
        unfused: why `fused` cannot serve this call, or `None` if it can; asked only if need be.
    """
    check_impl(impl)
    if impl == "fused" and (reason := unfused()) is not None:
        raise ValueError(
            f"impl='fused' cannot serve this {operator} call: {reason}; use auto, tiled or "
            "reference"
        )
    if impl != "auto":
        return impl
    if not torch.compiler.is_compiling() and operator not in _logged:
        _logged.add(operator)
        _log.info("%s: impl=auto runs tiled (%s)", operator, UNTRIED)
    return "tiled"


def check_impl(impl: str) -> None:
    """Raises for an unknown name."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")


def no_triton(x: Tensor) -> str | None:
    """Why Triton's kernels cannot run on this tensor, in one clause, or `None`."""
    if torch.compiler.is_compiling():
        return None  # asked when it was traced the first time, or at run time by Triton itself
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if x.device.type in ("cuda", "meta") or _interpreted():
        return None
    return f"its kernels need a GPU, and q is on {x.device}"


def _interpreted() -> bool:
    """Triton's kernels run in its interpreter, on any device."""
    from triton import knobs

    return knobs.runtime.interpret
