"""Attention for language models that looks at more than one token pair at a time."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heedful.hf import Conversion, convert, load, register, revert
    from heedful.hf.adapter_folders import save_adapter
    from heedful.hf.adapters import get_peft_model
    from heedful.hf.cache.new import KVCache, load_cache, new_cache
    from heedful.hf.look import LayerLook, look
    from heedful.hf.stock import stock_model, stock_tokenizer
    from heedful.nn import (
        Differential,
        Forgetting,
        Gated,
        Grouped,
        LocalGlobal,
        MultiToken,
        Selective,
        SelectiveMultiToken,
        Standard,
        TalkingHeads,
    )
    from heedful.ops import (
        Groups,
        LowRank,
        SelectiveOutput,
        Summaries,
        Visibility,
        differential_attention,
        grouped_attention,
        multi_token_attention,
        selective_attention,
        summarise,
    )
    from heedful.papers import cite
    from heedful.training.losses import GroupingLoss, MemoryLoss

__version__ = "0.2.0"

_ROOMS = {
    "heedful.ops": (
        "Groups",
        "LowRank",
        "SelectiveOutput",
        "Summaries",
        "Visibility",
        "differential_attention",
        "grouped_attention",
        "multi_token_attention",
        "selective_attention",
        "summarise",
    ),
    "heedful.nn": (
        "Differential",
        "Forgetting",
        "Gated",
        "Grouped",
        "LocalGlobal",
        "MultiToken",
        "Selective",
        "SelectiveMultiToken",
        "Standard",
        "TalkingHeads",
    ),
    "heedful.hf": ("Conversion", "convert", "load", "register", "revert"),
    "heedful.hf.adapter_folders": ("save_adapter",),
    "heedful.hf.adapters": ("get_peft_model",),
    "heedful.hf.cache.new": ("KVCache", "load_cache", "new_cache"),
    "heedful.hf.look": ("LayerLook", "look"),
    "heedful.hf.stock": ("stock_model", "stock_tokenizer"),
    "heedful.papers": ("cite",),
    "heedful.training.losses": ("GroupingLoss", "MemoryLoss"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = [
    "Conversion",
    "Differential",
    "Forgetting",
    "Gated",
    "Grouped",
    "GroupingLoss",
    "Groups",
    "KVCache",
    "LayerLook",
    "LocalGlobal",
    "LowRank",
    "MemoryLoss",
    "MultiToken",
    "Selective",
    "SelectiveMultiToken",
    "SelectiveOutput",
    "Standard",
    "Summaries",
    "TalkingHeads",
    "Visibility",
    "__version__",
    "cite",
    "convert",
    "differential_attention",
    "get_peft_model",
    "grouped_attention",
    "load",
    "load_cache",
    "look",
    "multi_token_attention",
    "new_cache",
    "register",
    "revert",
    "save_adapter",
    "selective_attention",
    "stock_model",
    "stock_tokenizer",
    "summarise",
]


_MODULES = ("data", "eviction", "hf", "nn", "ops", "testing", "training")


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"heedful.{name}")
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'heedful' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted((*__all__, *_MODULES))
