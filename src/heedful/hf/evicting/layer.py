"""One layer of an evicting cache: keys and values in a fixed number of slots.

The family's own attention reads them. What leaves is chosen when the keys of a call are known, and
leaves after its attention: a call of one token reads the slots themselves, and the next call uses
those of evicted tokens; a call of several reads the cached tokens and its own in tensors of their
own, and only what stays goes into slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction.policy import Budget
from heedful.eviction.selection import Moves
from heedful.hf.cache.base import CacheLayer, removed
from heedful.hf.cache.counters import Counters, Meter, nbytes_of
from heedful.hf.cache.slots import Slots
from heedful.hf.cache.streams import KEYS, VALUES, Streams
from heedful.hf.evicting.hiding import SelectorRows
from heedful.hf.evicting.observing import AttentionCall, attention_of_each, attention_received
from heedful.hf.evicting.slots import SlotMap
from heedful.hf.evicting.step import Step


class _Reading(NamedTuple):
    """A call that attention reads: its step, and the tokens in the order of its columns."""

    step: Step
    keys: Slots
    values: Slots


READ = frozenset({"keys", "values"})
"""Needs of a policy that are read off a layer's own keys and values."""


class EvictingLayer(CacheLayer):
    """The cache of one attention layer of an unconverted model.

    Arguments:
        index: the layer's number.
        slot_map: which token is in which slot; of all layers that evict the same ones.
        first: whether this is the first layer of that map, which counts its bytes.
        meter: counts the whole cache's bytes.
        int8: whether tokens are kept in eight bits per number.
    """

    parts = ("_streams", "batch", "dtype")
    sealed = False  # whether shapes no longer change (static.py)

    def __init__(
        self, index: int, slot_map: SlotMap, first: bool, meter: Meter, int8: bool = False
    ) -> None:
        self.index, self.map, self.meter = index, slot_map, meter
        self._first, self.int8, self.window = first, int8, slot_map.window
        if slot_map.observes or READ.intersection(slot_map.needs):
            slot_map.reader = self
        self._clear()

    def _clear(self) -> None:
        self._keys, self._values = self._new_stream(), self._new_stream()
        self._streams = Streams({KEYS: self._keys, VALUES: self._values})
        self._step: Step | None = None  # of a call that has announced itself
        self.rows: SelectorRows | None = None  # of that call
        self._real: Bool[Tensor, "B m"] | None = None  # which of its tokens are no padding
        self._read_by: _Reading | None = None  # attention, whose weights are still to come
        self.batch: int | None = None
        self._turn = 0

    @property
    def before(self) -> int:
        """Number of tokens before the call that this layer is at, or is to be at."""
        return self.map.before(self._turn)

    # What transformers asks of a layer.

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, `[B, Hk, T, D]`.

        Returns:
            Those of all tokens that attention reads: the cached ones and the new, in the order of
            their slots.
        """
        if key_states.requires_grad and torch.is_grad_enabled():
            raise UserError(
                "the cache evicts tokens, which has no gradients: call the model under "
                "torch.no_grad(), or without this cache"
            )
        if self.batch != key_states.shape[0]:  # len(tensor) is five calls
            self._begin_batch(key_states)
        step, self._step = self._step, None
        if step is None:
            step = self._begin(key_states.shape[2], None, key_states.device)
        keys, values = self._keys, self._values
        if step.hole is None:
            return self._add(step, key_states, value_states)
        keys.put(step.hole, key_states)
        values.put(step.hole, value_states)
        if self.map.reader is None and not self.int8:
            read = keys.contents, values.contents
        else:
            read = self._read(step, keys, values)
        if self.map.grown:
            self._measure()
        return read

    def _begin_batch(self, keys: Tensor) -> None:
        if self.batch is not None:
            raise UserError(
                f"the cache has a batch of {self.batch} sequences and the call has {len(keys)}; "
                "use batch_select_indices or batch_repeat_interleave, or a new cache"
            )
        self.batch, self.device, self.dtype = len(keys), keys.device, keys.dtype

    def _add(self, step: Step, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens at the end, or choose what stays of all."""
        pairs = ((self._keys, keys), (self._values, values))
        for slots, _ in pairs:
            if step.moves is not None:
                slots.move(step.moves, self.map.limit)
            if step.drop:
                slots.drop_first(step.drop)
        if step.joined:
            joined = [slots.extended(x) for slots, x in pairs]
            read = self._read(step, *joined)
            self._measure(copied=nbytes_of([y for x in joined for y in x.tensors]))
            return read
        grown = False
        for slots, x in pairs:
            grown = slots.append(x, self.map.limit) or grown
        read = self._read(step, self._keys, self._values)
        if grown or self.map.grown:
            self._measure(copied=self._nbytes // 2)  # old and new keys were there at once
        return read

    def _read(self, step: Step, keys: Slots, values: Slots) -> tuple[Tensor, Tensor]:
        """Keys or values that attention reads; chooses what leaves after it."""
        read, keep = (keys.contents, values.contents), step.keep
        if self.map.observes:
            self._read_by = _Reading(step, keys, values)
            return read
        if step.evicts and keep is None and self.map.reader is not None:
            keep = self.map.evict(step, *read)
        if keep is not None:
            self._take(keep, keys, values)
        return read

    def _take(self, keep: Int[Tensor, "#B m"], keys: Slots, values: Slots) -> None:
        """Cache what stays of the tokens that a call has read."""
        for slots, source in ((self._keys, keys), (self._values, values)):
            slots.take(source, keep.to(self.device), self.map.limit)

    def announce(self, new: int, real: Bool[Tensor, "B m"] | None, device: torch.device) -> Step:
        """Begin a call whose mask is known, before `update`.

        Arguments:
            new: how many tokens come.
            real: which of them are no padding.
            device: of the mask.
        """
        self._step, self._real = self._begin(new, real, device), real
        return self._step

    def observe(self, call: AttentionCall) -> None:
        """Score all tokens by the attention of a call, and choose what leaves after it.

        Arguments:
            call: of the attention function, with what `update` has returned.
        """
        (step, keys, values), self._read_by = self._read_by, None
        new, observes = step.new, self.map.budget.policy.observes
        queries = new if observes is None else min(observes, new)
        real, self._real = self._real, None
        if self.map.record_past:
            self.map.scores.calls.append(attention_of_each(call, observes, real))
            self._measure()
            return
        attention = attention_received(call, queries, real)
        keep = self.map.observe(step, attention, queries, call.key, call.value)
        if keep is not None:
            self._take(keep, keys, values)
            joined = [*keys.tensors, *values.tensors]
            self._measure(copied=nbytes_of(joined))
        elif step.hole is None:
            self._measure()

    def _begin(self, new: int, real: Tensor | None, device: torch.device) -> Step:
        if self._read_by is not None:
            raise UserError(
                f"{type(self.policy).__name__} reads attention, and attention layer {self.index} "
                "was called without the hook that observes it; call the model that the cache was "
                "made for, and reset() the cache first"
            )
        turn, self._turn = self._turn, self._turn + 1
        if self.map.hiding is None:
            return self.map.once(turn, self.map.begin, new, real, device)
        rows, self.rows = self.rows, None
        if rows is None:
            raise UserError(
                f"attention layer {self.index} was called without the hook that hands its input "
                "to the selectors; call the model that the cache was made for"
            )
        return self.map.once(turn, self.map.begin, new, real, device, rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens.

        Raises:
            ValueError: the number is positive, or more than can be taken back.
        """
        count = removed(tokens_to_remove)
        moves: Moves | None = self._in_turn(self.map.take_back, count)
        for slots in (self._keys, self._values):
            if count:
                slots.drop_last(count)
            if moves is not None:
                slots.move(moves, self.map.limit)
        self._measure()

    @property
    def record_past(self) -> bool:
        """True if nothing is evicted until `crop`."""
        return self.map.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        if value:
            self.map.record_past = True
        else:
            self.map.end_past_recording()

    def activate_past_recording(self) -> None:
        """From now on nothing is evicted before `crop`, which can take back the calls until then.

        After it one call is recorded at a time, as assisted decoding crops after each; a second
        one without `crop` evicts again.
        """
        self.map.activate_past_recording()

    def end_past_recording(self) -> None:
        """From now on what a window or a budget has no room for is evicted again."""
        self.map.end_past_recording()

    def reset(self) -> None:
        self.map.reset()  # by each of its layers, also where a call was interrupted
        self._clear()
        self._measure()

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        self._in_turn(self.map.map_batch, change)
        self._streams.map_batch(change)
        self.batch = None if self.batch is None else len(self._keys.tensors[0])
        self._measure()

    def _in_turn(self, act: Callable, *arguments: object) -> object:
        result = self.map.once(self._turn, act, *arguments)
        self._turn += 1  # not where it was refused
        return result

    def check_between_calls(self) -> None:
        """Raise where a call is under way, or was interrupted."""
        self.map.check_turn(self._turn)

    # What a cache of heedful tells.

    @property
    def budget(self) -> Budget | None:
        return self.map.budget

    @property
    def counters(self) -> Counters:
        return self.map.counters

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self.map.tokens

    def positions(self) -> Int[Tensor, "B n"]:
        """Positions of the cached tokens in their sequences, ascending."""
        if self.batch is None:
            return torch.empty(0, 0, dtype=torch.int64)
        return self.map.positions().expand(self.batch, -1)

    def _measure(self, copied: int = 0) -> None:
        """Tell the meter what the tensors take now, and for a moment `copied` more."""
        tensors = self._streams.tensors
        nbytes = nbytes_of([*tensors, *self.map.tensors] if self._first else tensors)
        self.meter.change(nbytes - self._nbytes, copied)
        self._nbytes = nbytes
