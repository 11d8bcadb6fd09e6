"""Whole sequences as they would come out token by token under a budget.

A forward pass of all tokens at once computes projections, MLPs and the vocabulary for the whole
sequence; only attention goes token by token, through a real layer's cache, and that only from where
the budget is full. It is several times faster than as many calls of the model, and gives the same
numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from heedful.checks import UserError, is_whole
from heedful.eviction import Eviction
from heedful.eviction.policy import Budget, layer_budgets
from heedful.hf.adapters import converted_inside
from heedful.hf.after_eviction import calls_of
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.int8 import is_int8
from heedful.hf.cache.new import new_cache, unconverted_placements
from heedful.hf.cache.places import cache_for
from heedful.hf.evicting.masking import SelectorRows
from heedful.hf.evicting.new import evicting_layers
from heedful.hf.evicting.whole import in_pieces, in_steps
from heedful.hf.family.modules import attention_modules
from heedful.hf.intercept import LayerCall, intercept, interceptors
from heedful.nn import Layer, LayerOutput
from heedful.ops import Visibility


class Peaks:
    """The most bytes that a cache would have taken for one sequence, layer by layer."""

    def __init__(self) -> None:
        self._cached: dict[nn.Module, float] = {}
        self._copied: dict[nn.Module, float] = {}

    def note(self, layer: nn.Module, meter: Meter, batch: int) -> None:
        """Record the memory of the layer's cache for so many sequences."""
        cached = meter.max_nbytes / batch
        copied = (meter.peak_nbytes - meter.max_nbytes) / batch
        self._cached[layer] = max(cached, self._cached.get(layer, 0.0))
        self._copied[layer] = max(copied, self._copied.get(layer, 0.0))

    @property
    def nbytes(self) -> float:
        """Bytes of all layers together, and of a copy that one of them makes."""
        return sum(self._cached.values()) + max(self._copied.values(), default=0.0)


class Pieces(NamedTuple):
    """Number of a sequence's tokens in a call: in the first, and in each later one."""

    first: int
    later: int

    def of(
        self, total: int, budget: Budget | None, window: int | None
    ) -> Iterator[tuple[int, int]]:
        """Begin and end of each call of a sequence of so many tokens, for a layer.

        In the first come also all pieces in which nothing is evicted. Not where a window drops
        tokens, nor where the policy depends on what a call was: the prompt, or one step (SnapKV's
        queries).
        """
        first = self.first
        if budget is None:
            first = total if window is None else self.first
        else:
            policy = budget.policy
            by_call = window is not None or policy.keep_prompt
            if not by_call and policy.observes in (0, 1, None):
                first += max(0, budget.tokens - 1 - first) // self.later * self.later
        start = 0
        while start < total:
            stop = min(total, start + (self.later if start else first))
            yield start, stop
            start = stop


