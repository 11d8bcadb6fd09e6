"""Models with any mechanism of the laboratory: converted, and loaded."""

import os
from collections.abc import Iterable, Mapping

from transformers import PreTrainedModel

from heedful import hf
from heedful.hf import Conversion
from heedful.hf.convert import replace_attention
from heedful.nn import MechanismConfig, Role
from heedful.ops.impl import Impl
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
    return replace_attention(model, mechanisms, where=where, impl=impl, verify=verify)


def load(folder: str | os.PathLike | PreTrainedModel, **options) -> PreTrainedModel:
    """Load a model as `heedful.load` does, with its options, also one of a baseline."""
    return hf.load(folder, mechanisms=MECHANISMS, **options)
