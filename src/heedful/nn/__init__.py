"""Layers: a frozen configuration per mechanism, its parameters, and one operator each."""

from heedful.nn.differential import Differential, DifferentialAttention
from heedful.nn.grouped import Grouped, GroupedAttention
from heedful.nn.layer import Given, Layer, LayerOutput, Maps
from heedful.nn.mechanisms import (
    NAMES,
    TABLE,
    Mechanism,
    MechanismRow,
    from_json,
    mechanism,
    to_json,
)
from heedful.nn.multi_token import MultiToken, MultiTokenAttention, TalkingHeads, ablations
from heedful.nn.selective import Selective, SelectiveAttention
from heedful.nn.shape import HeadShape, Role
from heedful.nn.standard import Standard, StandardAttention

__all__ = [
    "NAMES",
    "TABLE",
    "Differential",
    "DifferentialAttention",
    "Given",
    "Grouped",
    "GroupedAttention",
    "HeadShape",
    "Layer",
    "LayerOutput",
    "Maps",
    "Mechanism",
    "MechanismRow",
    "MultiToken",
    "MultiTokenAttention",
    "Role",
    "Selective",
    "SelectiveAttention",
    "Standard",
    "StandardAttention",
    "TalkingHeads",
    "ablations",
    "from_json",
    "mechanism",
    "to_json",
]
