"""Differential attention: the difference of two softmax maps."""

from heedful.ops.differential.api import differential_attention

__all__ = ["differential_attention"]
