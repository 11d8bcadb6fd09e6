"""One layer by itself: its shape, its inputs, and parameters away from where they start."""

import math

import torch
from torch import Tensor

from heedful.nn import HeadShape, Layer
from helpers.families import stir
from helpers.oracle import draw

SHAPE = HeadShape(heads=4, key_heads=2, dim=6, hidden=20, layer=2)


def stirred(config, by: float = 0.3, shape: HeadShape = SHAPE) -> Layer:
    """Built, in fp64, with noise on the parameters: some start as zeros or identities."""
    layer = config.build(shape).double()
    stir(layer, by)
    return layer


def qkvx(tokens: int, batch: int = 2) -> tuple[Tensor, ...]:
    """Queries, keys and values, and the input of the module."""
    heads = draw(batch, 4, tokens, 6), draw(batch, 2, tokens, 6), draw(batch, 2, tokens, 6)
    return *heads, draw(batch, tokens, 20)


def attended(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal softmax attention, `[B, T, H, D]`, number by number."""
    batch, length, heads, dim = q.shape
    group = heads // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                first = 0 if window is None else max(0, i - window + 1)
                logits = [
                    sum(float(q[b, i, h, c] * k[b, j, h // group, c]) for c in range(dim))
                    for j in range(first, i + 1)
                ]
                weights = [math.exp(x / dim**0.5) for x in logits]
                for j, weight in zip(range(first, i + 1), weights, strict=True):
                    out[b, i, h] += weight / sum(weights) * v[b, j, h // group]
    return out
