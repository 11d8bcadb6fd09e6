"""Eviction policies: which tokens leave a KV cache."""

from heedful.eviction.policies import (
    H2O,
    POLICIES,
    TOVA,
    KeyDiff,
    Knorm,
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
    "CachedTokens",
    "Calibration",
    "Eviction",
    "KeyDiff",
    "Knorm",
    "LowestGate",
    "MostHidden",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "TriAttention",
    "Window",
]
