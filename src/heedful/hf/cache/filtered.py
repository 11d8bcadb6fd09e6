"""The cache of a layer that filters keys along the tokens.

Where no token leaves it, it keeps keys as they are. Under a budget or in a window it keeps filtered
keys, which hold what their neighbours give them, so that any of these may leave. Of the newest
tokens, whose filtered keys still change, it keeps keys and queries as they are as well; these
tokens stay, and stay the last ones in order.
"""

from jaxtyping import Float
from torch import Tensor

from heedful.eviction.policy import Budget
from heedful.eviction.selection import KeepRules
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.layer import LayerCache, check_unchanged
from heedful.hf.cache.rows import PastRows
from heedful.hf.cache.streams import KEYS, VALUES
from heedful.hf.cache.undo import Undo
from heedful.nn import Layer, LayerInputs
from heedful.ops import Visibility
from heedful.ops.mta.filtered import Newest

PLAIN_QUERIES, PLAIN_KEYS = "plain queries", "plain keys"


class FilteredKeysCache(LayerCache):
    """The tokens of one attention layer with a tail of keys; arguments as of `LayerCache`."""

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        budget: Budget | None = None,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        self._layer_tails = layer.tails
        self._newest_keys, self._ahead = layer.newest_keys, layer.keys_ahead
        super().__init__(layer, sliding, budget, meter, int8)
        evicts = self.budget is not None or self.window is not None
        # A running stream lets no row be computed twice, so that keys of such a layer are final.
        self._filters = evicts or self._running is not None

    def _clear(self) -> None:
        super()._clear()
        names = {PLAIN_QUERIES: "queries", PLAIN_KEYS: "keys"}
        tails = self._layer_tails
        self._tails |= {name: PastRows(tails.get(of, 0)) for name, of in names.items()}
        self._segments: Tensor | None = None  # of all tokens, until `attend`
        # From `update` until `attend`: the newest keys as they are, and all that are filtered.
        self._called: tuple[Tensor, Tensor | None, Tensor] | None = None

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of the model's own keys and values in bfloat16, if no token were evicted."""
        if (keys := self._tails[PLAIN_KEYS].rows) is None:
            return 0
        per_token = keys[:, :, 0].numel() + self._streams[VALUES].token_numbers
        return 2 * per_token * self._whole_length

    def expect(self, visibility: Visibility | None) -> None:
        self._segments = None if visibility is None else visibility.segments()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns these keys, and the values of all."""
        self._check_batch(len(key_states))
        new, again = key_states.shape[2], min(self._ahead, self.length)
        near = self._tails[PLAIN_KEYS].add(key_states, keep_all=self.record_past)
        segments, stored = self._segments, key_states
        if segments is not None:
            segments = segments[:, -near.shape[2] :]
        if self._filters:
            filtered = self._owner.layer().cached_keys(near, segments)
            if again:
                keys = self._streams[KEYS]
                keys.drop_last(again)
                if keys.append(filtered[:, :, -new - again : -new], self._room):
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
        if returned is not None:
            way_out = "call the model with use_cache=False"
            check_unchanged(layer, returned, (k, v), "a cache of filtered keys", way_out)
        (near, segments, keys), self._called, self._segments = self._called, None, None
        rows = self._tails[PLAIN_QUERIES].add(q, keep_all=self.record_past)
        # Where tokens are quantized, the first call reads what later calls read of it.
        if self.counters.total > q.shape[2] or self._running or self.int8:
            newest = Newest(rows, near, segments, not self._filters)
            k, inputs = keys, inputs._replace(newest=newest)
        return super().attend(layer, q, k, v, visibility=visibility, scale=scale, inputs=inputs)

    def _rules(self, visibility: Visibility) -> KeepRules:
        return super()._rules(visibility)._replace(newest=self._newest_keys)

    def _state_anew(self, layer: Layer, undo: Undo, visibility: Visibility, remaining: int) -> None:
        tails = (self._tails[name] for name in (PLAIN_QUERIES, PLAIN_KEYS))
        queries, keys = (x.rows[:, :, -(x.count + remaining) :] for x in tails)
        segments = visibility.segments()
        segments = None if segments is None else segments[:, -keys.shape[2] :]
        inputs = undo.call.inputs.before(undo.tokens - remaining, remaining)
        inputs = inputs._replace(newest=Newest(queries, keys, segments, not self._filters))
        undo = Undo(remaining, undo.call._replace(inputs=inputs))
        super()._state_anew(layer, undo, visibility, remaining)

    def _undoable(self) -> int:
        return 0 if self._undo is None else min(self._undo.tokens, self.length)
