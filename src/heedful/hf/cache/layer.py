"""The cache of a layer that keeps tokens one by one, and what its mechanism needs beside them.

Keys and values, and beside them the streams and tails that the layer declares. Under a budget it
evicts tokens, whose slots are used for the next ones.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.checks import UserError
from heedful.eviction import CachedTokens, selection
from heedful.eviction.policy import Budget
from heedful.eviction.selection import KeepRules
from heedful.hf.cache.base import AttentionCache, check_unrecorded
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.rows import PastRows
from heedful.hf.cache.slots import SLACK, Slots
from heedful.hf.cache.streams import KEYS, POSITIONS, SCORE, VALUES, Numbers
from heedful.hf.cache.undo import UNDO_ROWS, LastCall, Undo, run_part
from heedful.hf.intercept import run_layer
from heedful.nn import Layer, LayerInputs
from heedful.ops import Visibility
from heedful.ops.common.few import is_step

QUERIES = "queries"


class LayerCache(AttentionCache):
    """The tokens of one attention layer.

    Arguments:
        layer: the layer that it belongs to.
        sliding: how far back the family's queries see; `None` for all tokens.
        budget: which tokens are evicted when; `None` keeps all that a window shows.
        meter: counts the whole cache's bytes; `None` makes one.
        int8: whether tokens are stored as int8.

    Raises:
        ValueError: the policy does not support the layer.
    """

    parts = ("_streams", "_tails", "counters", "dtype")

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        budget: Budget | None = None,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        self._layer_streams, self._running = layer.streams, layer.running
        self._takes_steps = layer.takes_steps
        # Earlier query rows that are computed again; with filtered keys none is.
        self._past = 0 if layer.tails.get("keys") else layer.tails.get("queries", 0)
        if self._past and self._running:
            raise UserError(
                f"{type(layer).__name__} has a running stream and a tail of queries: a cache would "
                "compute earlier rows again, whose state is gone; give it a tail of keys as well, "
                "with which no row is computed twice"
            )
        self._index, self._keeps_first = layer.shape.layer, layer.keeps_first
        self.window = min((w for w in (sliding, layer.window) if w is not None), default=None)
        tokens = None if budget is None else budget.tokens
        if tokens is not None and self.window is not None and self.window <= tokens:
            budget = None  # the window alone never keeps more
        if budget is not None:
            selection.check_policy(budget.policy, layer, budget.tokens)
        self.budget, self.int8 = budget, int8
        needs = () if budget is None else budget.policy.needs
        self._observes = budget is not None and budget.policy.observes != 0
        self.is_croppable, self.reads_positions = not self._observes, "positions" in needs
        self._reads_keys = "keys" in needs or "values" in needs
        # Other tensors than the buffers of tokens change their size in every call.
        self._changes = bool(any(layer.tails.values()) or self._running or self._observes or int8)
        # For how many tokens room is made ahead of them; a window's slides through some more.
        self._room = tokens if budget is not None else None
        if budget is None and self.window is not None:
            reach = self.window + self._past
            self._room = reach + max(8, reach // SLACK)
        super().__init__(layer, meter)

    def _clear(self) -> None:
        super()._clear()
        for stream in self._layer_streams:
            self._streams[stream.name] = Numbers() if stream.running else self._new_stream()
        if self.budget is not None:
            self._streams[POSITIONS] = Slots()
        if self._observes:
            self._streams[SCORE] = Numbers()
        self._numbers = [x for x in self._streams.values() if isinstance(x, Numbers)]
        self._tails[QUERIES] = PastRows(self._past)
        self._returned: tuple[Tensor, Tensor] | None = None  # by an `update`, until `attend`

    @property
    def _whole_length(self) -> int:
        total = self.counters.total
        return total if self.window is None else min(total, self.window - 1 + self._past)

    # A call: new tokens, then attention.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, `[B, Hk, T, D]`; returns those of all."""
        if (evicts := self.budget is not None) and key_states.requires_grad:
            check_unrecorded("evicts", "heedful.new_cache(model, eviction=False)")
        if self.int8 and key_states.requires_grad:
            check_unrecorded("quantizes", "a cache without dtype")
        self._begin_update(key_states, kwargs)
        new, room, streams = key_states.shape[2], self._room, self._streams
        keys, values = streams[KEYS], streams[VALUES]
        grown = keys.append(key_states, room)
        grown = values.append(value_states, room) or grown
        if evicts:
            grown = streams.place(self.counters.total, new, room) or grown
        if grown or self.int8:
            self._measure(copied=max(keys.replaced, values.replaced))
        self.counters.add(new)
        if not self._reads_keys:
            return keys.contents, values.contents
        self._returned = keys.contents, values.contents
        return self._returned

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B heads Tq D"],
        k: Float[Tensor, "B Hk Tk Dk"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility,
        scale: float | None,
        inputs: LayerInputs,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the tokens that came with the last `update`.

        Arguments:
            layer: the layer that this cache belongs to.
            q: queries of the new tokens.
            k, v: what `update` returned.
            visibility: which keys each query sees, among all tokens so far.
            scale, inputs: for the layer.
        """
        if self._returned is not None:
            returned, self._returned = self._returned, None
            name = type(self.policy).__name__
            check_unchanged(layer, returned, (k, v), name, "take a policy that reads no keys")
        of_cached = self._visibility_of_cached(visibility, self.counters.pending)
        rows, tail = q, self._tails[QUERIES]
        if self._past or (self._running and self.record_past):
            if layer.window is None and 0 < (self.window or 0) <= self.counters.total:
                tail.check_seen(layer, of_cached)
            rows = tail.add(q, keep_all=self.record_past)
        new = q.shape[2] if self._takes_steps and is_step(rows, k) else None
        inputs, grown = self._with_streams(layer, q, inputs, new)
        call = LastCall(None, of_cached, scale, inputs)
        output, before = self._run(layer, rows, k, v, call)
        if self.record_past or self.budget is not None or self.window is not None:
            inputs = inputs._replace(state=before, new=None)
            call = LastCall(q, visibility, scale, inputs, k)
            (self._record if self.record_past else self._evict)(call)
        self.counters.pending = 0
        if grown:
            self._measure()
        elif self._changes:
            self._measure_call()
        return output if rows is q else output[:, :, -q.shape[2] :]

    def _with_streams(
        self, layer: Layer, q: Tensor, inputs: LayerInputs, new: int | None
    ) -> tuple[LayerInputs, bool]:
        """The inputs with the layer's streams of all tokens, and whether a buffer has grown."""
        grown = False
        if self._layer_streams:
            rows = layer.rows(inputs)
            for name, x in rows.items():
                grown = self._streams[name].append(x.to(q.dtype), self._room) or grown
            inputs = inputs._replace(
                state=self._streams[self._running].contents if self._running else None,
                rows={name: self._streams[name].contents for name in rows} if rows else None,
                new=new,
            )
        elif new is not None:
            inputs = inputs._replace(new=new)
        if self.reads_positions:
            if inputs.positions is None:
                raise UserError(
                    f"{type(self.policy).__name__} needs the positions of the tokens: pass "
                    "inputs=LayerInputs(positions=...)"
                )
            inputs = inputs._replace(positions=inputs.positions.expand(len(q), -1))
        return inputs, grown

    def _visibility_of_cached(self, visibility: Visibility, new: int) -> Visibility:
        """Visibility among the cached tokens, from that of all, `new` ones of this call."""
        if self.budget is None:
            return visibility.last(self.length)
        if visibility.plain:
            # Every cached token is seen, and the newest ones are the last: as if all were in order.
            return visibility
        before = self.counters.total - new
        visibility = selection.check_visibility(visibility, self._owner.layer(), before)
        if visibility.plain:
            return visibility
        positions = self._streams.positions
        parts = {
            name: x.expand(len(positions), -1).gather(1, positions)
            for name in ("documents", "padding")
            if (x := getattr(visibility, name)) is not None
        }
        return replace(visibility, positions=positions, **parts)

    def _run(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall
    ) -> tuple[Float[Tensor, "B H Tr D"], Float[Tensor, "B S n"] | None]:
        """The layer's output for query rows, and the running state where undoing may begin."""
        late, outputs, before = rows, [], call.inputs.state
        if self.record_past and self._running and rows.shape[2] > UNDO_ROWS:
            early, late = rows[:, :, :-UNDO_ROWS], rows[:, :, -UNDO_ROWS:]
            result = run_part(layer, early, k, v, call, UNDO_ROWS)
            outputs, before = [result.output], result.state
            call = call._replace(inputs=call.inputs._replace(state=before))
            result = run_part(layer, late, k, v, call)
        else:
            options = {"visibility": call.visibility, "scale": call.scale, "inputs": call.inputs}
            result = run_layer(layer, rows, k, v, **options)
        if self._running:
            self._streams[self._running].contents = result.state
        output = torch.cat([*outputs, result.output], dim=2) if outputs else result.output
        return output, before

    # Eviction.

    def _evict(self, call: LastCall) -> None:
        """Drop what no window reaches any more, or what the budget has no room for."""
        streams = self._streams
        if self.budget is None:
            spare = 0 if self.window is None else self.length - (self.window - 1 + self._past)
            if spare > 0:
                streams.drop_first(spare)
        elif torch.is_grad_enabled():
            with torch.no_grad():
                self._evict(call)
        elif self._observes or self.length >= self.budget.tokens:
            cached, rules = self._candidates(call), self._rules(call.visibility)
            policy, tokens = self.budget.policy, self.budget.tokens
            score = selection.scores(policy, cached, rules.padding)
            if self._observes:
                streams[SCORE].contents = score[:, None]
            if self.length < tokens:
                return
            slots = selection.slots_to_evict(score, cached.positions, policy, tokens, rules)
            before = self._nbytes + (streams.copy_nbytes if self.int8 else 0)
            moves = selection.moves(slots, self.length, rules.newest)
            if copied := streams.move(moves, self._room):
                self._measure(most=before + copied)

    def _candidates(self, call: LastCall) -> CachedTokens:
        """All cached tokens as the policy scores them."""
        policy, visibility = self.budget.policy, call.visibility
        needs = policy.needs
        if self.int8 and (self._reads_keys or self._observes):
            self._measure(copied=self._streams[KEYS].copy_nbytes)  # of all keys, once more
        positions, read = self._streams.positions, {}
        if self._running in needs:
            read["number"] = self._streams[self._running].contents.amin(1)
        if self.reads_positions:
            read["next"] = call.inputs.positions[:, -1] + 1
        if self._reads_keys:
            real = visibility.padding
            if real is not None:
                real = real.expand(len(positions), -1).gather(1, positions)
            read |= {"real": real, "layer": self._index}
            read |= {name: getattr(self, name) for name in (KEYS, VALUES) if name in needs}
        if self._observes:
            if (last := self._streams[SCORE].contents) is not None:
                read["score"] = pad(last[:, 0], (0, self.length - last.shape[2]))
            observes, new = policy.observes, call.queries.shape[2]
            read["queries"] = queries = new if observes is None else min(observes, new)
            read["attention"] = selection.attention_received(
                self._owner.layer(), call.queries, call.keys, queries, scale=call.scale,
                inputs=call.inputs,
                visibility=self._visibility_of_cached(visibility, self.counters.pending),
            )  # fmt: skip
        return CachedTokens(positions, self.counters.total, **read)

    def _rules(self, visibility: Visibility) -> KeepRules:
        """Rules beside the policy's scores."""
        windows = tuple([x for x in (visibility.window, self.window) if x is not None])
        padding = selection.Padding.of(visibility.padding)
        counters = self.counters
        return KeepRules(counters.total, counters.prompt, self._keeps_first, windows, padding)

    # Taking calls back.

    def _record(self, call: LastCall) -> None:
        call = call._replace(inputs=call.inputs._replace(bias=None, rows=None, newest=None))
        self._undo = Undo.after(self._undo, call, self._running is not None)

    def _undoable(self) -> int:
        needs_more = self._past or self._running
        if not needs_more and self.budget is None and self.window is None:
            return self.length
        return 0 if self._undo is None else min(self._undo.tokens, self.length)

    def _take_back(self, count: int) -> None:
        undo = self._undo
        anew = self._running and undo is not None and 0 < count < undo.tokens
        layer = self._owner.for_undo(undo.tokens) if anew else None
        self._undo = None
        if count:
            self._streams.drop_last(count)
            self.counters.take_back(count)
            for rows in self._tails.values():
                rows.drop_last(count)
        if undo is None:
            return
        inputs = undo.call.inputs.before(count, undo.tokens)
        visibility = undo.call.visibility.part(0, self.counters.total)
        if count and self._running:
            self._streams[self._running].contents = undo.call.inputs.state
        if anew:
            self._state_anew(layer, undo, visibility, undo.tokens - count)
        for rows in self._tails.values():
            rows.trim()
        self._evict(undo.call._replace(visibility=visibility, inputs=inputs))

    def _state_anew(self, layer: Layer, undo: Undo, visibility: Visibility, remaining: int) -> None:
        """Compute the running state of so many recorded tokens, of which the later ones left."""
        inputs = undo.call.inputs.before(undo.tokens - remaining, remaining)
        rows = {
            x.name: self._streams[x.name].contents for x in self._layer_streams if not x.running
        }
        call = undo.call._replace(
            visibility=self._visibility_of_cached(visibility, remaining),
            inputs=inputs._replace(rows=rows or None),
        )
        queries = self._tails[QUERIES].rows[:, :, -remaining:]
        result = run_part(layer, queries, self.keys, self.values, call)
        self._streams[self._running].contents = result.state


def check_unchanged(
    layer: Layer,
    returned: tuple[Tensor, Tensor],
    given: tuple[Tensor, Tensor],
    reader: str,
    way_out: str,
) -> None:
    """Raise where a family has changed what `update` returned, which its reader does not see."""
    if any(x is not y for x, y in zip(returned, given, strict=True)):
        raise UserError(
            f"{type(layer).__name__}: this family changes keys or values after the cache has "
            f"returned them, which {reader} does not see; {way_out}"
        )
