"""Cache layers of encoder-decoders: for cross-attention, and for biases of earlier queries.

The keys and values of a source never change, so that cross-attention's part has them once, and
beside them the last query rows, where a convolution over queries reads them. A family that adds a
bias to its logits (T5) hands over that of the new queries only: that of the kept rows is kept.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.checks import UserError
from heedful.eviction.policy import Budget
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.layer import QUERIES, LayerCache
from heedful.hf.cache.rows import PastRows
from heedful.hf.cache.streams import KEYS, VALUES
from heedful.hf.intercept import run_layer
from heedful.nn import Layer, LayerInputs
from heedful.ops import Queries, Visibility
from heedful.ops.common.few import is_step


def of_source(visibility: Visibility, target: Bool[Tensor, "B n"] | None, rows: int) -> Visibility:
    """Visibility of a source's tokens to the last `rows` tokens of a target.

    Arguments:
        visibility: that of the source, without causal order.
        target: real tokens of the target so far; `None` if all are.
        rows: how many queries there are.
    """
    if visibility.plain and target is None:
        return visibility
    padding = None if target is None else target[:, -rows:]
    return replace(visibility, queries=Queries(padding=padding))


class CrossLayerCache(AttentionCache):
    """The source of one cross-attention layer, and query rows of the target.

    Arguments:
        layer: the layer that it belongs to.
        meter: counts the whole cache's bytes; `None` makes one.
    """

    def __init__(self, layer: Layer, meter: Meter | None = None) -> None:
        self._past = layer.tails.get(QUERIES, 0)
        super().__init__(layer, meter)

    def _clear(self) -> None:
        super()._clear()
        self._tails[QUERIES] = PastRows(self._past)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The source alone: queries add no keys."""
        return self.length, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Take the keys and values of a source, `[B, Hk, n, D]`, once; returns them."""
        if self.is_initialized:
            raise UserError(
                "the cache has the keys of a source already, and cross-attention was called with "
                "another's; call its reset(), or make one with heedful.new_cache(model)"
            )
        self._begin_update(key_states, kwargs)
        for name, x in ((KEYS, key_states), (VALUES, value_states)):
            self._streams[name].append(x.contiguous(), limit=0)
        self.counters.add(key_states.shape[2])
        self.counters.pending = 0  # a source is not a part of the text that goes on
        self._measure()
        return self.keys, self.values

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B heads Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility,
        target: Bool[Tensor, "B n"] | None,
        scale: float | None,
        inputs: LayerInputs,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the new queries, after the kept ones; arguments as of a layer.

        `visibility` is the source's, `target` as for `of_source`.
        """
        if inputs.bias is not None and self._past:
            raise UserError(
                f"{type(layer).__name__} needs earlier query rows, and this family adds a bias to "
                "the logits of its cross-attention, which is kept for none; use_cache=False"
            )
        rows = self._tails[QUERIES].add(q, keep_all=self.record_past) if self._past else q
        visibility = of_source(visibility, target, rows.shape[2])
        if is_step(rows, k):
            inputs = inputs._replace(new=q.shape[2])
        options = {"visibility": visibility, "scale": scale, "inputs": inputs}
        out = run_layer(layer, rows, k, v, **options).output
        if self._past:
            self._measure()
        return out[:, :, -q.shape[2] :]

    def _undoable(self) -> float:
        """Of the target's tokens: all, as nothing of them is cached but query rows."""
        return float("inf") if self.record_past or not self._past else 0

    def _take_back(self, count: int) -> None:
        self._tails[QUERIES].drop_last(count)
        self._tails[QUERIES].trim()

    def offload(self) -> None:
        """Stays: a family reads the keys of a source without asking for them."""

    prefetch = offload


class BiasedLayerCache(LayerCache):
    """The tokens of a self-attention layer, in a family that adds a bias to its logits.

    The family counts keys from the sequence's first one, so that none is dropped.

    Arguments:
        layer, sliding, meter, int8: as of any layer's cache.
        budget: refused.
    """

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        budget: Budget | None = None,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        if budget is not None:
            raise UserError(
                f"{type(budget.policy).__name__} does not support this family, which adds a "
                "position bias for every key of the sequence in order; use "
                "heedful.new_cache(model, eviction=False)"
            )
        super().__init__(layer, sliding, meter=meter, int8=int8)
        self.window = self._room = None

    def _clear(self) -> None:
        super()._clear()
        self._bias: Float[Tensor, "#B H r n"] | None = None

    def attend(
        self, layer: Layer, q: Tensor, k: Tensor, v: Tensor, *, inputs: LayerInputs, **options
    ):
        """As of any family, with the bias of the kept query rows before that of the new ones."""
        bias = inputs.bias
        if self._past and bias is not None:
            if self._bias is not None:  # later keys, which a kept row does not see, get zeros
                bias = torch.cat([pad(self._bias, (0, q.shape[2])), bias], dim=2)
            rows = self._tails[QUERIES].rows
            past = 0 if rows is None else min(self._past, rows.shape[2])
            first = bias.shape[2] - past - q.shape[2]
            inputs = inputs._replace(bias=bias[:, :, first:])
        out = super().attend(layer, q, k, v, inputs=inputs, **options)
        if self._past and bias is not None:
            self._keep(bias)
            self._measure()
        return out

    def _take_back(self, count: int) -> None:
        super()._take_back(count)
        if self._bias is not None:
            rows, keys = (max(0, n - count) for n in self._bias.shape[2:])
            self._keep(self._bias[:, :, :rows, :keys])

    def _keep(self, bias: Float[Tensor, "#B H r n"]) -> None:
        """Keep what belongs to the query rows that are kept."""
        rows = self._tails[QUERIES].rows
        count = 0 if rows is None else rows.shape[2]
        self._bias = bias[:, :, bias.shape[2] - count :].detach().clone()

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._map_tensors(change)
        if self._bias is not None and len(self._bias) > 1:  # one sequence's serves any batch
            self._bias = change(self._bias)

    def _tensors(self) -> list[Tensor | None]:
        return [*super()._tensors(), self._bias]
