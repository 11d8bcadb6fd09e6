"""Grouped attention: near tokens one by one, far ones by summaries of their groups."""

from heedful.ops.grouped.api import grouped_attention
from heedful.ops.grouped.groups import Groups, fixed_groups, sentence_groups, sliding_groups
from heedful.ops.grouped.learned import cif_groups
from heedful.ops.grouped.summaries import Summaries, member_attention, summarise

__all__ = [
    "Groups",
    "Summaries",
    "cif_groups",
    "fixed_groups",
    "grouped_attention",
    "member_attention",
    "sentence_groups",
    "sliding_groups",
    "summarise",
]
