"""Pure functions of tensors: the attention operators and what their queries may see."""

from heedful.ops.mta import multi_token_attention
from heedful.ops.visibility import Visibility

__all__ = ["Visibility", "multi_token_attention"]
