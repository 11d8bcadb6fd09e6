"""Low-rank matrices that act once a cache has evicted something.

A model that learns to do without what is evicted changes its answers also where nothing is evicted.
So its matrices act on those tokens alone that are read after an eviction: until then the model is
its base, to the last bit. The idea is that of activated LoRA (Greenewald et al., arXiv 2504.12397),
whose matrices act after a phrase; here it is the state of the cache that counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from heedful.hf.cache.base import AttentionCache
from heedful.hf.family.call import forward_pass


class Calls(NamedTuple):
    """The calls that a whole sequence stands for, with a cache that evicts.

    least: the smallest of the layers' budgets: something is evicted after a call with which so many
        tokens have come.
    first: how many tokens come in the first call.
    later: how many in each call after it.
    """

    least: int
    first: int
    later: int

    def act_on(
        self, documents: Int[Tensor, "#B T"] | None, tokens: int, device: torch.device
    ) -> Bool[Tensor, "#B T"]:
        """Which tokens of a sequence come in a call after an eviction from their document."""
        token = torch.arange(tokens, device=device)[None]
        later = self.first + (token - self.first) // self.later * self.later
        before = torch.where(token < self.first, 0, later)  # tokens in earlier calls
        if documents is not None:
            begins = torch.ones_like(documents, dtype=torch.bool)
            begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
            before = before - torch.where(begins, token, 0).cummax(1).values
        return before >= self.least


class AfterEviction:
    """Lets the low-rank matrices of a model act on tokens that are read after an eviction.

    In a call with a cache that is all of its tokens, once some layer has evicted one. In a call
    without a cache it is none, but within `standing_for`.

    Arguments:
        model: converted, with layers of PEFT's LoRA inside.

    Attributes:
        calls: what a sequence without a cache stands for; `None` where nothing is evicted.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.calls: Calls | None = None
        self._act: Bool[Tensor, "#B T"] | bool = False
        self._handles = [model.base_model.register_forward_pre_hook(self._begin)]
        for layer in _low_rank_layers(model).values():
            self._handles += [x.register_forward_hook(self._apply) for x in layer.lora_B.values()]

    @contextmanager
    def standing_for(self, calls: Calls | None) -> Iterator[None]:
        """Within it sequences without a cache stand for such calls."""
        outer, self.calls = self.calls, calls
        try:
            yield
        finally:
            self.calls = outer

    def remove(self, model: PreTrainedModel) -> None:
        """Take the matrices out of the model."""
        for handle in self._handles:
            handle.remove()
        for name, layer in _low_rank_layers(model).items():
            model.set_submodule(name, layer.base_layer)

    def _begin(self, module: nn.Module, args: tuple) -> None:
        """Before a call of the model, after its cache and its documents have been read."""
        call = forward_pass()
        if (cache := call.sources[2]) is not None:
            self._act = has_evicted(cache)
        elif self.calls is None:
            self._act = False
        else:
            tokens = call.positions if call.token_ids is None else call.token_ids
            self._act = self.calls.act_on(call.documents, tokens.shape[1], tokens.device)

    def _apply(
        self, module: nn.Module, args: tuple, output: Float[Tensor, "B T n"]
    ) -> Float[Tensor, "B T n"]:
        """What the matrices add to a layer's output, for the tokens that they act on."""
        if isinstance(self._act, bool):
            return output if self._act else torch.zeros_like(output)
        if output.shape[1:-1] != self._act.shape[1:]:
            raise ValueError(
                f"matrices get {tuple(output.shape[:-1])} tokens of {tuple(self._act.shape)}: "
                "layers that see a choice of a sequence's tokens, such as experts, cannot stand "
                "for calls with a cache; leave them out of target_modules"
            )
        return output * self._act[..., None]


def has_evicted(cache: Cache) -> bool:
    """Whether some layer of a cache has evicted a token under its budget."""
    return any(
        layer.length < layer.counters.total
        for layer in getattr(cache, "layers", ())
        if isinstance(layer, AttentionCache) and layer.budget is not None
    )


def calls_of(cache: Cache, first: int, later: int) -> Calls | None:
    """The calls of so many tokens each with an empty cache; `None` where it evicts nothing.

    Raises:
        ValueError: what it evicts depends on more than how many tokens have come.
    """
    budgets = [x.budget for x in cache.layers if isinstance(x, AttentionCache) and x.budget]
    for policy in (budget.policy for budget in budgets):
        if policy.keep_prompt or policy.evicts_below is not None:
            raise ValueError(
                f"eviction: {type(policy).__name__} evicts not by the number of tokens alone, and "
                "this model's matrices act after the first eviction: measure with steps through a "
                "cache (heedful.new_cache), or with another policy"
            )
    return Calls(min(x.tokens for x in budgets), first, later) if budgets else None


def _low_rank_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of PEFT's LoRA by name."""
    return {name: x for name, x in model.named_modules() if hasattr(x, "lora_B")}
