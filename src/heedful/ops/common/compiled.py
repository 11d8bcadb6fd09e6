"""Steps between products that torch compiles for a CUDA device, when it calls one first.

Such a step is a function in plain torch, inside a custom operator, so that a model compiled around
it leaves it whole and a counter sees what is launched. (Its annotations have no shapes: tests would
wrap it in checks of these, which cannot be compiled.)
"""

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

_log = logging.getLogger("heedful")


def form(step: Callable, x: Tensor) -> Callable:
    """The step for this tensor's device: compiled, or as it is."""
    return _compiled(step) if _compiles(x.device.type) else step


@functools.cache
def _compiled(step: Callable) -> Callable:
    """One kernel for tiles of every size; a batch, a head or a row alone gets its own."""
    return torch.compile(step, dynamic=True)


@functools.cache
def _compiles(device: str) -> bool:
    """Test whether torch can compile for these devices here; logs once what is missing."""
    if device != "cuda":
        return False
    lack = None
    if importlib.util.find_spec("triton") is None:
        lack = "Triton"
    elif not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        lack = "a C compiler, with which Triton launches kernels,"
    if lack is not None:
        _log.warning("%s is not installed: operators take more launches and time", lack)
    return lack is None
