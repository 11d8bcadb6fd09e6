"""Whole sequences through a model as it is, as they would come out step by step under a budget.

The attention function of each module gets the queries, keys and values of the sequence at once and
takes them through a cache's layer in pieces; everything else is computed once.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.hf.evicting.hook import columns, selector_rows
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.evicting.masking import SelectorRows
from heedful.hf.evicting.observing import AttentionCall, ObservedConfig, forget, observe

_thread = threading.local()

Sizes = Callable[[EvictingLayer, int], Iterator[tuple[int, int]]]
"""From a layer and a sequence's length: where each call begins and ends."""


class Steps(NamedTuple):
    """In place of a call of an attention function: the same in pieces, through a cache's layer.

    layer: makes an empty one.
    sizes: the pieces.
    done: is told of the layer afterwards, and of the number of sequences.
    """

    layer: Callable[[], EvictingLayer]
    sizes: Sizes
    done: Callable[[EvictingLayer, int], None]

    def __call__(
        self,
        rows: SelectorRows | None,
        function: Callable,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *args: object,
        **options: object,
    ) -> tuple[Tensor, None]:
        """The outputs of all pieces.

        Arguments:
            rows: of the selectors beside the module, if any.
            function: the family's attention.
            module, query, key, value, mask, args, options: what it was called with.
        """
        total = query.shape[2]
        if key.shape[2] != total:
            raise UserError(
                "evicting computes whole sequences: call the model with use_cache=False and "
                "without a cache"
            )
        layer, outputs = self.layer(), []
        for start, stop in self.sizes(layer, total):
            if rows is not None and layer.map.mask_sums is not None:
                layer.rows = SelectorRows(*(x[:, start:stop] for x in rows))
            part = _part(mask, start, stop, query)
            part = None if part is None else columns(part, layer)
            new = (x[:, :, start:stop] for x in (query, key, value))
            q, k, v = new
            k, v = layer.update(k, v)
            output = function(module, q, k, v, part, *args, **options)[0]
            if layer.map.observes:
                terms = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
                layer.observe(AttentionCall(q, k, v, part, *terms, output))
            outputs.append(output)
        self.done(layer, len(query))
        return torch.cat(outputs, dim=1), None


def _part(mask: Tensor | None, start: int, stop: int, query: Tensor) -> Tensor | None:
    """The mask of some queries and all tokens before them; `None` where the family needs none."""
    if mask is not None:
        return mask[..., start:stop, :stop]
    if start == 0 or stop - start == 1:
        return None
    seen = torch.ones(stop - start, stop, dtype=torch.bool, device=query.device).tril(start)
    return seen.expand(len(query), 1, -1, -1)


@contextmanager
def in_steps(steps: dict[nn.Module, Steps]) -> Iterator[None]:
    """Within it, in this thread, attention modules of an unconverted model go through caches.

    Raises:
        ValueError: the attention implementation cannot be followed, or this goes on already.
    """
    own = {id(module): x for module, x in steps.items()}
    outer = getattr(_thread, "steps", {})
    if own.keys() & outer.keys():
        raise UserError("model is evicting already; leave the outer `evicting` first")
    plain = [x for x in steps if not isinstance(x.config, ObservedConfig)]
    handles = []
    try:
        for module in steps:
            observe(module)
            handles.append(module.register_forward_pre_hook(_hand_over, with_kwargs=True))
        _thread.steps = outer | own
        yield
    finally:
        _thread.steps = outer
        for handle in handles:
            handle.remove()
        for module in plain:
            forget(module)


def _hand_over(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The forward pre-hook of an attention module: its attention function gets the steps."""
    steps = getattr(_thread, "steps", {}).get(id(module))
    if steps is None or "heedful_steps" in kwargs:
        return None
    rows = selector_rows(module, args[0] if args else kwargs["hidden_states"])
    return args, kwargs | {"heedful_steps": partial(steps, rows)}
