"""The cache of a layer that keeps tokens one by one, and what its mechanism needs beside them.

Keys and values, and beside them what the layer declares: the last query rows (a convolution reads
them), one number per key and selector (selective attention's F), own selector keys. Under a budget
it evicts tokens, whose slots are used for the next ones.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction import CachedTokens, Eviction, selection
from heedful.hf.cache.base import AttentionCache, check_unrecorded
from heedful.hf.cache.budget import Budget, EvictionStep, scores_add_up
from heedful.hf.cache.counters import Meter, nbytes_of
from heedful.hf.cache.int8 import heads_read_together
from heedful.hf.cache.rows import PastRows
from heedful.hf.cache.slots import SLACK
from heedful.hf.cache.tokens import StoredTokens
from heedful.hf.cache.undo import UNDO_ROWS, LastCall, Undo
from heedful.hf.intercept import run_layer
from heedful.nn import Layer, LayerInputs, LayerOutput
from heedful.ops import Visibility
from heedful.ops.common.few import is_step


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

    parts = ("_tokens", "_queries", "_state", "_step", "counters", "dtype")

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        budget: Budget | None = None,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        if layer.past_queries and layer.keeps:
            raise UserError(f"{type(layer).__name__} needs both query rows and a state")
        self._past_queries = layer.past_queries
        self._stateful, self._keeps_first = layer.has_state, layer.keeps_first
        self._takes_steps, self._kept = layer.takes_steps, layer.keeps[:1]
        self._index = layer.shape.layer
        self.window = min((w for w in (sliding, layer.window) if w is not None), default=None)
        tokens = None if budget is None else budget.tokens
        if tokens is not None and self.window is not None and self.window <= tokens:
            budget = None  # the window alone never keeps more
        if budget is not None:
            selection.check_policy(budget.policy, layer, budget.tokens)
        self.budget, self.int8 = budget, int8
        self.policy: Eviction | None = None if budget is None else budget.policy
        needs = () if budget is None else self.policy.needs
        self._observes = budget is not None and self.policy.observes != 0
        self.is_croppable, self.reads_positions = not self._observes, "positions" in needs
        self._reads_rows = "keys" in needs or "values" in needs
        # Keys that other layers of the model read must be there as a whole.
        self._by_heads = int8 and layer.any_heads and layer.host.own_cache
        # Attention or the policy reads keys from here, and not what `attend` is given.
        self._reads_itself = self._by_heads or self._reads_rows
        # Other tensors than the buffers of tokens change their size in every call.
        self._changes = bool(layer.past_queries or self._stateful or self._observes or int8)
        self._room = self._room_ahead()
        super().__init__(layer, meter)

    def _clear(self) -> None:
        super()._clear()
        self._tokens = StoredTokens(self.int8)
        self._queries = PastRows(self._past_queries)
        self._state: Float[Tensor, "B S n"] | None = None
        self._step = None if self.budget is None else EvictionStep(self.budget)
        self._undo: Undo | None = None
        self._returned: tuple[Tensor, Tensor] | None = None  # by an `update`, until `attend`

    @property
    def keys(self) -> Float[Tensor, "B Hk n D"] | None:
        return self._tokens.keys.contents

    @property
    def values(self) -> Float[Tensor, "B Hk n Dv"] | None:
        return self._tokens.values.contents

    @property
    def batch(self) -> int | None:
        return self._tokens.batch

    @property
    def length(self) -> int:
        return self._tokens.length

    def activate_past_recording(self) -> None:
        if not self.is_croppable:
            raise scores_add_up(self.policy)
        super().activate_past_recording()

    def positions(self) -> Int[Tensor, "B n"]:
        if self._tokens.positions is None:
            return super().positions()
        return self._tokens.positions[:, 0].sort(1).values

    @property
    def whole_nbytes(self) -> int:
        """Bytes of all that is cached per token, if no token were evicted or quantized."""
        per_token = self._tokens.token_nbytes
        if self._state is not None and self._state.shape[2]:
            per_token += self._state[:, :, :1].numel() * self._state.element_size()
        return per_token * self._whole_length

    @property
    def bf16_nbytes(self) -> int:
        """Bytes of keys and values in bfloat16, if no token were evicted."""
        return 2 * sum(x.token_numbers for x in self._tokens.of_heads) * self._whole_length

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of the room for later tokens."""
        return self._tokens.reserve_nbytes

    @property
    def _whole_length(self) -> int:
        """Number of tokens that would be cached without eviction."""
        total = self.counters.total
        return total if self.window is None else min(total, self._reach)

    @property
    def _reach(self) -> int:
        """Number of tokens behind a window: each earlier query row has a window of its own."""
        return self.window - 1 + self._past_queries

    def _room_ahead(self) -> int | None:
        """For how many tokens room is made ahead of them; a window's slides through some more."""
        if self.budget is not None:
            return self.budget.tokens
        if self.window is None:
            return None
        reach = self._reach + 1
        return reach + max(8, reach // SLACK)

    # A call: new tokens, then attention.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, `[B, Hk, T, D]`; returns those of all.

        Where `attend` dequantizes some heads at a time, it is the codes that are returned.
        """
        if (evicts := self.budget is not None) and key_states.requires_grad:
            check_unrecorded("evicts", "heedful.new_cache(model, eviction=False)")
        if self.int8 and key_states.requires_grad:
            check_unrecorded("quantizes", "a cache without dtype")
        self._begin_update(key_states, kwargs)
        new, tokens = key_states.shape[2], self._tokens
        grown = tokens.append(key_states, value_states, self._room)
        if evicts:
            grown = tokens.place(self.counters.total, new, self._room) or grown
        if grown or self.int8:
            self._measure(copied=tokens.replaced)
        self.counters.add(new)
        if not self._reads_itself:
            return self.keys, self.values
        if self._by_heads:
            self._returned = tokens.keys.codes, tokens.values.codes
        else:
            self._returned = self.keys, self.values
        return self._returned

    def _check_unchanged(self, layer: Layer, k: Tensor, v: Tensor) -> None:
        """Raise where what attention reads is not what `update` has returned."""
        returned, self._returned = self._returned, None
        if returned is not None and (k is not returned[0] or v is not returned[1]):
            reader, way_out = self._reader
            raise UserError(
                f"{type(layer).__name__}: this family changes keys or values after the cache has "
                f"returned them, which {reader} does not see; {way_out}"
            )

    @property
    def _reader(self) -> tuple[str, str]:
        """Reader of keys and values from the cache alone, and how to avoid it, in words."""
        if self._by_heads:
            return "a quantized cache", "make it without dtype"
        return type(self.policy).__name__, "take a policy that reads no keys"

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B heads Tq D"],
        k: Float[Tensor, "B Hk Tk Dk"] | Int8[Tensor, "B Hk Tk Dk"],
        v: Float[Tensor, "B Hk Tk D"] | Int8[Tensor, "B Hk Tk D"],
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
        if self._reads_itself:
            self._check_unchanged(layer, k, v)
        grown = False
        if (extra := layer.extra_cache(inputs)) is not None:
            grown = self._tokens.append_extra(extra.to(q.dtype), self._room)
            inputs = inputs._replace(extra_cache=self._tokens.extra.contents)
        if self.reads_positions:
            if inputs.positions is None:
                raise UserError(
                    f"{type(self.policy).__name__} needs the positions of the tokens: pass "
                    "inputs=LayerInputs(positions=...)"
                )
            inputs = inputs._replace(positions=inputs.positions.expand(len(q), -1))
        of_cached = self._visibility_of_cached(visibility, self.counters.pending)
        rows = q
        if self._past_queries or (self._stateful and self.record_past):
            if layer.window is None and 0 < (self.window or 0) <= self.counters.total:
                self._queries.check_seen(layer, of_cached)
            rows = self._queries.add(q, keep_all=self.record_past)
        if self._stateful or self._takes_steps:
            new = q.shape[2] if self._takes_steps and is_step(rows, k) else None
            inputs = inputs._replace(state=self._state, new=new)
        call, before = LastCall(None, of_cached, scale, inputs), self._state
        if self.record_past and self._stateful and rows.shape[2] > UNDO_ROWS:
            output, before = self._in_two_runs(layer, rows, k, v, call)
        else:
            output, self._state = self._run(layer, rows, k, v, call)[:2]
        if self.record_past or self.budget is not None or self.window is not None:
            inputs = inputs._replace(state=before, new=None)
            call = LastCall(q, visibility, scale, inputs, None if self._by_heads else k)
            (self._record if self.record_past else self._evict)(call)
        self.counters.pending = 0
        if grown:
            self._measure()
        elif self._changes:
            self._measure_call()
        return output if rows is q else output[:, :, -q.shape[2] :]

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
        positions = self._tokens.positions[:, 0]
        parts = {
            name: x.expand(len(positions), -1).gather(1, positions)
            for name in ("documents", "padding")
            if (x := getattr(visibility, name)) is not None
        }
        return replace(visibility, positions=positions, **parts)

    def _in_two_runs(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall
    ) -> tuple[Float[Tensor, "B H Tr D"], Float[Tensor, "B S n"]]:
        """The layer's output for query rows, and the running state where undoing may begin."""
        first = rows.shape[2] - UNDO_ROWS
        early = self._run_part(layer, rows[:, :, :first], k, v, call, UNDO_ROWS)
        self._state = early.state
        late = self._run_part(layer, rows[:, :, first:], k, v, call)
        self._state = late.state
        return torch.cat([early.output, late.output], dim=2), early.state

    def _run_part(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall, later: int = 0
    ) -> LayerOutput:
        """The layer for some of the query rows, which so many later tokens follow."""
        count = self.length - later
        inputs = call.inputs.before(later, rows.shape[2])._replace(state=self._state)
        if later and inputs.extra_cache is not None:
            inputs = inputs._replace(extra_cache=inputs.extra_cache[:, :, :count])
        call = call._replace(visibility=call.visibility.part(0, count), inputs=inputs)
        return self._run(layer, rows, k, v, call, later)

    def _run(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall, later: int = 0
    ) -> LayerOutput:
        """The layer for query rows, and the tokens before so many later ones."""
        if self._by_heads:
            return self._run_by_heads(layer, rows, self.length - later, call)
        if later:
            k, v = k[:, :, : self.length - later], v[:, :, : self.length - later]
        options = {"visibility": call.visibility, "scale": call.scale, "inputs": call.inputs}
        return run_layer(layer, rows, k, v, **options)

    def _run_by_heads(self, layer: Layer, rows: Tensor, count: int, call: LastCall) -> LayerOutput:
        """The layer for query rows and the first `count` tokens, of which few heads are copied."""
        keys, values = self._tokens.keys, self._tokens.values
        group = rows.shape[1] // keys.codes.shape[1]

        def run(heads: slice) -> LayerOutput:
            k, v = keys.read(heads, slice(count)), values.read(heads, slice(count))
            self._measure(copied=k.nbytes + v.nbytes)
            own = slice(heads.start * group, heads.stop * group)
            return run_layer(
                layer, rows[:, own], k, v, visibility=call.visibility, scale=call.scale,
                inputs=call.inputs.of_heads(own),
            )  # fmt: skip

        parts = [run(heads) for heads in heads_read_together(keys.codes, values.codes)]
        return parts[0]._replace(output=torch.cat([x.output for x in parts], dim=1))

    # Eviction.

    def _evict(self, call: LastCall) -> None:
        """Drop what no window reaches any more, or what the budget has no room for."""
        if self.budget is None:
            spare = 0 if self.window is None else self.length - self._reach
            if spare > 0:
                self._tokens.drop_first(spare)
                self._state = None if self._state is None else self._state[..., spare:]
        elif torch.is_grad_enabled():
            with torch.no_grad():
                self._evict_over_budget(call)
        else:
            self._evict_over_budget(call)

    def _evict_over_budget(self, call: LastCall) -> None:
        if self._step.due(self.length) and (moves := self._step.moves(*self._candidates(call))):
            self._move(moves)

    def _candidates(self, call: LastCall) -> tuple[CachedTokens, selection.KeepRules]:
        """All cached tokens as the policy scores them, and what else decides."""
        counters, visibility, needs = self.counters, call.visibility, self.policy.needs
        if self.int8 and (self._reads_rows or self._observes):
            self._measure(copied=self._tokens.keys.copy_nbytes)  # of all keys, once more
        positions, read = self._tokens.positions[:, 0], {}
        if "F" in needs:
            read["hidden"] = self._state.amin(1)
        elif self._kept and self._kept[0] in needs:
            read["kept"] = self._state.amin(1)
        if self.reads_positions:
            read["next"] = call.inputs.positions[:, -1] + 1
        if self._reads_rows:
            real = visibility.padding
            if real is not None:
                real = real.expand(len(positions), -1).gather(1, positions)
            read |= {"real": real, "layer": self._index}
            read |= {name: getattr(self, name) for name in ("keys", "values") if name in needs}
        if self._observes:
            read["queries"] = queries = self._step.queries(call.queries.shape[2])
            read["attention"] = selection.attention_received(
                self._owner.layer(), call.queries, self.keys if call.keys is None else call.keys,
                queries, scale=call.scale, inputs=call.inputs,
                visibility=self._visibility_of_cached(visibility, counters.pending),
            )  # fmt: skip
        windows = (visibility.window, self.window)
        rules = selection.KeepRules(
            counters.total, counters.prompt, self._keeps_first,
            tuple([x for x in windows if x is not None]), selection.Padding.of(visibility.padding),
        )  # fmt: skip
        return CachedTokens(positions, counters.total, **read), rules

    def _move(self, moves: selection.Moves) -> None:
        """Fill the slots of evicted tokens."""
        before, copied = self._nbytes + self._copied, self._tokens.move(moves, self._room)
        self._state = None if self._state is None else moves.of(self._state)
        if copied:
            self._measure(most=before + copied)

    # Taking calls back.

    def _record(self, call: LastCall) -> None:
        call = call._replace(inputs=call.inputs._replace(bias=None, extra_cache=None))
        self._undo = Undo.after(self._undo, call, self._stateful)

    def _undoable(self) -> int:
        needs_more = self._past_queries or self._stateful
        if not needs_more and self.budget is None and self.window is None:
            return self.length
        return 0 if self._undo is None else min(self._undo.tokens, self.length)

    def _take_back(self, count: int) -> None:
        undo = self._undo
        anew = self._stateful and undo is not None and 0 < count < undo.tokens
        layer = self._owner.for_undo(undo.tokens) if anew else None
        self._undo = None
        if count:
            self._tokens.drop_last(count)
            self.counters.take_back(count)
            for rows in self._rows:
                rows.drop_last(count)
        if undo is None:
            return
        visibility = undo.call.visibility.part(0, self.counters.total)
        if count and self._stateful:
            self._state = undo.call.inputs.state
        if anew:
            self._state = self._state_after(layer, undo, visibility, count)
        for rows in self._rows:
            rows.trim()
        inputs = undo.call.inputs.before(count, undo.tokens)
        self._evict(undo.call._replace(visibility=visibility, inputs=inputs))

    def _state_after(
        self, layer: Layer, undo: Undo, visibility: Visibility, count: int
    ) -> Float[Tensor, "B S n"]:
        """The running state without the newest `count` recorded tokens, which are dropped."""
        remaining = undo.tokens - count
        inputs = undo.call.inputs.before(count, remaining)
        visibility = self._visibility_of_cached(visibility, remaining)
        inputs = inputs._replace(extra_cache=self._tokens.extra.contents)
        call = LastCall(None, visibility, undo.call.scale, inputs)
        rows = self._queries.rows[:, :, -remaining:]
        return self._run_part(layer, rows, self.keys, self.values, call).state

    # Batches, devices, bytes, files.

    @property
    def _rows(self) -> list[PastRows]:
        return [self._queries]

    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        self._tokens.map_batch(change)
        for rows in self._rows:
            rows.map_batch(change)
        if self._step is not None:
            self._step.map_batch(change)
        if self._state is not None:
            self._state = change(self._state)
        if self._undo is not None:
            self._undo = self._undo.map_batch(change)

    def offload(self) -> None:
        """Keys and values go to the CPU; what the mechanism keeps beside is small and stays."""
        for slots in self._tokens.of_heads:
            slots.map_batch(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        for slots in self._tokens.of_heads:
            slots.map_batch(lambda x: x.to(self.device, non_blocking=True))

    def _measure(self, *, most: int = 0, copied: int = 0) -> None:
        """As of any cache; copies of quantized tokens, which attention reads, are there as well."""
        self._aside = nbytes_of(self._tensors_aside())
        super()._measure(most=most, copied=copied + self._copied)

    def _measure_call(self) -> None:
        """As `_measure`, where the buffers of tokens are the same as before."""
        if self.int8:
            self._measure()
            return
        before, self._aside = self._aside, nbytes_of(self._tensors_aside())
        self.meter.change(self._aside - before)
        self._nbytes += self._aside - before

    @property
    def _copied(self) -> int:
        """Bytes of the copies that there are as long as a call lasts."""
        if not self.int8:
            return 0
        return (self._tokens.extra if self._by_heads else self._tokens).copy_nbytes

    def _tensors(self) -> list[Tensor | None]:
        return [*self._tokens.tensors, *self._tensors_aside()]

    def _tensors_aside(self) -> list[Tensor | None]:
        """Those beside the buffers of tokens."""
        score = None if self._step is None else self._step.score
        return [self._queries.rows, self._state, score]
