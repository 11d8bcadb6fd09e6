"""What the fused kernels of multi-token attention serve.

Free of Triton, so that a caller can ask before anything is imported.
"""

from torch import Tensor

from heedful.ops.common.limits import over_grid, over_limit

MAX_ROWS, MAX_COLUMNS = 8, 15


def multi_token_attention_limit(
    q: Tensor, conv: Tensor | None = None, post_conv: Tensor | None = None
) -> str | None:
    """The limit that a call exceeds, as one clause, or `None`."""
    for kernel in (conv, post_conv):
        if kernel is None:
            continue
        _, rows, columns = kernel.shape
        for name, size, most in (("c_q", rows, MAX_ROWS), ("c_k", columns, MAX_COLUMNS)):
            if size > most:
                return f"{name} {size} is above {most}"
    return over_grid(batch_times_heads=q.shape[0] * q.shape[1]) or over_limit(q)
