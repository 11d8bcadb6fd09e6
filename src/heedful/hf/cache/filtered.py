"""The cache of a layer that filters keys along the tokens.

Where no token leaves it, it keeps keys as they are. Under a budget or in a window it keeps filtered
keys, which hold what their neighbours give them, so that any of these may leave. Of the newest
tokens, whose filtered keys still change, it keeps keys and queries as they are as well; these
tokens stay, and stay the last ones in order.
"""

from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction import CachedTokens, selection
from heedful.hf.cache.budget import Budget
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.rows import PastRows
from heedful.hf.cache.undo import LastCall
from heedful.nn import Layer, LayerInputs
from heedful.ops import Visibility
from heedful.ops.mta.filtered import Newest


class FilteredKeysCache(LayerCache):
    """The tokens of one attention layer with `past_keys`; arguments as of `LayerCache`."""

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        budget: Budget | None = None,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        self._past_of_layer = layer.past_queries, layer.past_keys
        self._newest_keys, self._ahead = layer.newest_keys, layer.keys_ahead
        super().__init__(layer, sliding, budget, meter, int8)
        self._filters = self.budget is not None or self.window is not None
        self._past_queries = 0  # earlier rows are not computed again

    def _clear(self) -> None:
        super()._clear()
        queries, keys = self._past_of_layer
        self._past, self._plain = PastRows(queries), PastRows(keys)
        self._segments: Tensor | None = None  # of all tokens, until `attend`
        # From `update` until `attend`: the newest keys as they are, and all that are filtered.
        self._called: tuple[Tensor, Tensor | None, Tensor] | None = None

    @property
    def _rows(self) -> list[PastRows]:
        return [*super()._rows, self._past, self._plain]

    def _tensors_aside(self) -> list[Tensor | None]:
        return [*super()._tensors_aside(), self._past.rows, self._plain.rows]

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of the model's own keys and values in bfloat16, if no token were evicted."""
        if self._plain.rows is None:
            return 0
        per_token = self._plain.rows[:, :, 0].numel() + self._tokens.values.token_numbers
        return 2 * per_token * self._whole_length

    def expect(self, visibility: Visibility | None) -> None:
        self._segments = None if visibility is None else visibility.segments()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns these keys, and the values of all."""
        self._check_batch(len(key_states))
        new, again = key_states.shape[2], min(self._ahead, self.length)
        near, segments = self._plain.add(key_states, keep_all=self.record_past), self._segments
        if segments is not None:
            segments = segments[:, -near.shape[2] :]
        stored = key_states
        if self._filters:
            filtered = self._owner.layer().cached_keys(near, segments)
            if again:
                self._tokens.keys.drop_last(again)
                if self._tokens.keys.append(filtered[:, :, -new - again : -new], self._room):
                    self._measure()
            stored = filtered[:, :, -new:]
        keys, values = super().update(stored, value_states, *args, **kwargs)
        self._returned, self._called = (key_states, values), (near, segments, keys)
        return self._returned

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B heads Tq D"],
        k: Float[Tensor, "B Hk Tq D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility,
        scale: float | None,
        inputs: LayerInputs,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the tokens of the last `update`; arguments as of `LayerCache`."""
        returned, self._returned = self._returned, None
        if returned is not None and (k is not returned[0] or v is not returned[1]):
            raise UserError(
                f"{type(layer).__name__}: this family changes keys or values after the cache has "
                "returned them, which a cache of filtered keys does not see; call the model with "
                "use_cache=False"
            )
        (near, segments, keys), self._called, self._segments = self._called, None, None
        rows = self._past.add(q, keep_all=self.record_past)
        if self.counters.total > q.shape[2]:
            newest = Newest(rows, near, segments, not self._filters)
            k, inputs = keys, inputs._replace(newest=newest)
        return super().attend(layer, q, k, v, visibility=visibility, scale=scale, inputs=inputs)

    def _candidates(self, call: LastCall) -> tuple[CachedTokens, selection.KeepRules]:
        cached, rules = super()._candidates(call)
        return cached, rules._replace(newest=self._newest_keys)

    def _undoable(self) -> int:
        return 0 if self._undo is None else min(self._undo.tokens, self.length)
