"""Layers: a frozen configuration per mechanism, its parameters, and one operator each."""

from heedful.nn.canon import Canon, CanonAttention
from heedful.nn.dex import Dex, DexAttention
from heedful.nn.differential import (
    Differential,
    DifferentialAttention,
    DifferentialV2,
    DifferentialV2Attention,
)
from heedful.nn.exclusive import Exclusive, ExclusiveAttention
from heedful.nn.forgetting import Forgetting, ForgettingAttention
from heedful.nn.gated import Gated, GatedAttention
from heedful.nn.grouped import Grouped, GroupedAttention
from heedful.nn.knocking import KnockingHeads, KnockingHeadsAttention
from heedful.nn.layer import Layer, LayerInputs, LayerOutput, Maps, ProjectionContext
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
from heedful.nn.parallax import Parallax, ParallaxAttention
from heedful.nn.retention import RetentionGate, RetentionGateAttention
from heedful.nn.selective import Selective, SelectiveAttention
from heedful.nn.shape import HeadShape, Role
from heedful.nn.simplicial import Simplicial, SimplicialAttention
from heedful.nn.standard import LocalGlobal, Standard, StandardAttention

__all__ = [
    "NAMES",
    "TABLE",
    "Canon",
    "CanonAttention",
    "Dex",
    "DexAttention",
    "Differential",
    "DifferentialAttention",
    "DifferentialV2",
    "DifferentialV2Attention",
    "Exclusive",
    "ExclusiveAttention",
    "Forgetting",
    "ForgettingAttention",
    "Gated",
    "GatedAttention",
    "Grouped",
    "GroupedAttention",
    "HeadShape",
    "KnockingHeads",
    "KnockingHeadsAttention",
    "Layer",
    "LayerInputs",
    "LayerOutput",
    "LocalGlobal",
    "Maps",
    "Mechanism",
    "MechanismRow",
    "MultiToken",
    "MultiTokenAttention",
    "Parallax",
    "ParallaxAttention",
    "ProjectionContext",
    "RetentionGate",
    "RetentionGateAttention",
    "Role",
    "Selective",
    "SelectiveAttention",
    "Simplicial",
    "SimplicialAttention",
    "Standard",
    "StandardAttention",
    "TalkingHeads",
    "ablations",
    "from_json",
    "mechanism",
    "to_json",
]
