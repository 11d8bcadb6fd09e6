"""Eviction policies by the name under which users import them; they live in heedful.hf.eviction."""

from heedful.hf.eviction import *  # noqa: F403
from heedful.hf.eviction import __all__ as __all__
