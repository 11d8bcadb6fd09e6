"""Eviction policies by the name under which users import them; they live in heedful.hf.eviction."""

from heedful.hf.eviction import (
    H2O,
    POLICIES,
    TOVA,
    Eviction,
    Held,
    MostHidden,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)

__all__ = [
    "H2O",
    "POLICIES",
    "TOVA",
    "Eviction",
    "Held",
    "MostHidden",
    "Random",
    "SnapKV",
    "StreamingLLM",
    "Window",
]
