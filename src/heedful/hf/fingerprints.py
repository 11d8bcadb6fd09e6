"""Fingerprints that distinguish models, as files beside models record them."""

import base64
import hashlib
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful.hf.family.modules import attention_modules, find_attention, head_shape
from heedful.hf.grids import steps
from heedful.hf.identity import tensors_digest
from heedful.nn.standard import StandardAttention

_OWN = ".heedful."  # in the names of a mechanism's parameters
_NUMBERS = 64  # of a model's weights that are written down as numbers
_SAMPLES = 256  # of vectors, which no format quantises, and as many of matrices
_FLOATS = ((torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24))  # and significant bits
_AWAY = 0.05  # the share of samples that a rounding may leave farther away: clipped ends of blocks
_EVEN = (0.35, 0.8)  # RMS of a rounding error in half steps; sqrt(1/3) = 0.58 where it is even


class Distance(NamedTuple):
    """Distance of a model's weights from recorded ones.

    same: equal, up to a cast to another precision.
    near: the same, or those of another quantisation of the same weights.
    moved: the share of the weights without a grid that no cast explains.
    difference: RMS of the difference of quantised weights, relative to that of the weights.
    rounding: what the difference would be if rounding to either grid, or to both, had caused it;
        of these the one that is nearest to the difference.
    """

    same: bool
    near: bool
    moved: float
    difference: float
    rounding: float

    def __str__(self) -> str:
        """One line: both distances, and what they may be."""
        allowed = f"0 % or about {self.rounding:.2%}" if self.rounding else "0 %"
        return (
            f"its quantised weights differ by {self.difference:.2%} (RMS; rounding alone: "
            f"{allowed}), and {self.moved:.1%} of its other weights by more than a cast does "
            "(allowed: 0 %)"
        )


def fingerprint(model: nn.Module) -> dict:
    """Fingerprint of a converted model, as JSON-ready values.

    `mechanism` is a digest of the mechanism's parameters, which no quantisation changes, rounded to
    bfloat16.
    """
    parameters = without_matrices(model)
    own = {name: p for name, p in parameters.items() if _OWN in name}
    rounded = ((name, p.to(torch.bfloat16)) for name, p in own.items())
    return fingerprint_of(parameters, layer_texts(model)) | {"mechanism": tensors_digest(rounded)}


def layer_texts(model: nn.Module) -> list[str]:
    """The mechanism and shape of every attention layer, as text; a model's own is standard."""
    modules = attention_modules(model)
    if not modules:
        shapes = map(head_shape, find_attention(model).values())
        return [f"{StandardAttention.__name__} {shape}" for shape in shapes]
    return [f"{type(m.heedful).__name__} {m.heedful.shape}" for m in modules]


def without_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """A model's parameters by the names that they have without PEFT's LoRA, and none of its own."""
    return {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): p
        for name, p in model.named_parameters()
        if ".lora_" not in name
    }


def fingerprint_of(parameters: Mapping[str, Tensor], layers: Iterable[str] = ()) -> dict:
    """Fingerprint of parameters, as JSON-ready values.

    `sizes` is a digest of the attention layers and the shapes of all parameters, `weights` are a
    few numbers from all over the parameters. `samples` are more of them, from vectors and from
    matrices of the base, and `steps` those of the grids on which these lie (0 where on none):
    float32 in base64.
    """
    ordered = sorted(parameters.items())
    parts = [*layers, *(f"{name} {tuple(p.shape)}" for name, p in ordered)]
    everything, base = [p for _, p in ordered], [p for name, p in ordered if _OWN not in name]
    weights = [float(f"{x:.6g}") for x in _values(everything, _NUMBERS)[0].tolist()]
    vectors = _values([p for p in base if p.ndim < 2], _SAMPLES)
    matrices = _values([p for p in base if p.ndim >= 2], _SAMPLES)
    samples, grids = (torch.cat(pair) for pair in zip(vectors, matrices, strict=True))
    return {
        "sizes": hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
        "weights": weights,
        "samples": _to_text(samples),
        "steps": _to_text(grids),
    }


def is_of(saved: object, model: nn.Module) -> bool:
    """Test whether a fingerprint is this model's, also in another precision or quantisation."""
    distance = distance_of(saved, fingerprint(model))
    return distance is not None and distance.near


