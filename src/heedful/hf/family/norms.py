"""What a family's norms of queries and keys say of its logits."""

import torch
from torch import nn


@torch.no_grad()
def logit_bound(module: nn.Module) -> float | None:
    """What no logit of a converted attention module can exceed in size, up to rounding.

    Where queries and keys pass an RMS norm of their own per head, a vector of D channels is no
    longer than sqrt(D) times the norm's largest weight, and a rotary embedding keeps its length.

    Returns:
        The bound; `None` where the module has no such norms, or a rotary embedding that scales.
    """
    rotary = str(getattr(getattr(module, "config", None), "rope_parameters", None))
    if "yarn" in rotary or "longrope" in rotary:
        return None
    dim, scale = module.heedful.shape.dim, getattr(module, "scaling", None)
    norms = [getattr(module, name, None) for name in ("q_norm", "k_norm")]
    if not isinstance(scale, float) or not all(_is_rms(norm, dim) for norm in norms):
        return None
    gains = []
    for norm in norms:
        # Of equal channels, large enough that the norm's epsilon is nothing, it gives its weights,
        # however the family writes these (Gemma adds one to them).
        weights = norm(torch.full_like(norm.weight, 1000.0))
        gains.append(weights.abs().max().item())
    return scale * dim * gains[0] * gains[1]


def _is_rms(norm: nn.Module | None, dim: int) -> bool:
    weight = getattr(norm, "weight", None)
    return type(norm).__name__.endswith("RMSNorm") and weight is not None and weight.shape == (dim,)
