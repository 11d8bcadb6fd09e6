"""Low-rank matrices that act once a cache has evicted something.

A model that learns to do without what is evicted changes its answers also where nothing is evicted.
So its matrices act only on tokens that are read after an eviction: until then the model is what it
is without them, to the last bit. The idea is that of activated LoRA (Greenewald et al., arXiv
2504.12397), whose matrices act after a phrase; here it is the state of the cache that counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor, nn
from torch.nn.functional import pad
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
        self, real: Bool[Tensor, "B T"], documents: Int[Tensor, "#B T"] | None
    ) -> Bool[Tensor, "B T"]:
        """Which tokens come in a call after one of their document has been evicted."""
        token = torch.arange(real.shape[1], device=real.device).expand(real.shape)
        later = self.first + (token - self.first) // self.later * self.later
        start = torch.where(token < self.first, 0, later)  # of the token's call
        count = pad(real.long().cumsum(1), (1, 0))  # real tokens before each
        before = count.gather(1, start)
        if documents is not None:
            begins = torch.ones_like(documents, dtype=torch.bool)
            begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
            before = before - count.gather(1, torch.where(begins, token, 0).cummax(1).values)
        return before >= self.least


class AfterEviction:
    """Lets the low-rank matrices of a model act on tokens that are read after an eviction.

    In a call with a cache these are all tokens of a sequence from which some layer has evicted one;
    padding, which is evicted first, does not count. In a call without a cache there are none,
    except within `standing_for`.

    Arguments:
        model: converted, with layers of PEFT's LoRA inside.

    Attributes:
        calls: what a sequence without a cache stands for; `None` where nothing is evicted.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.calls: Calls | None = None
        self._act: Bool[Tensor, "B n"] | bool = False  # of sequences, or each of their tokens
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
        mask, cache = call.sources[0], call.sources[2]
        if cache is not None:
            self._act = has_evicted(cache, None if call.unpadded else mask)
        elif self.calls is None:
            self._act = False
        else:
            tokens = call.positions if call.token_ids is None else call.token_ids
            real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
            self._act = self.calls.act_on(real, call.documents)

    def _apply(
        self, module: nn.Module, args: tuple, output: Float[Tensor, "B T n"]
    ) -> Float[Tensor, "B T n"]:
        """What the matrices add to a layer's output, for the tokens that they act on."""
        if isinstance(self._act, bool):
            return output if self._act else torch.zeros_like(output)
        if output.ndim != 3 or self._act.shape[1] not in (1, output.shape[1]):
            raise ValueError(
                f"matrices get tokens of shape {tuple(output.shape[:-1])}, and whether they act is "
                f"known for {tuple(self._act.shape)}: layers that see a choice of the tokens, such "
                "as experts, cannot tell sequences apart; leave them out of target_modules"
            )
        return output * self._act[..., None]


def has_evicted(cache: Cache, mask: Real[Tensor, "B n"] | None) -> Bool[Tensor, "B 1"] | bool:
    """Whether some layer of a cache has evicted a real token under its budget, for each sequence.

    Arguments:
        cache: before a call.
        mask: which tokens are real, those of the call included; `None` where all are.
    """
    layers = [
        layer
        for layer in getattr(cache, "layers", ())
        if isinstance(layer, AttentionCache)
        and layer.budget is not None
        and layer.length < layer.counters.total
    ]
    if mask is None or not layers or mask.shape[1] < layers[0].counters.total:
        return bool(layers)  # attention refuses a mask that is too short
    evicted = torch.zeros(len(mask), 1, dtype=torch.bool, device=mask.device)
    for layer in layers:
        real = mask[:, : layer.counters.total].bool()
        left = real.gather(1, layer.positions().to(real.device))
        evicted |= (left.sum(1) < real.sum(1))[:, None]
    return evicted


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
