"""Limits of every mechanism's fused kernels, and their widths; free of Triton.

So a caller can ask before anything is imported.
"""

import torch
from torch import Tensor

WIDEST = 256
MOST_PROGRAMS = 65_535  # along the second and the third axis of a grid; the first takes 2^31 - 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


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
