"""Eviction policies: which tokens leave a KV cache when its budget is full."""

from heedful.hf.eviction.h2o import H2O
from heedful.hf.eviction.most_hidden import MostHidden
from heedful.hf.eviction.policy import Eviction, Held
from heedful.hf.eviction.random import Random
from heedful.hf.eviction.snap_kv import SnapKV
from heedful.hf.eviction.streaming_llm import StreamingLLM
from heedful.hf.eviction.tova import TOVA
from heedful.hf.eviction.window import Window

POLICIES = (MostHidden, StreamingLLM, H2O, TOVA, SnapKV, Window, Random)

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
