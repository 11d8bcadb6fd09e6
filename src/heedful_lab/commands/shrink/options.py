"""The options of `heedful shrink`; imports nothing heavy."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from heedful.checks import UserError, check_literals, check_whole
from heedful_lab.commands.options import (
    RECALL,
    ModelDevice,
    ModelDtype,
    TokenizerName,
    check_device,
)

ShrinkTraining = Literal["none", "selectors", "lora"]


@dataclass(frozen=True)
class Shrink:
    """Make a folder that decodes with a small KV cache from a model, and measure its loss.

    Trains selectors beside the frozen model (and LoRA under their budgets, with --train lora),
    shares out the tokens among the layers, and measures. The folder is an adapter: it opens on its
    base with heedful.load, generate, eval and inspect. The same command goes on where it was
    stopped.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model, a name on the Hugging Face hub, a GGUF file, or smollm2."""
    ratio: float = 4.0
    """Bytes of a full cache in bf16 after --length tokens over those of the small one."""
    length: int = 1024
    """Tokens of a text for which the ratio holds; beyond them it grows, as the cache does not."""
    train: ShrinkTraining = "selectors"
    """Selectors rank the tokens; lora adds LoRA under their budgets, which takes several times as
    long and loses less; none keeps the first and the newest tokens."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text to train and search on: files, folders of them, hf:NAME. Default: the Python standard
    library's sources."""
    held_out: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text to measure on; by default the end of the data."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs/shrink"
    """Folder for the adapter, with budgets.json and shrink.json."""
    steps: int | None = None
    """Training steps; by default 200 of selectors and 180 of LoRA."""
    trials: int = 33
    """Budgets that the search tries."""
    rows: int = 8
    """Sequences that it tries them on, and as many that the result is measured on."""
    tokenizer: TokenizerName = None
    dtype: ModelDtype = "auto"
    device: ModelDevice = "auto"
    seed: int = 0
    """Of training."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_device(self.device)
        if not isinstance(self.ratio, int | float) or not 1 < self.ratio < float("inf"):
            raise UserError(f"ratio must be a number above 1, got {self.ratio!r}; such as 4")
        check_whole("length", self.length, 64)
        for name in ("trials", "rows"):
            check_whole(name, getattr(self, name), 1)
        check_whole("seed", self.seed, 0)
        if self.steps is not None:
            check_whole("steps", self.steps, 1)
        if RECALL in (*self.data, *self.held_out):
            raise UserError("data names texts alone; questions about facts in them come by itself")
        if self.train == "none" and self.steps is not None:
            raise UserError("steps is for training, and train='none' has none; leave it out")

    def identity(self) -> dict:
        """The options that decide the result, as JSON."""
        values = asdict(self).items()
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values if k != "out"}
