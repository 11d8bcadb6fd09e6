"""Multi-token attention and, without convolutions, talking-heads attention."""

from heedful.ops.mta.api import multi_token_attention
from heedful.ops.mta.low_rank import LowRank

__all__ = ["LowRank", "multi_token_attention"]
