"""Options that several commands have; imports nothing heavy."""

import math
from typing import Literal

EvictionName = Literal[
    "auto", "most-hidden", "streaming-llm", "h2o", "tova", "snap-kv", "window", "random", "none"
]
RoleName = Literal["decoder", "encoder", "cross"]
Device = Literal["auto", "cpu", "cuda"]
RECALL = "recall"
"""In place of a file of --data: generated facts in its texts, and questions about them."""


def check_eviction(eviction: EvictionName, budget: str | None) -> None:
    """Raise unless a policy is named with its budget."""
    if eviction not in ("auto", "none") and budget is None:
        raise ValueError(f"eviction={eviction!r} needs a budget: add --budget N")
    if eviction == "none" and budget is not None:
        raise ValueError("eviction='none' keeps everything: leave the budget out")


def check_memory_loss(factor: float) -> None:
    """Raise unless the memory loss can have this factor."""
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 <= factor < math.inf:
        raise ValueError(f"memory_loss must be a number of at least 0 (none), got {factor!r}")
