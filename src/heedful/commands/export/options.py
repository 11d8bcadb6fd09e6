"""The options of `heedful export`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from heedful.checks import check_literals
from heedful.commands.options import ModelDtype


@dataclass(frozen=True)
class Export:
    """Write a model as a stock checkpoint, which every engine serves without heedful.

    For mechanisms that are standard attention in other words: linear knocking heads, windows of
    single layers, and whatever is still the identity. Others are refused by name.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model or an adapter, a GGUF file, smollm2, or a name on the Hugging Face hub."""
    out: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="OUT")]]
    """Folder to write, which must be new or empty."""
    dtype: ModelDtype = "auto"

    def __post_init__(self) -> None:
        check_literals(self)
