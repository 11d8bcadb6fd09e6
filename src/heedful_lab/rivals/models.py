"""Models with any mechanism of the laboratory: converted, and loaded."""

import os
from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from heedful import hf
from heedful.hf import Conversion, conversion_of
from heedful.hf.cache.new import attention_modules
from heedful.hf.convert import replace_attention
from heedful.nn import MechanismConfig, Role
from heedful.ops.impl import Impl
from heedful_lab.rivals.edits import edit
from heedful_lab.rivals.table import MECHANISMS, mechanism


def convert(
    model: PreTrainedModel,
    mechanisms: MechanismConfig | str | Mapping[MechanismConfig | str, Iterable[int]],
    *,
    where: Role | Iterable[Role] | None = None,
    impl: Impl = "auto",
    verify: bool | None = None,
) -> Conversion:
    """Convert a model as `heedful.convert` does, without its warning, to baselines as well."""
    if isinstance(mechanisms, str):
        mechanisms = mechanism(mechanisms)
    elif isinstance(mechanisms, Mapping):
        named = mechanisms.items()
        mechanisms = {mechanism(x) if isinstance(x, str) else x: of for x, of in named}
    return edit(replace_attention(model, mechanisms, where=where, impl=impl, verify=verify))


def has_cache(model: PreTrainedModel) -> bool:
    """Test whether every layer of a converted decoder goes on from a cache."""
    return all(module.heedful.caches for module in attention_modules(model))


def load(folder: str | os.PathLike | PreTrainedModel, **options) -> PreTrainedModel:
    """Load a model as `heedful.load` does, with its options, also one of a baseline."""
    model = hf.load(folder, mechanisms=MECHANISMS, **options)
    edit(conversion_of(model))
    return model
