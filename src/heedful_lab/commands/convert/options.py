"""The options of `heedful convert`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from heedful.checks import UserError, check_literals
from heedful_lab.commands.options import ModelDtype, RoleName


@dataclass(frozen=True)
class FolderConversion:
    """Convert a model's folder to a mechanism, or take the mechanism out of it again.

    Of an adapter, write its base with it into one folder.

    The new folder has the weights, the tokenizer and the configuration, and is opened by
    heedful.load, heedful generate and heedful train; with --revert, by transformers alone.
    """

    source: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SRC")]]
    """Folder of a model or an adapter, a GGUF file, smollm2, or a name on the Hugging Face hub."""
    out: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="OUT")]]
    """Folder to write, which must be new or empty."""
    mechanism: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME[:OPTIONS][@LAYERS] ...")] = ()
    """Such as mta, or mta:conv_every=1,norm=true, or several: selective@0-2 mta@3,4."""
    where: tuple[RoleName, ...] = ()
    """In which attention; by default wherever the mechanism is defined."""
    revert: bool = False
    """Take the mechanism out of a converted model."""
    dtype: ModelDtype = "auto"

    def __post_init__(self) -> None:
        check_literals(self)
        if self.revert and self.mechanism:
            raise UserError("give either --mechanism, or --revert to take it out")
        if self.where and self.revert:
            raise UserError("where is for --mechanism: --revert takes everything out")
