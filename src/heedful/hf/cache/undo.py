"""Record of a cache's newest calls, so that `crop` can take them back."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from heedful.hf.intercept import run_layer
from heedful.nn import Layer, LayerInputs, LayerOutput
from heedful.ops import Visibility

UNDO_ROWS = 128  # tokens of the last calls that can be taken back where a state runs through them


class LastCall(NamedTuple):
    """The arguments of one call of attention.

    queries: of the new tokens; `None` once the call is recorded.
    visibility: which keys each query sees, among all tokens so far.
    scale, inputs: for the layer; `inputs.state` is the running state before these tokens.
    keys: that attention has read; `None` where the cache has them.
    """

    queries: Float[Tensor, "B H Tq D"] | None
    visibility: Visibility
    scale: float | None
    inputs: LayerInputs
    keys: Float[Tensor, "B Hk n D"] | None = None


class Undo(NamedTuple):
    """Data needed to take back the newest tokens.

    tokens: how many can be taken back.
    call: the last call, with `inputs` of all these tokens.
    """

    tokens: int
    call: LastCall

    @classmethod
    def after(cls, undo: "Undo | None", call: LastCall, stateful: bool) -> "Undo":
        """Undo data after one more call.

        Arguments:
            undo: what could be taken back before it.
            call: the new call.
            stateful: whether the layer has a running state, which is computed anew from the one
                before the recorded tokens.
        """
        new, inputs = call.queries.shape[2], call.inputs
        tokens = new + (0 if undo is None else undo.tokens)
        if undo is not None and tokens <= UNDO_ROWS:
            before = undo.call.inputs
            inputs = before.joined(inputs)._replace(state=before.state)
        elif stateful:
            tokens = min(new, UNDO_ROWS)
        return cls(tokens, call._replace(queries=None, keys=None, inputs=inputs))

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> "Undo":
        """The same for other sequences, `change` being a choice of them; what all share stays."""
        inputs, visibility = self.call.inputs, self.call.visibility
        call = self.call._replace(
            inputs=inputs._replace(**_changed(inputs._asdict(), change)),
            visibility=replace(visibility, **_changed(vars(visibility), change)),
        )
        return self._replace(call=call)


def run_part(
    layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall, later: int = 0
) -> LayerOutput:
    """The layer for some query rows of a call, which so many later tokens follow.

    Arguments:
        layer: that runs.
        rows: the queries.
        k, v: of all tokens of the call.
        call: its visibility, scale and inputs.
        later: number of tokens behind the last of the rows.
    """
    count = k.shape[2] - later
    inputs = call.inputs.before(later, rows.shape[2])
    if later and inputs.rows is not None:
        inputs = inputs._replace(rows={name: x[:, :, :count] for name, x in inputs.rows.items()})
    visibility = call.visibility.part(0, count)
    k, v = k[:, :, :count], v[:, :, :count]
    return run_layer(layer, rows, k, v, visibility=visibility, scale=call.scale, inputs=inputs)


def _changed(parts: dict[str, object], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Those parts that have an entry for each of several sequences, after the change."""
    tensors = {name: x for name, x in parts.items() if isinstance(x, Tensor) and name != "sinks"}
    return {name: change(x) for name, x in tensors.items() if len(x) > 1}
