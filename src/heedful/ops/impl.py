"""Which implementation of an operator runs, and why another cannot."""

import logging
from typing import Literal

import torch

Impl = Literal["auto", "reference", "tiled", "fused"]
IMPLS = ("auto", "reference", "tiled", "fused")

_log = logging.getLogger("heedful")
_logged: set[tuple[str, str]] = set()


def choose(operator: str, impl: str, unavailable: dict[str, str]) -> str:
    """The implementation to run for `impl`; asking for one that cannot serve raises.

    Arguments:
        operator: name of the operator, for the message.
        impl: `"auto"`, `"reference"`, `"tiled"` or `"fused"`. `auto` takes `fused` where it can
            serve, else `tiled`, never `reference`, and logs its choice once per operator.
        unavailable: why an implementation cannot serve this call, by name.
    """
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")
    if impl in unavailable:
        served = " or ".join(name for name in IMPLS if name not in unavailable)
        raise ValueError(
            f"impl={impl!r} cannot serve this {operator} call: {unavailable[impl]}; use {served}"
        )
    if impl != "auto":
        return impl
    chosen = "tiled" if "fused" in unavailable else "fused"
    if not torch.compiler.is_compiling() and (operator, chosen) not in _logged:
        _logged.add((operator, chosen))
        reason = f" (fused: {unavailable['fused']})" if "fused" in unavailable else ""
        _log.info("%s: impl=auto runs %s%s", operator, chosen, reason)
    return chosen
