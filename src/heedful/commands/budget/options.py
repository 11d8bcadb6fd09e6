"""What `heedful generate` and `heedful budget` are asked for; no torch, for the command line."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from heedful.checks import check_literals, check_whole

EvictionName = Literal[
    "auto", "most-hidden", "streaming-llm", "h2o", "tova", "snap-kv", "window", "random", "none"
]


@dataclass(frozen=True)
class Generation:
    """Write on from a prompt, and say what the KV cache took.

    An ordinary model is given standard attention under a cache of heedful; a converted one is what
    it is. The text appears as it is made; at the end stand tokens per second, the bytes that the
    cache held, their peak, and what they would have been without eviction.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model, converted or not, or a name on the Hugging Face hub."""
    prompt: str | None = None
    """The text to go on from."""
    file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file with the prompt, in place of --prompt."""
    budget: Annotated[str | None, tyro.conf.arg(metavar="N|FILE")] = None
    """How many tokens a layer's cache may hold, or a budgets.json. By default what stands beside
    the model, if anything."""
    eviction: EvictionName = "auto"
    """Which tokens leave under --budget. auto: what selective attention has hidden most; for other
    mechanisms all but the first and the newest (streaming-llm). none keeps everything."""
    chunk: int | None = None
    """Read the prompt in pieces of so many tokens; under a budget 64 by default."""
    max_new_tokens: int = 128
    """Stop after so many tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; above it, tokens are drawn."""
    chat: bool = True
    """Put the prompt into the tokenizer's chat template, where it has one."""
    tokenizer: str | None = None
    """A tokenizer's folder or name, by default the model's own; "bytes" for models of bytes."""
    device: str = "cpu"
    """Where to run: cpu or cuda."""
    seed: int = 0
    """Of drawn tokens, and of random eviction."""

    def __post_init__(self) -> None:
        check_literals(self)
        if (self.prompt is None) == (self.file is None):
            raise ValueError("prompt must be given, or a file with it, and not both")
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("seed", self.seed, 0)
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1)
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise ValueError(f"temperature must be 0 or a number above it, got {self.temperature}")
        if self.eviction not in ("auto", "none") and self.budget is None:
            raise ValueError(f"eviction={self.eviction!r} needs a budget: add --budget N")
        if self.eviction == "none" and self.budget is not None:
            raise ValueError("eviction='none' keeps everything: leave the budget out")


@dataclass(frozen=True)
class BudgetSearch:
    """Search how many tokens each layer's KV cache needs, and write budgets.json into the model's
    folder.

    From budgets that hold everything, the layer that loses least gives up a few tokens, again and
    again, while the perplexity of the data stays below a limit. What is found is used by
    `heedful.load`, `heedful.new_cache` and `heedful generate` without being told. The same command
    goes on where it was stopped.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model, converted or not."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE ...")] = ()
    """Text files, folders of them, or hf:NAME; a part of the training texts is right."""
    eviction: EvictionName = "auto"
    """Which tokens leave. auto: what selective attention has hidden most (most-hidden); for other
    mechanisms all but the first and the newest (streaming-llm)."""
    loss: float = 0.5
    """How many percent the perplexity may rise above that of the whole cache."""
    reference: Annotated[str | None, tyro.conf.arg(metavar="MODEL")] = None
    """A model whose perplexity, with its whole cache, is the limit in place of --loss."""
    length: int = 1024
    """Tokens per row of data."""
    rows: int = 8
    """Rows of data."""
    sinks: int | None = None
    """First tokens that are never evicted; 4 by default, for window none."""
    recent: int = 8
    """Newest tokens that are never evicted."""
    tokenizer: str | None = None
    """A tokenizer's folder or name, by default the model's own; "bytes" for models of bytes."""
    device: str = "cpu"
    """Where to run: cpu or cuda."""
    restart: bool = False
    """Begin anew where the folder holds the trials of another search."""

    def __post_init__(self) -> None:
        check_literals(self)
        if not self.data:
            raise ValueError("data must name at least one text file: add --data FILE")
        if self.eviction == "none":
            raise ValueError("eviction='none' keeps everything: there is nothing to search")
        check_whole("length", self.length, 32)
        check_whole("rows", self.rows, 1)
        if self.sinks is not None:
            check_whole("sinks", self.sinks, 0)
        check_whole("recent", self.recent, 0)
        if not 0 <= self.loss < float("inf"):
            raise ValueError(f"loss must be a percentage of at least 0, got {self.loss}")
