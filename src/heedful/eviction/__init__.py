"""Eviction policies: which tokens leave a KV cache."""

from heedful.eviction.policies import (
    H2O,
    POLICIES,
    TOVA,
    KeyDiff,
    Knorm,
    MostHidden,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)
from heedful.eviction.policy import CachedTokens, Eviction

__all__ = [
    "H2O",
    "POLICIES",
    "TOVA",
    "CachedTokens",
    "Eviction",
    "KeyDiff",
    "Knorm",
    "MostHidden",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "Window",
]
