"""Training under the budgets of a cache: the model learns to do without what is evicted.

Which tokens are evicted is settled: F says it, and has no gradient here. What is trained
is the model, usually LoRA that acts after an eviction, to read what is left as it reads
everything.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.eviction import Eviction, MostHidden
from heedful.hf import conversion_of
from heedful.hf.adapters import converted_inside
from heedful.hf.after_eviction import Calls, calls_of
from heedful.hf.cache.new import attention_modules, new_cache
from heedful.hf.intercept import LayerCall, intercept
from heedful.nn import Layer, LayerInputs
from heedful.ops.selective.reference import selection
from heedful.ops.selective.soft_eviction import cached_tokens
from heedful.training.eviction_order import CHUNK, StandardAround, after_chunks

SPREAD = (0.5, 1.5)  # factors on the budgets, of which each step draws one
_EVICTED = -1e9  # finite in every precision that is trained in


class EvictionInTraining:
    """Layers attend in training to what their caches would have, chunk by chunk.

    Within `evicting()` a query attends to its own chunk of 32 tokens, and of the tokens before it
    to those that a cache under the layer's budget still has after the chunk before; their logits
    are less F, where the layer masks, as always. Matrices that act after an eviction act in the
    chunks in which they would.

    Arguments:
        model: converted by `selective` in the layers that have a budget; PEFT may have wrapped it.
        eviction: `MostHidden`, with its tokens per layer.

    Raises:
        ValueError: another policy, or a layer with a budget that masks nothing.
    """

    def __init__(self, model: nn.Module, eviction: Eviction) -> None:
        if not isinstance(eviction, MostHidden):
            raise UserError(
                f"eviction must be MostHidden, whose order a model learns, got {eviction}; search "
                "budgets with heedful budget --eviction auto"
            )
        modules = attention_modules(model)
        self._layers: dict[Layer, int] = {}
        self._of_modules: list[Layer | None] = []  # of each module one, where it has a budget
        for module, tokens in zip(modules, eviction.budgets(len(modules)), strict=True):
            layer = module.heedful
            self._of_modules.append(None if tokens is None else layer)
            if tokens is None:
                continue
            if layer.running != "F" or not layer.reports_memory or layer.tails:
                raise UserError(
                    f"eviction gives {type(layer).__name__} {tokens} tokens: only layers of "
                    "selective attention can have a budget in training"
                )
            self._layers[layer] = tokens
        self._eviction = eviction
        self._model = converted_inside(model)
        self._matrices = conversion_of(self._model).after_eviction
        self.factor, self._is_evicting = 1.0, False

    def scale(self, factor: float) -> None:
        """Multiply all budgets by a factor from now on."""
        self.factor = factor
        if self._matrices is not None and self._is_evicting:
            self._matrices.calls = self._calls()

    def draw(self, seed: int, step: int) -> None:
        """Choose the factor for a step, the same again for the same step."""
        least, most = SPREAD
        self.scale(least * (most / least) ** random.Random(seed * 1_000_003 + step).random())

    @contextmanager
    def evicting(self) -> Iterator[None]:
        """Within it layers attend to what their caches would have."""
        matrices = self._matrices
        acting = nullcontext() if matrices is None else matrices.simulate_chunks(self._calls())
        self._is_evicting = True
        try:
            with acting, intercept(self._model, StandardAround(self._layers, self._evict)):
                yield
        finally:
            self._is_evicting = False

    def _calls(self) -> Calls | None:
        """The calls that a sequence stands for."""
        tokens = [layer and self.budget(layer) for layer in self._of_modules]
        cache = new_cache(self._model, replace(self._eviction, tokens=tuple(tokens)))
        return calls_of(cache, CHUNK, CHUNK)

    def _evict(self, layer: Layer, call: LayerCall) -> LayerInputs:
        """With `bias` among what is added to the logits."""
        return call.inputs.with_bias(self.bias(layer, call).to(call.q.dtype))

    @torch.no_grad()
    def bias(self, layer: Layer, call: LayerCall) -> Float[Tensor, "B Hs T T"]:
        """`-F`; far below every logit where the cache has evicted a token."""
        q, k, _, view, scale, inputs = call
        tokens = k.shape[2]
        dense = view.dense(tokens, tokens, q.device).expand(len(q), -1, -1)
        masking = selection(*layer.selectors(q, k, inputs), layer.config.protect_first, view, scale)
        bias = masking - masking.cumsum(2) if layer.config.masks else torch.zeros_like(masking)
        order = after_chunks(masking, dense)
        cached = cached_tokens(*order, self.budget(layer) - 1, *self._protected(layer))
        return bias.masked_fill(~_attendable(cached, tokens)[:, None], _EVICTED)

    def _protected(self, layer: Layer) -> tuple[int, int]:
        """Numbers of the first and of the newest tokens that the layer never evicts."""
        return max(self._eviction.sinks, layer.keeps_first), self._eviction.recent

    def budget(self, layer: Layer) -> int:
        """Number of tokens that the layer caches with the current factor."""
        return max(sum(self._protected(layer)) + 1, round(self._layers[layer] * self.factor))


def _attendable(cached: Bool[Tensor, "B C T"], tokens: int) -> Bool[Tensor, "B T T"]:
    """The keys that each query finds: of its own chunk all, of those before what is cached."""
    place = torch.arange(tokens, device=cached.device)
    chunk = place // CHUNK
    before = torch.cat([torch.ones_like(cached[:, :1]), cached], 1)[:, chunk]
    return before | (place >= (chunk * CHUNK)[:, None])
