"""Write on from a prompt under a cache whose bytes are counted."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from heedful.checks import UserError
from heedful.eviction import Eviction, SnapKV
from heedful.hf.cache.new import KVCache, expect_prompt, load_cache, new_cache
from heedful.hf.versions import cache_argument, generate_argument
from heedful_lab.commands.generate.options import Generation
from heedful_lab.commands.models import (
    ModelSource,
    convert_if_needed,
    longest,
    read_text,
    size_in_words,
)
from heedful_lab.commands.policies import EvictionChoice, cache_dtype_of

CHUNK = 64  # tokens of a prompt at a time under a budget: what a layer holds beyond it


class Decoding(NamedTuple):
    """Options of writing a text.

    max_new_tokens: of it.
    temperature: 0 takes the likeliest token each time.
    chunk: tokens of a prompt at a time; `None` is `prompt_chunk`.
    seed: of drawn tokens.
    """

    max_new_tokens: int
    temperature: float
    chunk: int | None
    seed: int


class GenerationPlan(NamedTuple):
    """A generation in plain values.

    source: the model.
    text, chat: the prompt, and whether the tokenizer's chat template is put around it.
    choice, dtype: of its cache.
    decoding: how the text is written.
    saved, save: files of a cache to go on from, and to write in place of a text.
    beside_whole: first write with the full cache.
    """

    source: ModelSource
    text: str
    chat: bool
    choice: EvictionChoice
    dtype: torch.dtype | None
    decoding: Decoding
    saved: str | None
    save: str | None
    beside_whole: bool


class GenerationResult(NamedTuple):
    """Result of a generation, and its cost.

    text: without the prompt.
    prompt, tokens: how many were read and written.
    tokens_per_second: of the tokens after the first; `None` where there is no other.
    nbytes, peak_nbytes: of the cache at the end, and at its largest.
    contents_nbytes: of the cache at the end, without room for later tokens.
    bf16_nbytes: of a full cache of the same tokens in bfloat16, without that room.
    whole_nbytes: what it would have taken at the end with nothing evicted or quantized.
    cached: how many tokens each layer's cache had at the end.
    passed: how many tokens had gone through it, those that it has evicted included.
    """

    text: str
    prompt: int
    tokens: int
    tokens_per_second: float | None
    nbytes: int
    peak_nbytes: int
    whole_nbytes: int
    contents_nbytes: int
    bf16_nbytes: int
    cached: tuple[int, ...]
    passed: int

    def __str__(self) -> str:
        rate = self.tokens_per_second
        speed = "" if rate is None else f" at {rate:.1f} tokens/s"
        sizes = (self.contents_nbytes, self.bf16_nbytes, self.peak_nbytes)
        contents, full, peak = map(size_in_words, sizes)
        return (
            f"{self.prompt} tokens read, {self.tokens} written{speed}; the cache has "
            f"{self._tokens} of {self.passed:,} tokens per layer in {contents}, "
            f"{self.bf16_nbytes / max(self.contents_nbytes, 1):.1f} × smaller than a full one in "
            f"bf16 ({full}); peak with reserve {peak}"
        )

    @property
    def _tokens(self) -> str:
        least, most = min(self.cached, default=0), max(self.cached, default=0)
        return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def generate(options: Generation, write: Callable[[str], None]) -> Iterator[GenerationResult]:
    """Generate as `heedful generate` does: go on from the prompt, or make a target of a source.

    Arguments:
        options: the model, the prompt and the budget.
        write: gets the text in pieces as it is made.

    Yields:
        What came out, when all of it is written; with `beside_whole` that of the full cache first.

    Raises:
        ValueError: an option cannot be read, or does not fit the model.
    """
    plan = GenerationPlan(
        ModelSource(
            options.model, options.device, options.dtype, options.adapter, options.tokenizer
        ),
        options.prompt if options.file is None else read_text(Path(options.file)),
        options.chat,
        EvictionChoice(options.budget, options.eviction, options.seed),
        cache_dtype_of(options.cache_dtype),
        Decoding(options.max_new_tokens, options.temperature, options.chunk, options.seed),
        options.cache,
        options.save_cache,
        options.beside_whole,
    )
    yield from _run(plan, write)


def _run(plan: GenerationPlan, write: Callable[[str], None]) -> Iterator[GenerationResult]:
    choice, decoding = plan.choice, plan.decoding
    model = plan.source.open(budgets=choice.own_budgets, convert=False)
    policy = choice.policy(model)
    convert_if_needed(model, policy)
    tokenizer = plan.source.open_tokenizer(model)
    paired, most = model.config.is_encoder_decoder, longest(model)
    if plan.saved is not None:
        cache = load_cache(plan.saved, model, None if choice.budget is None else policy or None)
        ids = _prompt(plan.text, tokenizer, plan.chat, "later")
        _check_fits(cache.get_seq_length() + ids.shape[1], decoding.max_new_tokens, most, False)
        yield _generate(model, tokenizer, ids, cache, decoding, write)
        return
    ids = _prompt(plan.text, tokenizer, plan.chat, "whole" if plan.save is None else "first")
    _check_fits(ids.shape[1], decoding.max_new_tokens, most, paired)
    cache = new_cache(model, policy, dtype=plan.dtype)
    if plan.save is not None:
        if paired:
            raise UserError("save_cache needs a decoder, and this model has an encoder: drop it")
        _read(model, ids, cache, decoding.chunk or prompt_chunk(cache) or ids.shape[1])
        cache.save(plan.save)
        yield _result("", ids.shape[1], 0, None, cache)
        return
    if plan.beside_whole:
        if not _policies(cache) and plan.dtype is None:
            raise UserError(
                "beside_whole needs a smaller cache to compare; give a --budget or a --cache-dtype"
            )
        whole = new_cache(model, eviction=False)
        yield _generate(model, tokenizer, ids, whole, decoding, write)
    yield _generate(model, tokenizer, ids, cache, decoding, write)


def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Int[Tensor, "1 T"],
    cache: KVCache,
    decoding: Decoding,
    write: Callable[[str], None],
) -> GenerationResult:
    paired = model.config.is_encoder_decoder
    streamer, passed = _Streamer(tokenizer, write), 0 if paired else cache.get_seq_length()
    prompt = ids.shape[1]
    if passed:  # whatever tokens: generate takes those that the cache does not have
        ids = torch.cat([ids.new_zeros(1, passed), ids], dim=1)
    if not paired and not passed:
        expect_prompt(cache, prompt)  # its last piece may be a single token
    torch.manual_seed(decoding.seed)
    sequences = model.generate(
        ids.to(model.device),
        attention_mask=torch.ones_like(ids, device=model.device),
        **generate_argument(cache),
        prefill_chunk_size=None if paired or passed else decoding.chunk or prompt_chunk(cache),
        max_new_tokens=decoding.max_new_tokens,
        num_beams=1,
        do_sample=decoding.temperature > 0,
        temperature=decoding.temperature or None,
        top_k=None,
        top_p=None,
        streamer=streamer,
        pad_token_id=model.generation_config.pad_token_id or 0,
    )
    new = sequences[0, 1 if paired else ids.shape[1] :].tolist()
    text = tokenizer.decode(new, skip_special_tokens=True)
    return _result(text, prompt, len(new), streamer.rate(), cache)


def _result(
    text: str, prompt: int, tokens: int, rate: float | None, cache: KVCache
) -> GenerationResult:
    return GenerationResult(
        text=text,
        prompt=prompt,
        tokens=tokens,
        tokens_per_second=rate,
        nbytes=cache.nbytes,
        peak_nbytes=cache.peak_nbytes,
        whole_nbytes=cache.whole_nbytes,
        contents_nbytes=cache.contents_nbytes,
        bf16_nbytes=cache.bf16_nbytes,
        cached=tuple(cache.tokens),
        passed=cache.get_seq_length(),
    )


@torch.no_grad()
def _read(model: PreTrainedModel, ids: Int[Tensor, "1 T"], cache: KVCache, chunk: int) -> None:
    """Read a prompt in pieces, and write nothing."""
    expect_prompt(cache, ids.shape[1])
    for piece in ids.to(model.device).split(chunk, dim=1):
        model(input_ids=piece, **cache_argument(model, cache))


def prompt_chunk(cache: KVCache) -> int | None:
    """Number of the prompt's tokens per call: pieces where a budget would be exceeded."""
    policies = _policies(cache)
    # SnapKV keeps what the end of the prompt attends to, so it needs the whole prompt at once.
    whole = not policies or any(isinstance(policy, SnapKV) for policy in policies)
    return None if whole else CHUNK


