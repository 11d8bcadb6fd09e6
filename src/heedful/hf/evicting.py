"""Whole rows as they would come out token by token under a budget.

A forward pass of all tokens at once computes projections, MLPs and the vocabulary for the whole
row; only attention goes token by token, through a real part of a cache. That is several times
faster than as many calls of the model, and gives the same numbers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

from heedful.hf.cache import attention_modules
from heedful.hf.cached_layer import LayerCache
from heedful.hf.eviction import Eviction
from heedful.nn import Given, Layer, LayerOutput
from heedful.ops import Visibility


@contextmanager
def evicting(
    model: nn.Module, eviction: Eviction | None, whole: int = 1, step: int = 1
) -> Iterator[None]:
    """Within it, calls without a cache compute what steps with a cache would.

    Arguments:
        model: a converted model, in eval mode.
        eviction: what the cache lets go; `None` computes whole rows as usual.
        whole: how many tokens of a row, at least one, come in one call at first: a prompt.
        step: how many tokens come in each call after that.

    Raises:
        ValueError: the policy cannot serve the model.
    """
    modules = attention_modules(model)
    if eviction is None:
        yield
        return
    hooks = []
    for module, tokens in zip(modules, eviction.budgets(len(modules)), strict=True):
        layer = module.heedful
        LayerCache(layer, None, eviction, tokens)  # raises where the policy cannot serve
        route = _Route(layer, eviction, tokens, whole, step)
        layer.forward, before = route, layer.forward
        hooks.append((layer, before))
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, _ in hooks:
            del layer.forward


class _Route:
    """In place of a layer's forward: token by token."""

    def __init__(
        self, layer: Layer, eviction: Eviction, tokens: int | None, whole: int, step: int
    ) -> None:
        self.layer, self.eviction, self.tokens = layer, eviction, tokens
        self.whole, self.step, self.inside = whole, step, False

    def __call__(
        self,
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B Hk T D"],
        v: Float[Tensor, "B Hk T D"],
        *,
        visibility: Visibility | None = None,
        scale: float | None = None,
        given: Given,
    ) -> LayerOutput:
        forward = type(self.layer).forward
        if self.inside or self.tokens is None:
            return forward(self.layer, q, k, v, visibility=visibility, scale=scale, given=given)
        visibility = Visibility() if visibility is None else visibility
        window = visibility.window
        held = LayerCache(self.layer, window, self.eviction, self.tokens)
        total, outputs, self.inside = q.shape[2], [], True
        try:
            start = 0
            while start < total:
                stop = min(total, start + (self.whole if start == 0 else self.step))
                keys, values = held.update(k[:, :, start:stop], v[:, :, start:stop])
                outputs.append(
                    held.attend(
                        self.layer,
                        q[:, :, start:stop],
                        keys,
                        values,
                        visibility=visibility.part(0, stop),
                        scale=scale,
                        given=given.before(total - stop, stop - start),
                    )
                )
                start = stop
        finally:
            self.inside = False
        return LayerOutput(torch.cat(outputs, dim=2))
