"""Answers of a model: continuations of prompts, or the likelihood of tokens."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from heedful.eviction import Eviction
from heedful.hf.cache.new import new_cache
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.versions import generate_argument
from heedful_lab.commands.generate.run import prompt_chunk
from heedful_lab.rivals.models import has_cache

_LOGITS = 2**26  # numbers of logits at a time


class Likelihood(NamedTuple):
    """A model's likelihoods of a sequence, each but the first.

    Arguments:
        nats: the negative log-likelihood of each, in fp32.
        likeliest: the token that it would have taken instead, or the same.
    """

    nats: Float[Tensor, "T-1"]
    likeliest: Int[Tensor, "T-1"]


@runtime_checkable
class Answers(Protocol):
    """Interface of an evaluated model."""

    def write(self, prompts: Sequence[Sequence[int]], room: int) -> list[str]:
        """The greedy continuation of each prompt, at most `room` tokens."""

    def read(self, rows: Sequence[Sequence[int]]) -> list[Likelihood]:
        """The likelihoods of each sequence's tokens."""


class LanguageModel:
    """The answers of a converted model, under a policy or with its full cache.

    Arguments:
        model: a decoder, in eval mode.
        tokenizer: which decodes what it writes; not needed to read sequences.
        eviction: what its cache evicts; `False` keeps everything. Prompts come in pieces then, and
            sequences that are read token by token.
        chunk: how many tokens of a prompt come at a time; by default as `heedful generate` does.
        dtype: of its cache, as for `heedful.new_cache`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer,
        eviction: Eviction | bool = False,
        chunk: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.tokenizer, self.eviction = model, tokenizer, eviction
        self.chunk, self.dtype = chunk, dtype

    @torch.no_grad()
    def write(self, prompts: Sequence[Sequence[int]], room: int) -> list[str]:
        """Prompts are padded on the left.

        Under a policy only those of one length are in one batch: padding would move the pieces in
        which they come, and so what is evicted.
        """
        if self.eviction and len({len(x) for x in prompts}) > 1:
            return [self.write([x], room)[0] for x in prompts]
        longest = max(map(len, prompts))
        pad = self.model.generation_config.pad_token_id or 0
        ids = torch.tensor([[pad] * (longest - len(x)) + list(x) for x in prompts])
        mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in prompts])
        options: dict = {"use_cache": False}  # as some baselines have none
        if has_cache(self.model):
            cache = new_cache(self.model, self.eviction, dtype=self.dtype)
            chunk = self.chunk or prompt_chunk(cache)
            options = generate_argument(cache) | {"prefill_chunk_size": chunk}
        end = self.model.generation_config.eos_token_id
        end = self.tokenizer.eos_token_id if end is None else end
        output = self.model.generate(
            ids.to(self.model.device),
            attention_mask=mask.to(self.model.device),
            **options,
            max_new_tokens=room,
            num_beams=1,
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            pad_token_id=pad,
            eos_token_id=end,
        )
        new = output[:, longest:].tolist()
        return [self.tokenizer.decode(x, skip_special_tokens=True) for x in new]

    def reading(self) -> AbstractContextManager:
        """Within it, calls without a cache compute what steps with its cache would."""
        return evicting(self.model, self.eviction or None, dtype=self.dtype)

    @torch.no_grad()
    def read(self, rows: Sequence[Sequence[int]]) -> list[Likelihood]:
        """Sequences are padded on the right, where a causal model's padding changes nothing."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        longest = max(map(len, rows))
        at_once = max(1, _LOGITS // (longest * vocabulary))
        if at_once < len(rows):
            halves = (rows[:at_once], rows[at_once:])
            return [likelihood for half in halves for likelihood in self.read(half)]
        ids = torch.tensor([[*x, *[0] * (longest - len(x))] for x in rows])
        with self.reading():
            inputs = ids.to(self.model.device)
            logits = self.model(input_ids=inputs, use_cache=False).logits[:, :-1].float()
        nats = cross_entropy(logits.transpose(1, 2), inputs[:, 1:], reduction="none").cpu()
        likeliest = logits.argmax(-1).cpu()
        return [
            Likelihood(nats[i, : len(x) - 1], likeliest[i, : len(x) - 1])
            for i, x in enumerate(rows)
        ]
