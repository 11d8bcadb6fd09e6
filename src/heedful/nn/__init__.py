"""Layers: a frozen configuration per mechanism, its parameters, and one operator each."""

from heedful.nn.differential import Differential, DifferentialAttention
from heedful.nn.forgetting import Forgetting, ForgettingAttention
from heedful.nn.gated import Gated, GatedAttention
from heedful.nn.grouped import Grouped, GroupedAttention
from heedful.nn.layer import (
    Layer,
    LayerInputs,
    LayerOutput,
    Maps,
    MechanismConfig,
    Stream,
)
from heedful.nn.mechanisms import (
    NAMES,
    TABLE,
    MechanismRow,
    from_json,
    mechanism,
    to_json,
)
from heedful.nn.multi_token import MultiToken, MultiTokenAttention, TalkingHeads, ablations
from heedful.nn.selective import Selective, SelectiveAttention
from heedful.nn.selective_multi_token import SelectiveMultiToken
from heedful.nn.shape import HeadShape, Role
from heedful.nn.standard import LocalGlobal, Standard, StandardAttention

__all__ = [
    "NAMES",
    "TABLE",
    "Differential",
    "DifferentialAttention",
    "Forgetting",
    "ForgettingAttention",
    "Gated",
    "GatedAttention",
    "Grouped",
    "GroupedAttention",
    "HeadShape",
    "Layer",
    "LayerInputs",
    "LayerOutput",
    "LocalGlobal",
    "Maps",
    "MechanismConfig",
    "MechanismRow",
    "MultiToken",
    "MultiTokenAttention",
    "Role",
    "Selective",
    "SelectiveAttention",
    "SelectiveMultiToken",
    "Standard",
    "StandardAttention",
    "Stream",
    "TalkingHeads",
    "ablations",
    "from_json",
    "mechanism",
    "to_json",
]
