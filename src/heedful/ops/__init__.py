"""Pure functions of tensors: the attention operators and what their queries may see."""

from heedful.ops.differential import differential_attention
from heedful.ops.grouped import Groups, Summaries, grouped_attention, summarise
from heedful.ops.impl import Impl
from heedful.ops.mta import LowRank, multi_token_attention
from heedful.ops.selective import SelectiveOutput, selective_attention
from heedful.ops.visibility import Queries, Visibility

__all__ = [
    "Groups",
    "Impl",
    "LowRank",
    "Queries",
    "SelectiveOutput",
    "Summaries",
    "Visibility",
    "differential_attention",
    "grouped_attention",
    "multi_token_attention",
    "selective_attention",
    "summarise",
]
