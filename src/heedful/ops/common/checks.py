"""Checks that every operator makes of its arguments before it computes anything."""

import math
import reprlib
from numbers import Integral, Real

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor

from heedful.checks import UserError

_FLOATS = ("torch.float64", "torch.float32", "torch.bfloat16", "torch.float16")


def shown(x: object) -> str:
    """Short form of an argument: a tensor by its shape, if it has one."""
    if isinstance(x, Tensor):
        return "a nested tensor" if x.is_nested else str(tuple(x.shape))
    return reprlib.repr(x)


def check_dense(name: str, x: object, what: str) -> None:
    """Raise unless `x` is a tensor, neither sparse nor nested; `what` tells its shape.

    `what` names sizes by letters: to print a size would fix it where a length is symbolic.
    """
    if not isinstance(x, Tensor):
        raise UserError(f"{name} must be a tensor {what}, got {shown(x)}")
    if x.is_nested or x.layout != torch.strided:
        kind = "a nested" if x.is_nested else f"a {str(x.layout).removeprefix('torch.')}"
        way = "to_padded_tensor(0.0), with Visibility(padding=...)" if x.is_nested else "to_dense()"
        raise UserError(f"{name} must be a dense tensor {what}, got {kind} one; use its {way}")


def check_flag(name: str, x: object) -> None:
    """Raise unless `x` is `True` or `False`."""
    if not isinstance(x, bool):
        raise UserError(f"{name} must be True or False, got {shown(x)}")


def check_scale(scale: float | None, q: Tensor) -> float:
    """The factor on the logits; the default is the head dim's inverse square root."""
    if scale is None:
        return q.shape[-1] ** -0.5
    return _finite("scale", scale, "multiply q by it")


def check_tau(tau: float | None) -> float | None:
    """The cap of F in the memory, above zero, or `None`."""
    if tau is None:
        return None
    tau = _finite("tau", tau, "use its .item()")
    if not tau > 0:
        raise UserError(f"tau must be positive, got {tau:g}; None computes no memory")
    return tau


def check_softcap(softcap: float | None) -> float | None:
    """The cap of the logits, above zero, or `None`."""
    if softcap is None:
        return None
    softcap = _finite("softcap", softcap, "use its .item()")
    if not torch.compiler.is_compiling() and not softcap > 0:
        raise UserError(f"softcap must be positive, got {softcap:g}; None caps nothing")
    return softcap


def check_dropout(p: float) -> float:
    """The share of weights that are dropped, from 0 to below 1."""
    p = _finite("dropout_p", p, "use its .item()")
    if not torch.compiler.is_compiling() and not 0 <= p < 1:
        raise UserError(f"dropout_p must be at least 0 and below 1, got {p:g}; 0 drops nothing")
    return p


def check_seed(seed: object, q: Tensor) -> None:
    """Raise unless the seed is `None`, a whole number, or a tensor of one on q's device."""
    if isinstance(seed, Tensor):
        other = seed.is_floating_point() or seed.is_complex() or seed.dtype == torch.bool
        fits = not other and seed.ndim == 0 and seed.device == q.device
    elif seed is None or torch.compiler.is_compiling():
        return
    else:
        fits = isinstance(seed, Integral) and not isinstance(seed, bool) and 0 <= seed < 2**63
    if not fits:
        raise UserError(
            f"seed must be a whole number from 0 to 2^63 - 1, a tensor [] of whole numbers on "
            f"{q.device}, or None, got {shown(seed)}; None draws one from torch's generator"
        )


