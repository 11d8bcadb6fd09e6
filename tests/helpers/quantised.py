"""Quantise a model's matrices and dequantise them again, as a GGUF file would hold them."""

import copy

import gguf
import torch
from torch import Tensor

CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUANTISATIONS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K")


def quantised(model: torch.nn.Module, kind: str) -> torch.nn.Module:
    """A copy of a model in another precision or quantisation; vectors stay as they are.

    As in llama.cpp, embeddings are in Q8_0 and rows that no super-block of Q4_K fits are in Q5_0.
    """
    model = copy.deepcopy(model)
    if kind in CASTS:
        return model.to(CASTS[kind])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(_rounded(p, "Q8_0" if "embed" in name else kind))
    return model


def _rounded(weights: Tensor, kind: str) -> Tensor:
    if kind == "Q4_K" and weights.shape[-1] % 256 == 0:
        return _q4_k(weights)
    kind = gguf.GGMLQuantizationType["Q5_0" if kind == "Q4_K" else kind]
    values = gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), kind), kind)
    return torch.from_numpy(values.copy()).view_as(weights)


def _q4_k(weights: Tensor) -> Tensor:
    """Super-blocks of 8 blocks of 32; each block has a scale and a minimum of 6 bits."""
    blocks = weights.reshape(-1, 8, 32)
    low = blocks.amin(-1).clamp_max(0)
    scale, least = _six_bits((blocks.amax(-1) - low) / 15), _six_bits(-low)
    levels = ((blocks + least[..., None]) / scale[..., None].clamp_min(1e-30)).round().clamp(0, 15)
    return (levels * scale[..., None] - least[..., None]).view_as(weights)


def _six_bits(values: Tensor) -> Tensor:
    step = (values.amax(-1, keepdim=True) / 63).half().float()
    return (values / step.clamp_min(1e-30)).round().clamp(0, 63) * step
