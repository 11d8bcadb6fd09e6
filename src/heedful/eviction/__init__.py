"""Eviction policies: which tokens leave a KV cache when its budget is full."""

from heedful.eviction.policies import (
    H2O,
    POLICIES,
    TOVA,
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
    "MostHidden",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "Window",
]
