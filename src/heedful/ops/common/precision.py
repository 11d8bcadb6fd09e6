"""In which precision the operators compute: what autocast means for them, and their products.

Matrix products take the inputs in their own precision or in fp32, and their results are fp32.
Everything between two products (softmax, convolution, sums over tokens) is in fp32, or in fp64 for
fp64 inputs. `torch.autocast` casts the inputs, as it does for SDPA, and changes nothing inside.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

R = TypeVar("R")
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def cast_inputs(*tensors: object) -> list:
    """The tensors in autocast's precision where it is on, but fp64; everything else as it is."""
    kind = _active(tensors)
    if kind is None:
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if isinstance(x, Tensor) and x.dtype in _CAST else x for x in tensors]


def without_autocast(function: Callable[..., R]) -> Callable[..., R]:
    """The function with autocast off, so that its own choice of precision holds inside."""
    return functools.partial(_without_autocast, function)


def _without_autocast(function: Callable[..., R], *args, **kwargs) -> R:
    kind = _active(args)
    if kind is None:
        return function(*args, **kwargs)
    with torch.autocast(kind, enabled=False):
        return function(*args, **kwargs)


def _active(args: tuple) -> str | None:
    """The kind of device for which autocast is on, if the tensors are on it."""
    kind = next((x.device.type for x in args if isinstance(x, Tensor)), "meta")
    return kind if kind != "meta" and torch.is_autocast_enabled(kind) else None


def widen(x: Tensor) -> Tensor:
    """fp32 for half precision; fp32 and fp64 as they are."""
    return x.float() if x.dtype.itemsize < 4 else x


def operand(x: Tensor) -> Tensor:
    """An input as products take it: in its precision where the device has units for it, else wide.

    Contiguous: products with parts of a model's transposed heads would copy them for every tile.
    """
    narrow = x.dtype == torch.bfloat16 and (
        _on_gpu(x) or (x.device.type == "cpu" and bf16_on_cpu())
    )
    return (x if narrow else widen(x)).contiguous()


def product(a: Float[Tensor, "*lead n k"], b: Float[Tensor, "*lead k m"]) -> Tensor:
    """`a @ b` in the precision of the narrower of both, an operand; widened."""
    dtype = b.dtype if b.element_size() < a.element_size() else a.dtype
    return _product(a.to(dtype), b.to(dtype))


def add_product_(
    out: Float[Tensor, "*lead n m"], a: Float[Tensor, "*lead n k"], b: Float[Tensor, "*lead k m"]
) -> None:
    """`out += product(a, b)`, without a tensor between them."""
    dtype = b.dtype if b.element_size() < a.element_size() else a.dtype
    flat = (x.flatten(0, -3) for x in (a.to(dtype), b.to(dtype)))
    _add_product_(out.view(-1, *out.shape[-2:]), *flat)


def _add_product_(
    out: Float[Tensor, "l n m"], a: Float[Tensor, "l n k"], b: Float[Tensor, "l k m"]
) -> None:
    if a.dtype == out.dtype:
        out.baddbmm_(a, b)
    elif a.is_meta:  # whose baddbmm knows no out_dtype, so that this stands for it
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
    elif _on_gpu(a) and a.dtype == torch.bfloat16:
        torch.baddbmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        out.add_(_product(a, b))


def _on_gpu(x: Tensor) -> bool:
    """Test whether bf16 products may have fp32 results; the meta device counts as a GPU."""
    return x.device.type in ("cuda", "meta")


def _product(a: Float[Tensor, "*lead n k"], b: Float[Tensor, "*lead k m"]) -> Tensor:
    """`a @ b`, widened; on a GPU never rounded to the operands' precision on the way."""
    if a.dtype != torch.bfloat16 or not _on_gpu(a):
        return widen(a @ b)
    lead = a.shape[:-2]
    if b.shape[:-2] != lead:  # a look at the shapes costs the host more than the launch
        lead = torch.broadcast_shapes(lead, b.shape[:-2])
    flat = (x.expand(*lead, *x.shape[-2:]).flatten(0, -3) for x in (a, b))
    return torch.bmm(*flat, out_dtype=torch.float32).unflatten(0, lead)


def scores(
    q: Float[Tensor, "*lead n d"],
    k: Float[Tensor, "*lead m d"],
    scale: float,
    room: Float[Tensor, " size"] | None = None,
) -> Float[Tensor, "*lead n m"]:
    """`scale q k^T` of operands, widened; at the start of `room`, if that is given."""
    shape = (*q.shape[:-1], k.shape[-2])
    out = None if room is None else room[: math.prod(shape)].view(shape)
    if q.dtype == torch.bfloat16:
        x = _product(q, k.mT)  # scaled afterwards: a scaled query would be rounded once more
        x = x if out is None else out.copy_(x)
        return x if scale == 1.0 else x.mul_(scale)
    return torch.matmul(q * scale, k.mT, out=out)


@functools.cache
def bf16_on_cpu() -> bool:
    """This CPU multiplies bf16 faster than fp32; others emulate it, several times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
