"""Matrix products of the tiled operators: inputs in their precision or fp32, results in fp32.

What is between two products (softmax, convolution, sums over tokens) is fp32 or fp64 always.
"""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """fp32 for half precision; fp32 and fp64 as they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def operand(x: Tensor) -> Tensor:
    """An input as products take it: in its precision where the device has units for it, else wide.

    Contiguous: products with parts of a model's transposed heads would copy them for every tile.
    """
    narrow = x.dtype == torch.bfloat16 and (x.is_cuda or (x.device.type == "cpu" and _bf16_cpu()))
    return (x if narrow else widen(x)).contiguous()


def product(a: Float[Tensor, "*lead n k"], b: Float[Tensor, "*lead k m"]) -> Tensor:
    """`a @ b` in the precision of `b`, an operand; widened."""
    return widen(a.to(b.dtype) @ b)


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
        x = q @ k.mT  # scaled afterwards: a scaled query would be rounded once more
        return (widen(x) if out is None else out.copy_(x)).mul_(scale)
    return torch.matmul(q * scale, k.mT, out=out)


@functools.cache
def _bf16_cpu() -> bool:
    """This CPU multiplies bf16 faster than fp32; others emulate it, several times slower."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
