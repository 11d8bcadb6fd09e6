"""The cache of a layer that keeps tokens one by one, and what its mechanism needs beside them.

Keys and values, and beside them what the layer declares: the last query rows (a convolution reads
them), rows from before the rotation, one number per key and selector (selective attention's F), own
selector keys. Under a budget it evicts tokens, whose slots are used for the next ones.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction import CachedTokens, Eviction, gather
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.budget import Budget, EvictionStep
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.int8 import heads_read_together
from heedful.hf.cache.owner import kind_of
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
        int8: whether tokens are kept in eight bits per number.

    Raises:
        ValueError: the policy cannot serve the layer.
    """

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
        self._past_queries, self._past_inputs = layer.past_queries, layer.past_inputs
        self._stateful, self._keeps_first = layer.has_state, layer.keeps_first
        self._index = layer.shape.layer
        self.window = min((w for w in (sliding, layer.window) if w is not None), default=None)
        tokens = None if budget is None else budget.tokens
        if isinstance(tokens, int) and self.window is not None and self.window <= tokens:
            budget = None  # the window alone never keeps more
        if budget is not None:
            gather.check_policy(budget.policy, layer, budget.tokens)
        self.budget, self._int8 = budget, int8
        # Keys that other layers of the model read must be there as a whole.
        self._by_heads = int8 and layer.any_heads and layer.host.own_cache
        super().__init__(layer, meter)

    def _clear(self) -> None:
        super()._clear()
        self._tokens = StoredTokens(self._int8)
        self._queries = PastRows(self._past_queries, dim=2)
        self._inputs: dict[str, PastRows] = {}
        self._state: Float[Tensor, "B S n"] | None = None
        self._step = None if self.budget is None else EvictionStep(self.budget)
        self._undo: Undo | None = None
        self._returned: tuple[Tensor, Tensor] | None = None  # by an `update`, until `attend`

    @property
    def policy(self) -> Eviction | None:
        return None if self.budget is None else self.budget.policy

    @property
    def reads_positions(self) -> bool:
        """Whether `attend` needs the positions of the new tokens."""
        return self.budget is not None and "positions" in self.budget.policy.needs

    @property
    def keys(self) -> Float[Tensor, "B Hk n D"] | None:
        return self._tokens.keys.contents

    @property
    def values(self) -> Float[Tensor, "B Hk n D"] | None:
        return self._tokens.values.contents

    @property
    def batch(self) -> int | None:
        return self._tokens.batch

    @property
    def length(self) -> int:
        return self._tokens.length

    @property
    def is_croppable(self) -> bool:
        return self.budget is None or self.budget.policy.observes == 0

    def activate_past_recording(self) -> None:
        if not self.is_croppable:
            raise UserError(
                f"{type(self.policy).__name__} cannot take tokens back, as assisted decoding asks: "
                "its scores add up over queries; decode without, or with another policy"
            )
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
        """How many tokens would be cached without eviction."""
        total = self.counters.total
        return total if self.window is None else min(total, self._reach)

    @property
    def _reach(self) -> int:
        """How many tokens are behind a window: a row above the newest has a window of its own."""
        return self.window - 1 + self._past_queries

    @property
    def _room(self) -> int | None:
        """For how many tokens room is made ahead of them; a window's slides through some more."""
        if self.budget is not None and self.budget.tokens is not None:
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
        recorded = torch.is_grad_enabled() and key_states.requires_grad
        if self.budget is not None and recorded:
            raise UserError(
                "the cache evicts tokens, which has no gradients: call the model under "
                "torch.no_grad(), or with heedful.new_cache(model, eviction=False)"
            )
        if self._int8 and recorded:
            raise UserError(
                "the cache quantizes tokens, which has no gradients: call the model under "
                "torch.no_grad(), or with a cache without dtype"
            )
        self._begin_update(key_states, kwargs)
        new = key_states.shape[2]
        copied = self._tokens.append(key_states, value_states, self._room)
        if self.budget is not None:
            self._tokens.place(self.counters.total, new)
        self.counters.add(new)
        self._measure(copied=copied)
        returned = self._for_attention(key_states, value_states)
        self._returned = returned if self._reads_itself else None
        return returned

    def _for_attention(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What `update` returns for new keys and values, and `attend` is given."""
        if self._by_heads:
            return self._tokens.keys.codes, self._tokens.values.codes
        return self.keys, self.values

    @property
    def _reads_itself(self) -> bool:
        """Whether attention or the policy reads keys from here, and not what `attend` is given."""
        return self._by_heads or self._reads_rows

    @property
    def _reads_rows(self) -> bool:
        """Whether the policy reads keys or values."""
        return self.policy is not None and not {"keys", "values"}.isdisjoint(self.policy.needs)

    def _check_unchanged(self, layer: Layer, k: Tensor, v: Tensor) -> None:
        """Raise where what attention reads is not what `update` has returned."""
        returned, self._returned = self._returned, None
        if not self._reads_itself or returned is None:
            return
        if k is not returned[0] or v is not returned[1]:
            name = type(layer).__name__
            raise UserError(
                f"{name}: this family changes keys or values after the cache has returned them, "
                f"which {self._blind_to_changes} does not see; {self._way_out}"
            )

    @property
    def _blind_to_changes(self) -> str:
        """What takes keys and values from the cache alone, in words."""
        return "a quantized cache" if self._by_heads else type(self.policy).__name__

    @property
    def _way_out(self) -> str:
        return "make it without dtype" if self._by_heads else "take a policy that reads no keys"

    def newest(self, part: str, rows: Float[Tensor, "B T ..."]) -> Float[Tensor, "B r ..."] | None:
        """Keep new tokens' rows from before the rotation; returns the newest ones before these."""
        self._check_batch(len(rows))
        past = self._inputs.setdefault(part, PastRows(self._past_inputs, dim=1))
        joined = past.add(rows, keep_all=self.record_past)
        count = joined.shape[1] - rows.shape[1]
        return joined[:, :count] if count else None

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B heads Tq D"],
        k: Float[Tensor, "B Hk Tk D"] | Int8[Tensor, "B Hk Tk D"],
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
        self._check_unchanged(layer, k, v)
        beside = layer.beside(inputs)
        if beside is not None:
            self._tokens.beside.append(beside.to(q.dtype), self._room)
            inputs = inputs._replace(beside=self._tokens.beside.contents)
        if self.reads_positions:
            if inputs.positions is None:
                raise UserError(
                    f"{type(self.policy).__name__} needs the positions of the tokens: pass "
                    "inputs=LayerInputs(positions=...)"
                )
            inputs = inputs._replace(positions=inputs.positions.expand(len(q), -1))
        of_cached = self._visibility_of_cached(
            visibility, self.counters.total - self.counters.pending
        )
        self._check_rows(layer, of_cached)
        rows = q
        if self._past_queries or (self._stateful and self.record_past):
            rows = self._queries.add(q, keep_all=self.record_past)
        if is_step(rows, k):
            inputs = inputs._replace(new=q.shape[2])
        output, before = self._output(layer, rows, k, v, LastCall(None, of_cached, scale, inputs))
        keys = None if self._by_heads else k
        call = LastCall(q, visibility, scale, inputs._replace(state=before), keys)
        if self.record_past:
            recorded = call._replace(inputs=call.inputs._replace(bias=None, beside=None))
            self._undo = Undo.after(self._undo, recorded, self._stateful)
        else:
            self._evict(call)
        self.counters.pending = 0
        self._measure()
        return output[:, :, -q.shape[2] :]

    def _visibility_of_cached(self, visibility: Visibility, before: int) -> Visibility:
        """Who sees whom among the cached tokens.

        Arguments:
            visibility: of all tokens so far.
            before: how many of these came before the call.
        """
        if self.budget is None:
            return visibility.last(self.length)
        visibility = gather.check_visibility(visibility, self._owner.layer(), before)
        if visibility.plain and not self._owner.layer().counts_positions:
            # Every cached token is seen, and the newest ones are the last: as if all were in order.
            return visibility
        positions = self._tokens.positions[:, 0]
        parts = {
            name: x.expand(len(positions), -1).gather(1, positions)
            for name in ("documents", "padding")
            if (x := getattr(visibility, name)) is not None
        }
        return replace(visibility, positions=positions, **parts)

    def _check_rows(self, layer: Layer, visibility: Visibility) -> None:
        """Raise where earlier query rows see tokens that a window has dropped."""
        if self._queries.rows is None or layer.window is not None:
            return
        drops = self.window is not None and self.counters.total >= self.window > 0
        if drops and visibility.window is None and visibility.documents is None:
            raise UserError(
                f"{kind_of(layer)}: this family's cache drops tokens that its mask shows, so that "
                "earlier query rows cannot be computed again; call the model with use_cache=False"
            )

    def _output(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall
    ) -> tuple[Float[Tensor, "B H Tr D"], Float[Tensor, "B S n"] | None]:
        """The layer's output for query rows, and the running state before the recorded ones."""
        first = rows.shape[2] - UNDO_ROWS
        if first <= 0 or not (self.record_past and self._stateful):
            before, out = self._state, self._run(layer, rows, k, v, call)
            self._state = out.state
            return out.output, before
        # In two runs, so that the state is known where undoing may begin.
        early = self._run(layer, rows[:, :, :first], k, v, call, later=UNDO_ROWS)
        self._state = early.state
        late = self._run(layer, rows[:, :, first:], k, v, call)
        self._state = late.state
        return torch.cat([early.output, late.output], dim=2), early.state

    def _run(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall, later: int = 0
    ) -> LayerOutput:
        """The layer for query rows that are followed by so many later tokens."""
        count = self.length - later
        inputs = call.inputs.before(later, rows.shape[2])._replace(state=self._state)
        if later and inputs.beside is not None:
            inputs = inputs._replace(beside=inputs.beside[:, :, :count])
        call = call._replace(visibility=call.visibility.part(0, count), inputs=inputs)
        if self._by_heads:
            return self._run_by_heads(layer, rows, count, call)
        if later:
            k, v = k[:, :, :count], v[:, :, :count]
        options = {"visibility": call.visibility, "scale": call.scale, "inputs": inputs}
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
        if self.budget is not None:
            self._evict_over_budget(call)
        elif self.window is not None and (spare := self.length - self._reach) > 0:
            self._tokens.drop_first(spare)
            if self._state is not None:
                self._state = self._state[..., spare:]

    @torch.no_grad()
    def _evict_over_budget(self, call: LastCall) -> None:
        if not self._step.due(self.length):
            return
        cached, protection = self._candidates(call)
        moves = self._step.moves(cached, protection)
        if moves is not None:
            self._move(moves)

    def _candidates(self, call: LastCall) -> tuple[CachedTokens, gather.Protection]:
        """All cached tokens as the policy scores them, and what else decides."""
        policy, counters, visibility = self.policy, self.counters, call.visibility
        if "keys" in policy.needs or policy.observes != 0:
            self._measure(copied=self._tokens.keys.copy_nbytes)  # of all keys, once more
        cached = CachedTokens(self._tokens.positions[:, 0], counters.total)
        if "F" in policy.needs:
            cached = cached._replace(hidden=self._state.amin(1))
        if "gate" in policy.needs:
            cached = cached._replace(gate=self._state[:, 0])
        if "positions" in policy.needs:
            cached = cached._replace(next=call.inputs.positions[:, -1] + 1)
        if self._reads_rows:
            padding = visibility.padding
            if padding is not None:
                padding = padding.expand(len(cached.positions), -1).gather(1, cached.positions)
            keys = self.keys if "keys" in policy.needs else None
            values = self.values if "values" in policy.needs else None
            cached = cached._replace(keys=keys, values=values, layer=self._index, real=padding)
        if policy.observes != 0:
            queries = self._step.queries(call.queries.shape[2])
            before = counters.total - counters.pending
            attention = gather.attention_received(
                self._owner.layer(), call.queries, self.keys if call.keys is None else call.keys,
                queries, scale=call.scale,
                visibility=self._visibility_of_cached(visibility, before), inputs=call.inputs,
            )  # fmt: skip
            cached = cached._replace(attention=attention, queries=queries)
        windows = tuple(w for w in (visibility.window, self.window) if w is not None)
        protection = gather.Protection(
            counters.total, counters.prompt, self._keeps_first, windows,
            gather.Padding.of(visibility.padding),
        )  # fmt: skip
        return cached, protection

    def _move(self, moves: gather.Moves) -> None:
        """Fill the slots of evicted tokens."""
        before = self._nbytes + self._copied
        copied = self._tokens.move(moves, self._room)
        self._state = None if self._state is None else moves.of(self._state)
        self._measure(most=before + copied)

    # Taking calls back.

    def _undoable(self) -> int:
        needs_more = self._past_queries or self._past_inputs or self._stateful
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
        visibility = self._visibility_of_cached(visibility, self.counters.total - remaining)
        inputs = inputs._replace(beside=self._tokens.beside.contents)
        call = LastCall(None, visibility, undo.call.scale, inputs)
        rows = self._queries.rows[:, :, -remaining:]
        return self._run(layer, rows, self.keys, self.values, call).state

    # Batches, devices, bytes.

    @property
    def _rows(self) -> list[PastRows]:
        return [self._queries, *self._inputs.values()]

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
        super()._measure(most=most, copied=copied + self._copied)

    @property
    def _copied(self) -> int:
        """Bytes of the copies that there are as long as a call lasts."""
        tokens = self._tokens
        return tokens.beside.copy_nbytes if self._by_heads else tokens.copy_nbytes

    def _tensors(self) -> list[Tensor | None]:
        step = [] if self._step is None else self._step.tensors
        rows = [part.rows for part in self._rows]
        return [*self._tokens.tensors, *rows, self._state, *step]
