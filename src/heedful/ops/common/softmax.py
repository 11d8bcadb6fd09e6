"""The softmax of a composed tile: mask, exponentials, sums and rounding in one launch.

As single operations they pass over a tile of fp32 up to ten times. Compiled by torch, when a CUDA
device calls one first, they read it once and write it once, in the precision of the product that
follows. They are functions in plain torch inside custom operators, so that a model compiled around
them leaves them whole and a counter sees what is launched. (Their annotations have no shapes: tests
would wrap them in checks of these, which cannot be compiled.)

The backward pass takes the logits and each row's logarithm of the sum of exponentials, from which
the map comes back unrounded.
"""

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

_log = logging.getLogger("heedful")


@torch.library.custom_op("heedful::tile_softmax", mutates_args=())
def tile_softmax(
    logits: Tensor, mask: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The map in this dtype, and per row the logarithm of its sum, sink included.

    `mask` is that of the last columns; the others are visible. Rows that see nothing become zero.
    """
    return _form(_softmax, logits)(logits, mask, sinks, dtype)


@tile_softmax.register_fake
def _(logits, mask, sinks, dtype):
    return torch.empty_like(logits, dtype=dtype), logits.new_empty(*logits.shape[:-1], 1)


@torch.library.custom_op("heedful::tile_softmax_backward", mutates_args=())
def tile_softmax_backward(
    grad: Tensor, logits: Tensor, log_sum: Tensor, mask: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradient of the logits in this dtype, and per row the sum of the map times `grad`."""
    return _form(_softmax_backward, logits)(grad, logits, log_sum, mask, dtype)


@tile_softmax_backward.register_fake
def _(grad, logits, log_sum, mask, dtype):
    return torch.empty_like(grad, dtype=dtype), torch.empty_like(log_sum)


def _softmax(
    logits: Tensor, mask: Tensor, sinks: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Of logits `[B, H, R, C]`, a mask `[B or 1, 1, R, columns]`, sinks `[H, 1, 1]`."""
    masked = _whole(mask, logits)
    # Finite, for a row that sees nothing would become NaN.
    logits = logits.masked_fill(masked, torch.finfo(logits.dtype).min)
    top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    total = (logits - top).exp().sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks - top).exp()
    log_sum = top + total.log()
    # From the logits again, so that no tile of exponentials is written in between.
    return (logits - log_sum).exp().masked_fill(masked, 0.0).to(dtype), log_sum


def _softmax_backward(
    grad: Tensor, logits: Tensor, log_sum: Tensor, mask: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    p = (logits - log_sum).exp().masked_fill(_whole(mask, logits), 0.0)
    total = (p * grad).sum(-1, keepdim=True)
    return (p * (grad - total)).to(dtype), total


def _whole(mask: Tensor, tile: Tensor) -> Tensor:
    """The mask of all columns; compiled, it is never written."""
    return pad(mask, (tile.shape[-1] - mask.shape[-1], 0))


def _form(step: Callable, x: Tensor) -> Callable:
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
