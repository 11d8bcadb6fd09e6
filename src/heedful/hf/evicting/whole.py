"""Whole sequences through a model as it is, as they would come out step by step under a budget.

The attention function of each module gets the queries, keys and values of the sequence at once and
takes them through a cache's layer in pieces; everything else is computed once.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.hf.evicting.hook import columns, selector_rows
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.evicting.masking import SelectorRows
from heedful.hf.evicting.observing import AttentionCall, ObservedConfig, forget, observe

_thread = threading.local()


def in_pieces(
    layer: EvictingLayer,
    pieces: Iterator[tuple[int, int]],
    rows: SelectorRows | None,
    function: Callable,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *args: object,
    **options: object,
) -> Tensor:
    """The outputs `[B, T, H, Dv]` of a sequence's attention in pieces, through a cache's layer.

    Arguments:
        layer: an empty one.
        pieces: where each begins and ends.
        rows: of the selectors beside the module, if any.
        function: the family's attention.
        module, query, key, value, mask, args, options: its arguments.
    """
    if key.shape[2] != query.shape[2]:
        raise UserError(
            "evicting computes whole sequences: call the model with use_cache=False and without a "
            "cache"
        )
    outputs = []
    for start, stop in pieces:
        if rows is not None and layer.map.mask_sums is not None:
            layer.rows = SelectorRows(*(x[:, start:stop] for x in rows))
        part = _part(mask, start, stop, query)
        part = None if part is None else columns(part, layer)
        q, k, v = (x[:, :, start:stop] for x in (query, key, value))
        k, v = layer.update(k, v)
        output = function(module, q, k, v, part, *args, **options)[0]
        if layer.map.observes:
            terms = (options.get(name) for name in ("scaling", "softcap", "s_aux"))
            layer.observe(AttentionCall(q, k, v, part, *terms, output))
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _part(mask: Tensor | None, start: int, stop: int, query: Tensor) -> Tensor | None:
    """The mask of some queries and all tokens before them; `None` where the family needs none."""
    if mask is not None:
        return mask[..., start:stop, :stop]
    if start == 0 or stop - start == 1:
        return None
    seen = torch.ones(stop - start, stop, dtype=torch.bool, device=query.device).tril(start)
    return seen.expand(len(query), 1, -1, -1)


@contextmanager
def in_steps(steps: Mapping[nn.Module, Callable]) -> Iterator[None]:
    """Within it, in this thread, functions stand in place of attention functions.

    Arguments:
        steps: of attention modules of an unconverted model. Each gets the selectors' rows, the
            attention function and its arguments, and returns what that returns.

    Raises:
        ValueError: a module calls its attention in another way, or this goes on already.
    """
    own = {id(module): step for module, step in steps.items()}
    outer = getattr(_thread, "steps", {})
    if own.keys() & outer.keys():
        raise UserError("model is evicting already; leave the outer `evicting` first")
    plain = [x for x in steps if not isinstance(x.config, ObservedConfig)]
    handles = []
    try:
        for module in steps:
            observe(module)
            handles.append(module.register_forward_pre_hook(_hand_over, with_kwargs=True))
            handles.append(module.register_forward_hook(_check_taken))
        _thread.steps, _thread.waiting = outer | own, set()
        yield
    finally:
        _thread.steps = outer
        for handle in handles:
            handle.remove()
        for module in plain:
            forget(module)


def _hand_over(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """The forward pre-hook of an attention module: what stands for its attention function."""
    step = getattr(_thread, "steps", {}).get(id(module))
    if step is None or "heedful_steps" in kwargs:
        return None
    rows = selector_rows(module, args[0] if args else kwargs["hidden_states"])
    _thread.waiting.add(id(module))
    return args, kwargs | {"heedful_steps": partial(_take, id(module), step, rows)}


def _take(module: int, step: Callable, rows: SelectorRows | None, *args, **options) -> tuple:
    _thread.waiting.discard(module)
    return step(rows, *args, **options)


def _check_taken(module: nn.Module, args: tuple, output: object) -> None:
    """The forward hook of an attention module: raises where its attention was its own."""
    if id(module) in getattr(_thread, "waiting", ()):
        _thread.waiting.discard(id(module))
        raise UserError(
            f"model: {type(module).__name__} does not call its attention through transformers' "
            "AttentionInterface, so that nothing would be evicted; heedful.convert(model, "
            "'standard') may support it"
        )