def _policies(cache: KVCache) -> list[Eviction]:
    return [policy for x in cache.layers if (policy := getattr(x, "policy", None)) is not None]


def _check_fits(prompt: int, new: int, most: int | None, paired: bool) -> None:
    if paired and most is not None:  # a source and its target have positions of their own
        for what, tokens in (("prompt has", prompt), ("max_new_tokens asks for", new)):
            if tokens > most:
                raise UserError(
                    f"{what} {tokens} tokens, and the model has {most} positions; give fewer"
                )
        return
    if most is None or prompt + new <= most:
        return
    way_out = "shorten it" if prompt >= most else f"give --max-new-tokens {most - prompt} at most"
    raise UserError(
        f"prompt has {prompt} tokens, and with {new} new ones that is more than "
        f"the {most} that the model has positions for; {way_out}"
    )


def _prompt(
    text: str, tokenizer, chat: bool, turn: Literal["whole", "first", "later"] = "whole"
) -> Tensor:
    """The tokens of a prompt; of a conversation's first turn alone, or of a later one."""
    if chat and getattr(tokenizer, "chat_template", None):

        def ids_of(*texts: str, ask: bool) -> Tensor:
            messages = [{"role": "user", "content": x} for x in texts]
            return tokenizer.apply_chat_template(
                messages, add_generation_prompt=ask, return_tensors="pt", return_dict=True
            )["input_ids"]

        if turn != "later":
            return ids_of(text, ask=turn == "whole")
        first, both = ids_of("a", ask=False), ids_of("a", text, ask=True)
        if torch.equal(both[:, : first.shape[1]], first):
            return both[:, first.shape[1] :]
        raise UserError("cache: this chat template changes earlier turns; add --no-chat to both")
    ids = tokenizer.encode(text, add_special_tokens=turn != "later")
    if not ids:
        raise UserError("prompt has no tokens; give at least one word")
    return torch.tensor([ids])


class _Streamer(BaseStreamer):
    """Hands on the text as it is made, character by character, and notes when."""

    def __init__(self, tokenizer, write: Callable[[str], None]) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.begun = False
        self.start = self.stop = 0  # text of tokens before `stop` is written; decode from `start`

    def put(self, value: Tensor) -> None:
        if not self.begun:  # the prompt
            self.begun = True
            return
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()
        self._hand_on(last=False)

    def end(self) -> None:
        self._hand_on(last=True)

    def _hand_on(self, last: bool) -> None:
        # What a token spells can depend on the one before it, and take more than one token.
        before = self._decode(self.tokens[self.start : self.stop])
        text = self._decode(self.tokens[self.start :])
        if len(text) > len(before) and (last or not text.endswith("\N{REPLACEMENT CHARACTER}")):
            self.write(text[len(before) :])
            self.start, self.stop = self.stop, len(self.tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def rate(self) -> float | None:
        """Tokens per second after the first one."""
        steps = len(self.times) - 1
        return steps / (self.times[-1] - self.times[0]) if steps > 0 else None
