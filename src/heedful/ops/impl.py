"""Choice of an operator's implementation, and why another cannot run."""

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.library import CustomOpDef

from heedful.checks import UserError

Impl = Literal["auto", "reference", "tiled", "composed", "fused"]
IMPLS = ("auto", "reference", "tiled", "composed", "fused")

WIDEST = 256
MOST_PROGRAMS = 65_535  # along the second and the third axis of a grid; the first takes 2^31 - 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_log = logging.getLogger("heedful")
_logged: set[tuple[str, str]] = set()


def choose(
    operator: str,
    impl: str,
    unfused: Callable[[], str | None],
    tensors: Sequence[Tensor | None],
    uncomposed: str | None = None,
) -> str:
    """The implementation to run for `impl`; asking for one that does not support the call raises.

    Arguments:
        operator: name of the operator, for the message.
        impl: `"auto"`, `"reference"`, `"tiled"`, `"composed"` or `"fused"`. `auto` takes `tiled` on
            a CPU, `fused` where supported on a GPU of NVIDIA's from Ampere on, and `composed` else;
            it logs its choice once per operator.
        unfused: why `fused` does not support this call, or `None` if it does; called if it matters.
        tensors: what the call may be differentiated in, first the queries.
        uncomposed: why `composed` does not support this operator, or `None` if it does; then `auto`
            takes `tiled` on every device.
    """
    check_impl(impl)
    if impl != "reference" and _transformed(tensors):
        raise UserError(
            f"impl={impl!r} does not support this {operator} call: it has gradients for "
            ".backward() and torch.autograd.grad only, not for torch.func (grad, vjp, jvp) or "
            "forward-mode derivatives; impl='reference' has them all"
        )
    if impl == "fused" and (reason := unfused()) is not None:
        raise UserError(
            f"impl='fused' does not support this {operator} call: {reason}; use auto, tiled or "
            "reference"
        )
    if impl == "composed" and uncomposed is not None:
        raise UserError(
            f"impl='composed' does not support this {operator} call: {uncomposed}; use auto, tiled "
            "or reference"
        )
    if impl != "auto":
        return impl
    device = tensors[0].device
    if device.type == "cpu" or uncomposed is not None:
        choice = "tiled"
    else:
        choice = "fused" if runs_kernels(device) and unfused() is None else "composed"
    if not torch.compiler.is_compiling() and (operator, choice) not in _logged:
        _logged.add((operator, choice))
        _log.info("%s: impl=auto runs %s", operator, choice)
    return choice


def runs_kernels(device: torch.device) -> bool:
    """Test whether the kernels are known to fit this device; on others they run on request."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def _transformed(tensors: Iterable[Tensor | None]) -> bool:
    """Forward mode or torch.func takes derivatives in one of them; custom operators lose those."""
    if torch.compiler.is_compiling():
        return forward_ad._current_level >= 0  # torch.func.grad fails by itself there
    if forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None:
        return False
    return any(x is not None and _followed(x) for x in tensors)


def _followed(x: Tensor) -> bool:
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_gradtrackingtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return forward_ad.unpack_dual(x).tangent is not None


def refuse_second_derivative(backward: CustomOpDef, operator: str | Callable[[tuple], str]) -> None:
    """Differentiating this backward raises, and says what can.

    Operators that share it are told apart by its inputs.
    """

    def save(ctx, inputs, output):
        ctx.operator = operator if isinstance(operator, str) else operator(inputs)

    def second(ctx, *grads):
        raise UserError(
            f"this form of {ctx.operator} has no second derivatives; impl='reference' has"
        )

    backward.register_autograd(second, setup_context=save)


def check_impl(impl: str) -> None:
    """Raises for an unknown name."""
    if impl not in IMPLS:
        raise UserError(f"impl must be one of {', '.join(IMPLS)}, got {impl!r}")


def no_triton(x: Tensor) -> str | None:
    """Why Triton's kernels cannot run on this tensor, in one clause, or `None`."""
    if torch.compiler.is_compiling():
        return None  # checked when it was traced the first time, or by Triton at run time
    if not _has_triton():
        return "Triton is not installed (pip install triton)"
    if x.device.type in ("cuda", "meta") or _interpreted():
        return None
    return f"its kernels need a GPU, and q is on {x.device}"


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    """Triton's kernels run in its interpreter, on any device."""
    from triton import knobs

    return knobs.runtime.interpret


def over_limit(q: Tensor, /, **head_dims: int) -> str | None:
    """The limit that q's dtype or one of the named head dims exceeds, as one clause, or `None`."""
    if q.dtype not in DTYPES:
        return f"{q.dtype} is not float32, float16 or bfloat16"
    for name, size in head_dims.items():
        if size > WIDEST:
            return f"{name} has head dim {size}, above {WIDEST}"
    return None


def over_grid(**counts: int) -> str | None:
    """The count that exceeds an axis of a grid, as one clause, or `None`."""
    for name, count in counts.items():
        if count > MOST_PROGRAMS:
            return f"{name.replace('_', ' ')} is {count}, above {MOST_PROGRAMS}; split the batch"
    return None


def padded(size: int) -> int:
    """The power of two at which a dimension is computed; a tensor core takes 16 at least."""
    return max(16, 1 << (size - 1).bit_length())