def _finite(name: str, x: float, way_out: str) -> float:
    if isinstance(x, Tensor):
        raise UserError(
            f"{name} must be a plain number, got a tensor, which would get no gradient; {way_out}"
        )
    if isinstance(x, Real | torch.SymFloat | torch.SymInt) and not isinstance(x, bool):
        try:
            value = float(x)
        except OverflowError:  # a whole number beyond every float
            value = math.inf
        if torch.compiler.is_compiling() or math.isfinite(value):
            return value
    raise UserError(f"{name} must be a finite number, got {shown(x)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, value_heads: str = "k") -> None:
    """Raise unless q, k, v are `[B, H, T, D]` that fit (GQA: `k`, `v` may have fewer heads)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_dense(name, x, "[B, H, T, D]")
        if x.ndim != 4:
            raise UserError(f"{name} must be [B, H, T, D], got shape {tuple(x.shape)}")
        if str(x.dtype) not in _FLOATS:
            raise UserError(f"{name} must be a floating-point tensor, got {x.dtype}; cast it first")
        if x.dtype != q.dtype or x.device != q.device:
            raise UserError(
                f"{name} must have q's dtype and device ({q.dtype}, {q.device}), got {x.dtype}, "
                f"{x.device}"
            )
        if x.shape[2] < 1 or x.shape[1] < 1 or x.shape[3] < 1:
            raise UserError(f"{name} must not be empty, got shape {tuple(x.shape)}")
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise UserError(
            f"k and v must have q's batch size {q.shape[0]}, got {k.shape[0]} and {v.shape[0]}"
        )
    if k.shape[3] != q.shape[3]:
        raise UserError(f"k must have q's head dim {q.shape[3]}, got {k.shape[3]}")
    if k.shape[2] != v.shape[2]:
        raise UserError(f"v must have k's {k.shape[2]} tokens, got {v.shape[2]}")
    if value_heads == "k" and k.shape[1] != v.shape[1]:
        raise UserError(f"v must have k's {k.shape[1]} heads, got {v.shape[1]}")
    if q.shape[1] % k.shape[1]:
        raise UserError(
            f"k has {k.shape[1]} heads, which does not divide q's {q.shape[1]}; grouped queries "
            "need a whole number of query heads per key head"
        )


def check_parameter(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless a parameter has this shape, a float dtype, finite numbers, `like`'s device."""
    if tuple(x.shape) != shape:
        raise UserError(f"{name} must be {list(shape)}, got {shown(x)}")
    if str(x.dtype) not in _FLOATS or x.device != like.device:
        raise UserError(
            f"{name} must be a floating-point tensor on {like.device}, got {x.dtype} on {x.device}"
        )
    if _seen_infinite(x):
        raise UserError(
            f"{name} must be finite, got NaN or infinity in it; a diverged training run or a "
            "damaged checkpoint leaves such values: load an earlier one"
        )


def check_bias(bias: Tensor | None, q: Tensor, keys: int) -> None:
    """Raise unless a bias is `None`, or finite numbers `[1 or B, 1 or H, Tq, Tk]` on q's device."""
    if bias is None:
        return
    check_dense("bias", bias, "[1 or B, 1 or H, Tq, Tk]")
    (batch, heads, queries, _), shape = q.shape, tuple(bias.shape)
    fits = bias.ndim == 4 and shape[0] in (1, batch) and shape[1] in (1, heads)
    if not fits or shape[2] != queries or shape[3] != keys:
        raise UserError(
            f"bias must be [1 or {batch}, 1 or {heads}, {queries}, {keys}] (one number per query "
            f"and key), got {shape}"
        )
    if str(bias.dtype) not in _FLOATS or bias.device != q.device:
        raise UserError(
            f"bias must be a floating-point tensor on {q.device}, got {bias.dtype} on "
            f"{bias.device}; a mask belongs in visibility"
        )
    if _seen_infinite(bias):
        raise UserError(
            "bias must be finite, got NaN or infinity in it; mask tokens with visibility, which "
            "also tells what need not be computed"
        )


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise unless sinks are `None`, or one finite number per head of q."""
    if sinks is not None:
        check_dense("sinks", sinks, "[H] (one logit per query head)")
        check_parameter("sinks", sinks, (q.shape[1],), q)


def _seen_infinite(x: Tensor) -> bool:
    """Test for NaN or infinity, where the test is free.

    On an accelerator it would stall the stream, while compiling it would break the graph, and under
    torch.func there may be nothing to look at; convert() and load() have looked once.
    """
    looks = (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(x, FakeTensor)
        and _functorch.peek_interpreter_stack() is None
    )
    # A sum needs no memory, and is finite only if all is; it may overflow where all is.
    return looks and not bool(x.sum().isfinite()) and not bool(x.isfinite().all())
