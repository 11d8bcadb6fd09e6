"""Functions around the calls of a model's attention layers, for as long as a context lasts.

Measuring, training under a budget and proving a conversion all need to stand between the
integration and a layer. They do it here and nowhere else: in the thread that entered the context,
one inside the other, and without a trace in the model.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.hf.family.modules import layers_of
from heedful.nn import Layer, LayerInputs, LayerOutput
from heedful.nn.layer import NO_INPUTS
from heedful.ops import Visibility


class LayerCall(NamedTuple):
    """The arguments of one call of a layer."""

    q: Float[Tensor, "B heads Tq D"]
    k: Float[Tensor, "B Hk Tk Dk"]
    v: Float[Tensor, "B Hk Tk D"]
    visibility: Visibility | None = None
    scale: float | None = None
    inputs: LayerInputs = NO_INPUTS


Around = Callable[[Layer, LayerCall, Callable[[LayerCall], LayerOutput]], LayerOutput]
"""Computes a layer's output for a call; `compute` is the layer, or the next function around it."""


class Interceptor(NamedTuple):
    """One function around the layers of one model.

    layers: whose calls it stands around.
    around: the function.
    needs: what it needs of each call beside what the layer needs, as of `Layer.needs`.
    """

    layers: frozenset[nn.Module]
    around: Around
    needs: frozenset[str]


class _Thread(threading.local):
    """Interceptors around the layers in a thread."""

    interceptors: tuple[Interceptor, ...] = ()


_thread = _Thread()


@contextmanager
def intercept(model: nn.Module, around: Around, needs: frozenset[str] = frozenset()) -> Iterator:
    """Let `around(layer, call, compute)` stand around every call of the model's layers.

    Within it, and in this thread alone. Of several the one entered last is called first, and what
    it calls, `compute` or the layer by way of a cache, passes the earlier ones only. A layer that
    is computed again in a backward pass passes those that it passed before.

    Arguments:
        model: converted.
        around: the function.
        needs: what it needs of each call, such as `{"positions"}`.

    Raises:
        ValueError: the layers stand beside the model's attention, and nothing calls them.
    """
    layers = layers_of(model)
    if not all(layer.host.attends for layer in layers):
        raise UserError(
            "model keeps its own attention, and its selectors only rank the tokens of a cache; "
            "open it with heedful.load(..., convert=True) to train it or to see its maps"
        )
    with using((*interceptors(), Interceptor(frozenset(layers), around, needs))):
        yield


def interceptors() -> tuple[Interceptor, ...]:
    """Those of this thread, the first entered first."""
    return _thread.interceptors


@contextmanager
def using(these: tuple[Interceptor, ...]) -> Iterator[None]:
    """Within it the thread has these interceptors and no others."""
    before, _thread.interceptors = interceptors(), these
    try:
        yield
    finally:
        _thread.interceptors = before


def needs_of(layer: nn.Module) -> frozenset[str]:
    """Needs of a layer in a call, with those of the interceptors around it."""
    these = _thread.interceptors
    if not these:
        return layer.needs
    return layer.needs.union(*(x.needs for x in these if layer in x.layers))


def run_layer(
    layer: nn.Module,
    q: Float[Tensor, "B heads Tq D"],
    k: Float[Tensor, "B Hk Tk Dk"],
    v: Float[Tensor, "B Hk Tk D"],
    *,
    visibility: Visibility | None = None,
    scale: float | None = None,
    inputs: LayerInputs = NO_INPUTS,
) -> LayerOutput:
    """A layer's output, by way of the functions around it; arguments as of the layer."""
    these = _thread.interceptors
    if not these:
        return layer(q, k, v, visibility=visibility, scale=scale, inputs=inputs)
    return _compute(these, layer, LayerCall(q, k, v, visibility, scale, inputs))


def _compute(these: tuple[Interceptor, ...], layer: nn.Module, call: LayerCall) -> LayerOutput:
    """The output with the last of these interceptors in front of the layer."""
    while these and layer not in these[-1].layers:
        these = these[:-1]
    with using(these[:-1]):
        if not these:
            return layer(*call[:3], **dict(zip(LayerCall._fields[3:], call[3:], strict=True)))
        return these[-1].around(layer, call, partial(_compute, these[:-1], layer))
