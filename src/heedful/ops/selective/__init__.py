"""Selective attention: tokens mask earlier tokens from later ones."""

from heedful.ops.selective.api import SelectiveOutput, selective_attention

__all__ = ["SelectiveOutput", "selective_attention"]
