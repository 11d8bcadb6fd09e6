"""Multi-token attention and, without convolutions, talking-heads attention."""

from heedful.ops.mta.api import multi_token_attention

__all__ = ["multi_token_attention"]
