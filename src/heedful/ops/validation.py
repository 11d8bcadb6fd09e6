"""Checks that every operator makes of its arguments before it computes anything."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from heedful.ops.visibility import Visibility

_FLOATS = ("torch.float64", "torch.float32", "torch.bfloat16", "torch.float16")


def check_visibility(visibility: Visibility | None, batch: int, queries: int, keys: int):
    """The visibility to use; a mask in its place is refused."""
    if visibility is None:
        visibility = Visibility()
    if not isinstance(visibility, Visibility):
        what = (
            f"a tensor of shape {tuple(visibility.shape)}"
            if isinstance(visibility, Tensor)
            else repr(visibility)
        )
        raise ValueError(
            f"visibility must be a heedful.Visibility or None (causal), got {what}; describe a "
            "mask with Visibility(window=..., documents=..., padding=...)"
        )
    visibility.check(batch, queries, keys)
    return visibility


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, value_heads: str = "k") -> None:
    """Raise unless q, k, v are `[B, H, T, D]` that fit (GQA: `k`, `v` may have fewer heads)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, H, T, D], got shape {tuple(x.shape)}")
        if str(x.dtype) not in _FLOATS:
            raise ValueError(
                f"{name} must be a floating-point tensor, got {x.dtype}; cast it first"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} must have q's dtype and device ({q.dtype}, {q.device}), got {x.dtype}, "
                f"{x.device}"
            )
        if x.shape[2] < 1 or x.shape[1] < 1 or x.shape[3] < 1:
            raise ValueError(f"{name} must not be empty, got shape {tuple(x.shape)}")
    if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
        raise ValueError(
            f"k and v must have q's batch size {q.shape[0]}, got {k.shape[0]} and {v.shape[0]}"
        )
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k must have q's head dim {q.shape[3]}, got {k.shape[3]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v must have k's {k.shape[2]} tokens, got {v.shape[2]}")
    if value_heads == "k" and k.shape[1] != v.shape[1]:
        raise ValueError(f"v must have k's {k.shape[1]} heads, got {v.shape[1]}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has {k.shape[1]} heads, which does not divide q's {q.shape[1]}; grouped queries "
            "need a whole number of query heads per key head"
        )


def check_parameter(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise unless a parameter tensor has this shape, a float dtype and the device of `like`."""
    if not isinstance(x, Tensor) or tuple(x.shape) != shape:
        got = tuple(x.shape) if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name} must be {list(shape)}, got {got}")
    if str(x.dtype) not in _FLOATS or x.device != like.device:
        raise ValueError(
            f"{name} must be a floating-point tensor on {like.device}, got {x.dtype} on {x.device}"
        )
    # On an accelerator, or while compiling, this look would stall the stream or break the graph;
    # there convert() and load() have looked once.
    if (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(x, FakeTensor)
        and not bool(x.isfinite().all())
    ):
        raise ValueError(
            f"{name} must be finite, got NaN or infinity in it; a diverged training run or a "
            "damaged checkpoint leaves such values: load an earlier one"
        )
