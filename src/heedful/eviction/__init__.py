"""Eviction policies: which tokens leave a KV cache, when its budget is full or F allows it."""

from heedful.eviction.policies import (
    H2O,
    POLICIES,
    TOVA,
    Bounded,
    LowestGate,
    MostHidden,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)
from heedful.eviction.policy import CachedTokens, Eviction
from heedful.eviction.triattention import Calibration, TriAttention

__all__ = [
    "H2O",
    "POLICIES",
    "TOVA",
    "Bounded",
    "CachedTokens",
    "Calibration",
    "Eviction",
    "LowestGate",
    "MostHidden",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "Window",
]
