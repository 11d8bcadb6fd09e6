"""Write on from a prompt under a cache whose bytes are counted."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import TextStreamer

from heedful.experiments.decoding import Generation
from heedful.experiments.models import longest, open_model, open_tokenizer, policy_named
from heedful.hf.budgets import read_budgets
from heedful.hf.cache import new_cache
from heedful.hf.eviction import Eviction

CHUNK = 64  # tokens of a prompt at a time under a budget: what a layer holds beyond it


class Generated(NamedTuple):
    """What came out, and what it took.

    text: without the prompt.
    prompt, tokens: how many were read and written.
    tokens_per_second: of the tokens after the first.
    nbytes, peak_nbytes: of the cache at the end, and at its largest.
    whole_nbytes: what it would have held at the end without eviction.
    """

    text: str
    prompt: int
    tokens: int
    tokens_per_second: float
    nbytes: int
    peak_nbytes: int
    whole_nbytes: int

    def __str__(self) -> str:
        held, peak, whole = (_mib(x) for x in (self.nbytes, self.peak_nbytes, self.whole_nbytes))
        return (
            f"{self.prompt} tokens read, {self.tokens} written at {self.tokens_per_second:.1f} "
            f"tokens/s; the cache holds {held} (peak {peak}), without eviction {whole}"
        )


def generate(asked: Generation, write: Callable[[str], None]) -> Generated:
    """Generate as `heedful generate` does; `write` gets the text in pieces as it is made."""
    text = asked.prompt if asked.file is None else _read(Path(asked.file))
    model = open_model(asked.model, asked.device)
    tokenizer = open_tokenizer(asked.tokenizer, asked.model, model)
    ids = _prompt(text, tokenizer, asked.chat)
    most = longest(model)
    if most is not None and ids.shape[1] + asked.max_new_tokens > most:
        raise ValueError(
            f"the prompt has {ids.shape[1]} tokens, and with {asked.max_new_tokens} new ones that "
            f"is more than the {most} that the model has positions for; shorten it, or give a "
            "smaller --max-new-tokens"
        )
    cache = new_cache(model, _eviction(asked, model))
    evicts = any(getattr(layer, "policy", None) is not None for layer in cache.layers)
    streamer = _Streamer(tokenizer, write)
    torch.manual_seed(asked.seed)
    found = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids, device=model.device),
        past_key_values=cache,
        prefill_chunk_size=asked.chunk or (CHUNK if evicts else None),
        max_new_tokens=asked.max_new_tokens,
        do_sample=asked.temperature > 0,
        temperature=asked.temperature or None,
        top_k=None,
        top_p=None,
        streamer=streamer,
        pad_token_id=model.generation_config.pad_token_id or 0,
    )
    new = found[0, ids.shape[1] :].tolist()
    return Generated(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt=ids.shape[1],
        tokens=len(new),
        tokens_per_second=streamer.rate(),
        nbytes=cache.nbytes,
        peak_nbytes=cache.peak_nbytes,
        whole_nbytes=cache.whole_nbytes,
    )


def _eviction(asked: Generation, model) -> Eviction | bool | None:
    """The policy that is asked for; `None` is the model's own, `False` none."""
    if asked.eviction == "none":
        return False
    if asked.budget is None:
        return None
    if asked.budget.isdecimal():
        options = {"seed": asked.seed} if asked.eviction == "random" else {}
        return policy_named(asked.eviction, model, int(asked.budget), **options)
    return read_budgets(Path(asked.budget), model)


def _prompt(text: str, tokenizer, chat: bool) -> torch.Tensor:
    if chat and getattr(tokenizer, "chat_template", None):
        said = [{"role": "user", "content": text}]
        found = tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return found["input_ids"]
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError("prompt has no tokens; give at least one word")
    return torch.tensor([ids])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise ValueError(f"file {path} is not UTF-8 text") from None


class _Streamer(TextStreamer):
    """Hands on the text as it is made, and notes when."""

    def __init__(self, tokenizer, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.times = write, []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)

    def rate(self) -> float:
        """Tokens per second; the first `put` is the prompt's, the second the first token's."""
        steps = len(self.times) - 2
        return steps / (self.times[-1] - self.times[1]) if steps > 0 else float("nan")


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
