"""LoRA that acts once a cache has evicted something, in full once half is evicted.

A model that learns to do without what is evicted changes its answers also where little is evicted.
So what its matrices add to a token is multiplied by min(1, 2 s), with s the share of the earlier
tokens that is cached no longer, on average over the layers. Until the first eviction the model is
what it is without them, to the last bit, and a text that is a little longer than the smallest
budget is read nearly so. The idea is that of activated LoRA (Greenewald et al., arXiv 2504.12397),
whose matrices act after a phrase; here it is the state of the cache that counts.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import Cache, PreTrainedModel

from heedful.checks import UserError
from heedful.hf.cache.base import AttentionCache
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.family.call import Strength, forward_pass

_LAYERS = AttentionCache | EvictingLayer

_thread = threading.local()


def _simulated() -> dict[int, "Calls"]:
    """The calls that sequences without a cache stand for in this thread, by whose matrices act."""
    if not hasattr(_thread, "calls"):
        _thread.calls = {}
    return _thread.calls


@contextmanager
def matrices_at_rest() -> Iterator[None]:
    """Within it no matrices act in this thread, whatever a cache has evicted."""
    outer, _thread.rest = getattr(_thread, "rest", False), True
    try:
        yield
    finally:
        _thread.rest = outer


class Calls(NamedTuple):
    """The calls that a whole sequence stands for, with a cache that evicts.

    budgets: of the layers; less than so many tokens are cached between two calls. `None` for a
        layer that keeps all.
    first: how many tokens come in the first call.
    later: how many in each call after it.
    """

    budgets: tuple[int | None, ...]
    first: int
    later: int

    def strengths(
        self, real: Bool[Tensor, "B T"], documents: Int[Tensor, "#B T"] | None
    ) -> Float[Tensor, "B T"]:
        """LoRA strength at each token, by the evicted share of its document before its call."""
        token = torch.arange(real.shape[1], device=real.device).expand(real.shape)
        later = self.first + (token - self.first) // self.later * self.later
        start = torch.where(token < self.first, 0, later)  # of the token's call
        count = pad(real.long().cumsum(1), (1, 0))  # real tokens before each
        before = count.gather(1, start)
        if documents is not None:
            begins = torch.ones_like(documents, dtype=torch.bool)
            begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
            before = before - count.gather(1, torch.where(begins, token, 0).cummax(1).values)
        before = before.clamp(min=0)  # a document may begin after its first token's call has
        cached = [before if x is None else before.clamp(max=x - 1) for x in self.budgets]
        return _strength(before, cached)


class LowRankLinear(nn.Linear):
    """A linear layer with LoRA beside it, as far as that of a forward pass acts."""

    adapter: str  # the name under which PEFT has the matrices
    scaling: float  # the factor on their product

    def forward(self, x: Float[Tensor, "B T m"]) -> Float[Tensor, "B T n"]:
        """The layer's output; without a strength no matrix is read."""
        strength = forward_pass().strength
        if strength is None or (factor := strength.factor) is None:
            return linear(x, self.weight, self.bias)
        # By way of the dicts of torch's modules, whose attributes cost a Python call each.
        parts, scaling = self._modules, self.scaling
        down, up = (
            parts["lora_A"]._modules[self.adapter]._parameters["weight"],
            parts["lora_B"]._modules[self.adapter]._parameters["weight"],
        )
        if isinstance(factor, float) and x.dtype == down.dtype:  # in the fewest operations
            rows = x.reshape(-1, x.shape[-1])
            output = linear(rows, self.weight, self.bias)
            output.addmm_(linear(rows, down), up.t(), alpha=scaling * factor)
            return output.view(*x.shape[:-1], output.shape[1])
        output = linear(x, self.weight, self.bias)
        inner = linear(x if x.dtype == down.dtype else x.to(down.dtype), down)
        inner = _as_far(inner, factor)
        more = linear(inner, up)
        more = more if more.dtype == output.dtype else more.to(output.dtype)
        return torch.add(output, more, alpha=scaling)

    @classmethod
    def in_place_of(cls, layer: nn.Module) -> "LowRankLinear | None":
        """The same as a layer of PEFT, for inference; `None` where it is more than two matrices."""
        base, names = layer.base_layer, layer.active_adapters
        if type(base) is not nn.Linear or len(names) != 1 or layer.lora_variant or layer.merged:
            return None
        if layer.lora_B[names[0]].bias is not None:
            return None
        base.__class__ = cls
        base.lora_A, base.lora_B = layer.lora_A, layer.lora_B  # under PEFT's names
        base.adapter, base.scaling = names[0], layer.scaling[names[0]]
        return base

    def without(self) -> nn.Linear:
        """The layer as it was."""
        del self.lora_A, self.lora_B, self.adapter, self.scaling
        self.__class__ = nn.Linear
        return self


def _as_far(
    x: Float[Tensor, "B T n"], factor: Float[Tensor, "#B #T"] | float
) -> Float[Tensor, "B T n"]:
    """`x` as far as matrices act on each token."""
    if isinstance(factor, float):
        return x * factor
    if x.ndim != 3 or factor.shape[1] not in (1, x.shape[1]):
        raise UserError(
            f"matrices get tokens of shape {tuple(x.shape[:-1])}, and how far they act is known "
            f"for {tuple(factor.shape)}: layers that see a choice of the tokens, such as experts, "
            "cannot tell sequences apart; leave them out of target_modules"
        )
    factor = factor if factor.dtype == x.dtype else factor.to(x.dtype)
    return x * factor[..., None]


