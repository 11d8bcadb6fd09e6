"""The integration with transformers, with everything that reads a family."""

import transformers

from heedful.compatibility import TESTED, release

_OLDEST = TESTED["transformers"][0]
if release(transformers.__version__) < release(_OLDEST):
    raise ImportError(
        f"heedful needs transformers {_OLDEST} or newer, got {transformers.__version__}: "
        f"pip install 'transformers>={_OLDEST}'"
    )

# ruff: noqa: E402 -- an older one lacks names that these files import
from heedful.hf.auto_classes import register
from heedful.hf.convert import Conversion, conversion_of, convert, revert
from heedful.hf.load import load

register()  # which opens folders, so that what opens and converts need not know it

__all__ = ["Conversion", "conversion_of", "convert", "load", "register", "revert"]
