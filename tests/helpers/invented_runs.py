"""Invented runs and pictures, for the pages of comparisons."""

import torch

from heedful.hf.look import LayerLook
from heedful_lab.commands.compare.run import ModelLook
from heedful_lab.records import Record

TOKENS = ["<script>", " ", "\n", "\t", "\x07", "$x$", "", "é"]


def run(mechanism="standard", value=0.5, seed=0, **fields) -> Record:
    """A small invented run."""
    defaults = {
        "task": "blocks",
        "metric": "error",
        "steps": 100,
        "batch": 8,
        "parameters": 1000,
        "final": {"in-distribution": value},
        "curve": [(50, 0.9), (100, value)],
        "loss_curve": [(1, 3.0), (100, 0.5)],
        "tokens_per_second": 1000.0,
        "seconds": 12.0,
        "peak_memory_mib": 100.0,
        "environment": {"machine": "a laptop", "command": "heedful compare", "date": "2025-01-01"},
    }
    return Record(mechanism=mechanism, seed=seed, **{**defaults, **fields})


def runs(mechanism: str, values, **fields) -> list[Record]:
    return [run(mechanism, value, seed, **fields) for seed, value in enumerate(values)]


def looks() -> list[ModelLook]:
    """What invented models do with one sample."""
    rng = torch.Generator().manual_seed(0)
    size = len(TOKENS)
    maps = torch.rand(2, size, size, generator=rng).tril()
    masking = torch.zeros(1, size, size)
    masking[0, 5, 0], masking[0, 6, 1] = 2.41, 9.0
    kernels = torch.randn(5, 6, 11, generator=rng)
    identity = torch.zeros(1, 2, 3)
    identity[0, 1, 1] = 1
    learned = LayerLook(maps - 0.5 * maps.tril(), conv=kernels, post_conv=identity)
    return [
        ModelLook("blocks", "mta", TOKENS, {0: learned}),
        ModelLook("blocks", "standard", ["a"] * 60, {0: LayerLook(torch.eye(60)[None])}),
        ModelLook("blocks", "selective", TOKENS, {1: LayerLook(maps, masking, masking.sum(1))}),
    ]