@contextmanager
def evicting(
    model: nn.Module,
    eviction: Eviction | None,
    whole: int = 1,
    step: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[Peaks]:
    """A context in which calls without a cache compute what steps with an evicting cache would.

    For measuring: no gradients are recorded, and no state or memory is reported.

    Arguments:
        model: a decoder, in eval mode: converted, or of transformers as it is, with selectors
            beside it or not.
        eviction: what the cache evicts; `None` computes whole sequences as usual.
        whole: how many tokens of a sequence, at least one, come in one call at first: a prompt.
        step: how many tokens come in each call after that.
        dtype: of the cache, as for `heedful.new_cache`.

    Returns:
        The layers' peaks of memory, which grow with the calls; where whole sequences are computed
        as usual, there are none.

    Raises:
        ValueError: the policy or the dtype does not support the model.
    """
    modules, peaks = attention_modules(model), Peaks()
    for name, value in (("whole", whole), ("step", step)):
        if not is_whole(value, 1):
            raise UserError(f"{name} must be a whole number of at least 1, got {value!r}")
    int8 = is_int8(dtype)
    if eviction is None and not int8:
        yield peaks
        return
    pieces, acting = Pieces(whole, step), _matrices_acting(model, eviction, whole, step)
    if not modules or not modules[0].heedful.host.attends:
        placements = unconverted_placements(model, eviction)
        each = zip(placements, layer_budgets(eviction, len(placements)), strict=True)
        steps = {
            module: _Steps(module, budget, window, int8, pieces, peaks)
            for (module, window), budget in each
            if budget is not None or int8
        }
        with torch.no_grad(), acting, in_steps(steps):
            yield peaks
        return
    if any(
        isinstance(x.around, _Routes) and modules[0].heedful in x.layers for x in interceptors()
    ):
        raise UserError("model is evicting already; leave the outer `evicting` first")
    routes = {}
    for module, budget in zip(modules, layer_budgets(eviction, len(modules)), strict=True):
        if budget is not None or int8:
            cache_for(module, None, budget, int8=int8)  # raises if it is not supported
            routes[module.heedful] = _Route(module, budget, int8, pieces, peaks)
    reads_positions = eviction is not None and "positions" in eviction.needs
    needs = frozenset({"positions"} if reads_positions else ())
    with torch.no_grad(), acting, intercept(model, _Routes(routes), needs):
        yield peaks


def _matrices_acting(
    model: nn.Module, eviction: Eviction | None, whole: int, step: int
) -> AbstractContextManager:
    """A context in which matrices that act after an eviction act where they would."""
    model = converted_inside(model)
    matrices = getattr(getattr(model, "_heedful", None), "after_eviction", None)
    if matrices is None:
        return nullcontext()
    return matrices.simulate_chunks(calls_of(new_cache(model, eviction or False), whole, step))


class _Steps(NamedTuple):
    """In place of attention of a model as it is: the sequence in pieces, through a layer's cache.

    Arguments as of `evicting_layers`, and of `_Route`.
    """

    module: nn.Module
    budget: Budget | None
    window: int | None
    int8: bool
    pieces: Pieces
    peaks: Peaks

    def __call__(
        self, rows: SelectorRows | None, function: Callable, module: nn.Module, query: Tensor,
        *args: object, **options: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        meter = Meter()
        layer = evicting_layers([module], [self.budget], [self.window], 0, meter, self.int8)[0]
        pieces = self.pieces.of(query.shape[2], layer.budget, layer.window)
        output = in_pieces(layer, pieces, rows, function, module, query, *args, **options)
        self.peaks.note(module, meter, len(query))
        return output, None


class _Routes(NamedTuple):
    """In place of the calls of layers that evict: what steps through their caches compute."""

    by_layer: dict[Layer, "_Route"]

    def __call__(
        self, layer: Layer, call: LayerCall, compute: Callable[[LayerCall], LayerOutput]
    ) -> LayerOutput:
        return self.by_layer[layer](call) if layer in self.by_layer else compute(call)


class _Route:
    """In place of a layer's call: the sequence in pieces, through a layer's cache."""

    def __init__(
        self, module: nn.Module, budget: Budget | None, int8: bool, pieces: Pieces, peaks: Peaks
    ) -> None:
        self.module, self.layer, self.budget, self.int8 = module, module.heedful, budget, int8
        self.pieces, self.peaks = pieces, peaks

    def __call__(self, call: LayerCall) -> LayerOutput:
        q, k, v, visibility, scale, inputs = call
        total = q.shape[2]
        if k.shape[2] != total:
            raise UserError(
                "evicting computes whole sequences: call the model with use_cache=False and "
                "without a cache"
            )
        visibility = Visibility() if visibility is None else visibility
        cache = cache_for(self.module, visibility.window, self.budget, int8=self.int8)
        outputs = []
        for start, stop in self.pieces.of(total, self.budget, cache.window):
            part = visibility.part(0, stop)
            cache.expect(part)
            keys, values = cache.update(k[:, :, start:stop], v[:, :, start:stop])
            out = cache.attend(
                self.layer, q[:, :, start:stop], keys, values, visibility=part, scale=scale,
                inputs=inputs.before(total - stop, stop - start),
            )  # fmt: skip
            outputs.append(out)
        self.peaks.note(self.layer, cache.meter, len(q))
        return LayerOutput(torch.cat(outputs, dim=2))