class AfterEviction:
    """Lets the LoRA of a model act on tokens that are read after an eviction.

    What they add to a layer's output is multiplied by a strength between 0 and 1: twice the share
    of the sequence's tokens that is evicted before the call, on average over the layers. Padding,
    which is evicted first, does not count. In a call without a cache the strength is 0, except
    within `simulate_chunks`.

    The strength belongs to the forward pass. A layer that is computed again in a backward pass,
    when no forward pass is under way, takes that of the newest pass that recorded gradients.

    Arguments:
        model: converted, with layers of PEFT's LoRA inside.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._newest: Strength | None = None
        self._handles = [model.base_model.register_forward_pre_hook(self._begin)]
        for layer in _low_rank_layers(model).values():
            if isinstance(layer, LowRankLinear):
                continue
            self._handles += [x.register_forward_hook(self._apply) for x in layer.lora_B.values()]

    @contextmanager
    def simulate_chunks(self, calls: Calls | None) -> Iterator[None]:
        """Within it sequences without a cache stand for such calls."""
        outer, self.calls = self.calls, calls
        try:
            yield
        finally:
            self.calls = outer

    @property
    def calls(self) -> Calls | None:
        """The calls that a sequence without a cache stands for in this thread, if any evicts."""
        return _simulated().get(id(self))

    @calls.setter
    def calls(self, calls: Calls | None) -> None:
        if calls is None:
            _simulated().pop(id(self), None)
        else:
            _simulated()[id(self)] = calls

    def remove(self, model: PreTrainedModel) -> None:
        """Take the matrices out of the model."""
        for handle in self._handles:
            handle.remove()
        for name, layer in _low_rank_layers(model).items():
            own = isinstance(layer, LowRankLinear)
            model.set_submodule(name, layer.without() if own else layer.base_layer)

    def _begin(self, module: nn.Module, args: tuple) -> None:
        """Before a call of the model, after its cache and its documents have been read."""
        call = forward_pass()
        mask, cache = call.sources[0], call.sources[2]
        factor = None
        if getattr(_thread, "rest", False):
            pass
        elif cache is not None:
            factor = strength_after(cache, None if call.unpadded else mask)
        elif self.calls is not None:
            tokens = call.positions if call.token_ids is None else call.token_ids
            real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
            factor = self.calls.strengths(real, call.documents)
        call.strength = Strength(factor)
        if torch.is_grad_enabled():
            self._newest = call.strength

    def _apply(
        self, module: nn.Module, args: tuple, output: Float[Tensor, "B T n"]
    ) -> Float[Tensor, "B T n"]:
        """Scale LoRA's addition to a layer's output by the strength at each token."""
        strength = forward_pass().strength or self._newest
        if strength is None or strength.factor is None:
            return torch.zeros_like(output)
        return _as_far(output, strength.factor)


def strength_after(
    cache: Cache, mask: Real[Tensor, "B n"] | None
) -> Float[Tensor, "B 1"] | float | None:
    """LoRA strength in the next call, by the real tokens that budgets have evicted.

    Arguments:
        cache: before a call.
        mask: which tokens are real, those of the call included; `None` where all are.

    Returns:
        Of each sequence, or of all alike; `None` where nothing is evicted.
    """
    layers = [x for x in getattr(cache, "layers", ()) if isinstance(x, _LAYERS)]
    total = layers[0].counters.total if layers else 0
    if not any(x.length < total for x in layers if x.budget is not None):
        return None
    if mask is None or mask.shape[1] < total:  # which attention refuses
        cached = [total if x.budget is None else x.count_cached(None) for x in layers]
        return float(min(1, 2 * sum(total - x for x in cached) / (total * len(cached))))
    real = mask[:, :total].bool()
    count = real.sum(1, keepdim=True)
    cached = [count if x.budget is None else x.count_cached(real) for x in layers]
    return _strength(count, cached)


def _strength(
    count: Int[Tensor, "#B n"], cached: Sequence[Real[Tensor, "#B n"]]
) -> Float[Tensor, "#B n"]:
    """Twice the share of so many tokens that layers no longer cache, at most 1."""
    whole = count.clamp(min=1).double()  # as Python's numbers
    share = sum((count - x) / whole for x in cached) / len(cached)
    return (2 * share).clamp(max=1)


def calls_of(cache: Cache, first: int, later: int) -> Calls | None:
    """The calls of so many tokens each with an empty cache; `None` where it evicts nothing.

    Raises:
        ValueError: what it evicts depends on more than how many tokens have come.
    """
    budgets = [x.budget for x in cache.layers if isinstance(x, _LAYERS)]
    for policy in (budget.policy for budget in budgets if budget is not None):
        if policy.keep_prompt:
            raise UserError(
                f"eviction: {type(policy).__name__} evicts not by the number of tokens alone, and "
                "this model's matrices act after the first eviction: measure with steps through a "
                "cache (heedful.new_cache), or with another policy"
            )
    tokens = tuple(None if x is None else x.tokens for x in budgets)
    return Calls(tokens, first, later) if any(budgets) else None


def replace_layers_of_peft(model: nn.Module) -> None:
    """Put short layers of our own in place of PEFT's, where these are two matrices each.

    One decoded token passes some hundred of them.
    """
    for name, layer in _low_rank_layers(model).items():
        if (own := LowRankLinear.in_place_of(layer)) is not None:
            model.set_submodule(name, own)


def _low_rank_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of PEFT's LoRA by name."""
    return {name: x for name, x in model.named_modules() if hasattr(x, "lora_B")}
