"""What distinguishes a model from others, as files beside models record it."""

import hashlib
import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from heedful.hf.family.modules import attention_modules

_NUMBERS = 64  # of a model's weights that are written down
_ROUNDING = 2**-8  # relative: what half precision changes, twice over


def fingerprint(model: nn.Module) -> dict:
    """What distinguishes a converted model from another one, as JSON-ready values."""
    modules = attention_modules(model)
    layers = [f"{type(m.heedful).__name__} {m.heedful.shape}" for m in modules]
    return fingerprint_of(without_matrices(model), layers)


def without_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by the names that they have without PEFT's LoRA, and none of its own."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for name, p in model.named_parameters()
        if ".lora_" not in name
    }


def fingerprint_of(parameters: Mapping[str, Tensor], layers: Iterable[str] = ()) -> dict:
    """What distinguishes parameters from others, as JSON-ready values.

    `sizes` is a digest of the attention layers and the shapes of all parameters, `weights` are a
    few numbers from all over the parameters.
    """
    ordered = sorted(parameters.items())
    parts = [*layers, *(f"{name} {tuple(p.shape)}" for name, p in ordered)]
    weights = []
    for i in range(_NUMBERS):
        p = ordered[i * len(ordered) // _NUMBERS][1].detach().flatten()
        place = int(i * 0.618034 % 1 * p.numel())  # spread evenly, whatever the number of layers
        weights.append(float(f"{p[place].item():.6g}"))
    return {"sizes": hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16], "weights": weights}


def is_of(saved: object, model: nn.Module) -> bool:
    """Whether a fingerprint is this model's, be it in another precision."""
    return same_weights(saved, fingerprint(model))


def same_weights(saved: object, own: dict) -> bool:
    """Whether two fingerprints are of the same weights, be it in another precision."""
    if not isinstance(saved, dict) or saved.get("sizes") != own["sizes"]:
        return False
    weights = saved.get("weights")
    if not isinstance(weights, list) or len(weights) != _NUMBERS:
        return False
    return all(
        isinstance(a, int | float) and math.isclose(a, b, rel_tol=_ROUNDING, abs_tol=1e-7)
        for a, b in zip(weights, own["weights"], strict=True)
    )
