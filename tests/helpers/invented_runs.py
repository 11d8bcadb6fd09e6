"""Invented runs and pictures, for the pages of comparisons."""

import numpy as np

from heedful_lab.commands.compare.figures import (
    HidingExhibit,
    KernelExhibit,
    MapExhibit,
    MixExhibit,
)
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


def exhibits() -> list:
    rng = np.random.default_rng(0)
    size = len(TOKENS)
    maps = np.tril(rng.random((size, size)))
    hiding = np.zeros((size, size))
    hiding[5, 0], hiding[6, 1] = 2.41, 9.0
    return [
        KernelExhibit("blocks", "mta", 0, "pre", rng.normal(size=(5, 6, 11))),
        KernelExhibit("blocks", "mta", 0, "post", rng.normal(size=(1, 2, 3))),
        MixExhibit("blocks", "mta", 0, np.eye(2).tolist()),
        MapExhibit("blocks", "mta", 0, 1, TOKENS, maps),
        MapExhibit("blocks", "mta", 0, 1, TOKENS, maps - 0.5 * np.tril(maps), rows=[6, 7]),
        MapExhibit("blocks", "standard", 0, 1, ["a"] * 60, np.eye(60)),
        HidingExhibit("blocks", "selective", 1, TOKENS, hiding, hiding.sum(0)),
    ]