def distance_of(saved: object, own: dict) -> Distance | None:
    """Distance of weights from those of a saved fingerprint.

    A difference that comes from rounding is spread evenly over half a step on both sides of zero,
    so it has a size of its own: training on moves weights by less, or by more, or moves those that
    are not rounded.

    Returns:
        The distance; None where the fingerprint is damaged, or shapes or mechanism are others.
    """
    if not isinstance(saved, dict) or saved.get("sizes") != own["sizes"]:
        return None
    weights = saved.get("weights")
    if not isinstance(weights, list) or len(weights) != _NUMBERS:
        return None
    if not all(isinstance(x, int | float) for x in weights):
        return None
    if "mechanism" in saved and saved["mechanism"] != own.get("mechanism"):
        return None
    numbers = [_from_text(f.get(name)) for f in (saved, own) for name in ("samples", "steps")]
    if any(x is None or len(x) != len(numbers[2]) for x in numbers):
        return None
    was, was_step, now, now_step = numbers
    grid = was_step + now_step > 0
    moved = _moved(was[~grid], now[~grid])
    casts = moved == 0
    if not grid.any() or _moved(was[grid], now[grid]) == 0:
        return Distance(casts, casts, moved, 0.0, 0.0)
    was, now, was_step, now_step = (x[grid] for x in (was, now, was_step, now_step))
    apart = (was - now).abs()
    joint = (was_step.square() + now_step.square()).sqrt()
    roundings = [
        (x, y)
        for x, y in ((was_step, was_step), (now_step, now_step), (joint, was_step + now_step))
        if (x > 0).float().mean() > 1 - _AWAY
    ]
    near = casts and any(_is_rounding(apart, step / 2, most / 2) for step, most in roundings)
    size, difference = float(_rms(was).clamp_min(1e-30)), float(_rms(apart))
    sizes = (float(_rms(apart[step > 0] / step[step > 0])) for step, _ in roundings)
    expected = [difference / (12**0.5 * x) for x in sizes if x > 0]
    rounding = min(expected, key=lambda x: abs(x - difference), default=0.0)
    return Distance(False, near, moved, difference / size, rounding / size)


def _is_rounding(apart: Tensor, half: Tensor, most: Tensor) -> bool:
    """Test whether differences are like those of rounding to steps of twice `half`."""
    near = half > 0
    size = _rms(apart[near] / half[near])
    away = (apart > 1.1 * most).float().mean()
    return _EVEN[0] <= size <= _EVEN[1] and bool(away <= _AWAY)


def _moved(was: Tensor, now: Tensor) -> float:
    """The share of weights that differ by what no cast to another precision explains."""
    if len(was) == 0:
        return 0.0
    (was_bits, was_half), (now_bits, now_half) = _precision(was), _precision(now)
    apart = (was - now).abs()
    apart = torch.where(apart <= 2**-20 * was.abs(), 0.0, apart)
    if was_bits == now_bits:
        return float((apart > 0).float().mean())
    allowed = 1.001 * (was_half + now_half)
    differs = apart > 0
    # Weights that were trained on in float32 stay within half a step of bfloat16, but near zero.
    share = float(differs.float().mean())
    finer = now_bits > was_bits and share > _AWAY
    if finer and _rms(apart[differs] / allowed[differs]) < _EVEN[0]:
        return share
    return float((apart > allowed).float().mean())


def _precision(values: Tensor) -> tuple[int, Tensor]:
    """The significant bits of the narrowest type that holds all values, and half a step at each."""
    fits = (bits for dtype, bits in _FLOATS if torch.equal(values.to(dtype).double(), values))
    bits = next(fits, 53)
    exponents = torch.frexp(values)[1].clamp_min(-24)
    return bits, torch.ldexp(torch.ones_like(values), exponents - 1 - bits)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def _values(parameters: list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Numbers from all over parameters, and the steps of their grids."""
    values, grids = [], []
    for i in range(count if parameters else 0):
        p = parameters[i * len(parameters) // count].detach()
        # Spread evenly, whatever the number of layers.
        place = torch.tensor([int(i * 0.618034 % 1 * p.numel())])
        values.append(p.flatten()[place.to(p.device)].double().cpu())
        grids.append(steps(p, place))
    none = [torch.zeros(0, dtype=torch.float64)]
    return torch.cat(values or none), torch.cat(grids or none)


def _to_text(values: Tensor) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values.tolist())).decode()


def _from_text(text: object) -> Tensor | None:
    """Float64 numbers of base64, or None where the text is damaged."""
    try:
        data = base64.b64decode(text, validate=True)
        return torch.tensor(struct.unpack(f"<{len(data) // 4}f", data), dtype=torch.float64)
    except (TypeError, ValueError, struct.error):
        return None
