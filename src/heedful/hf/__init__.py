"""The door to transformers, the only room that imports it."""

from heedful.hf.checkpoint import load, register
from heedful.hf.convert import Conversion, convert, revert

__all__ = ["Conversion", "convert", "load", "register", "revert"]
