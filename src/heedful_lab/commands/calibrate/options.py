"""The options of `heedful calibrate`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from heedful.checks import UserError, check_literals, check_whole
from heedful_lab.commands.options import ModelDevice, ModelDtype, check_device


@dataclass(frozen=True)
class CalibrationRun:
    """Measure the queries of a model on a text, for --eviction triattention.

    A few thousand tokens are enough, of whatever text. The file is of this model alone, converted
    as it is.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model, converted or not, or of an adapter, a GGUF file, smollm2, or a name on the
    Hugging Face hub. A model's layers must have a rotary embedding."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "calibration.safetensors"
    """File to write; an earlier one is replaced."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text files, folders of them, or hf:NAME. Default: the Python standard library's sources."""
    adapter: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """An adapter to open MODEL with, which is then its base."""
    length: int = 1024
    """Tokens per sequence of data."""
    rows: int = 8
    """Sequences of data."""
    tokenizer: str | None = None
    """A tokenizer's folder or name, by default the model's own; "bytes" for models of bytes."""
    device: ModelDevice = "auto"
    dtype: ModelDtype = "auto"

    def __post_init__(self) -> None:
        check_literals(self)
        check_device(self.device)
        if not self.out:
            raise UserError("out must be a file, got an empty text; leave it out for the default")
        check_whole("length", self.length, 1)
        check_whole("rows", self.rows, 1)
