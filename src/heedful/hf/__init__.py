"""The integration with transformers, the only room that imports it."""

from heedful.hf.checkpoint import load, register
from heedful.hf.convert import Conversion, conversion_of, convert, revert

__all__ = ["Conversion", "conversion_of", "convert", "load", "register", "revert"]
