"""The options of `heedful inspect`; imports nothing heavy."""

import os
from dataclasses import dataclass
from typing import Annotated

import tyro

from heedful.checks import UserError, check_literals, check_whole
from heedful_lab.commands.options import (
    AdapterName,
    EvictionName,
    ModelDevice,
    ModelDtype,
    TokenizerName,
    check_device,
    check_eviction,
)

MOST_TOKENS = 2048  # maps are dense while they are made: 16 MiB per head and step at this length


@dataclass(frozen=True)
class Inspection:
    """Look into a model at work on a text: one page, to be opened in a browser.

    The page shows what every head does, where each token attends in every layer and head, what
    convolution and mixing change of it, which tokens selective attention masks and since when, what
    a cache still holds under a budget, the borders of groups, and all learned kernels. It is one
    file that loads nothing. An ordinary model is shown with its own standard attention.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a decoder or an encoder, converted or not, a GGUF file, smollm2, or a name on the
    Hugging Face hub."""
    text: str | None = None
    """The text to look at."""
    file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file, in place of --text."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE")] = "inspect.html"
    """Write the page here; a page that is there is replaced."""
    tokens: int | None = None
    """Take only the first so many tokens of the text; 2,048 at most."""
    layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = ()
    """Show only these layers, counted from 0; all by default."""
    adapter: AdapterName = None
    budget: Annotated[str | None, tyro.conf.arg(metavar="N|FILE")] = None
    """Show what caches of so many tokens per layer hold, or those of a budgets.json. By default
    what stands beside the model, if anything."""
    eviction: EvictionName = "auto"
    """Which tokens are evicted under --budget. auto: what selective attention has hidden most, or
    the lowest retention gate; for other mechanisms all but the first and the newest
    (streaming-llm). none: no cache is shown."""
    tokenizer: TokenizerName = None
    device: ModelDevice = "auto"
    dtype: ModelDtype = "auto"
    seed: int = 0
    """Of random eviction."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_device(self.device)
        if (self.text is None) == (self.file is None):
            raise UserError("text must be given, or a file with it, and not both")
        if self.text is not None and os.path.isfile(self.text):
            raise UserError(
                f"text must be what is looked at, got the name of a file, {self.text!r}; give it "
                "as --file to look at what is in it"
            )
        if not self.out:
            raise UserError("out must be a file, got an empty text; leave it out for inspect.html")
        if self.tokens is not None:
            check_whole("tokens", self.tokens, 1, MOST_TOKENS)
        for index in self.layers:
            check_whole("layers", index, 0)
        check_whole("seed", self.seed, 0)
        check_eviction(self.eviction, self.budget)
