"""An evicting cache whose shapes never change once there are tokens: one compiled graph of a step.

A call of several tokens runs as in any evicting cache. After it, the slots of every layer are
tensors of `tokens + slack` slots, and all that a step of one token reads or changes is in tensors:
the count of tokens, their positions, the slot of the next one. So nothing that Python sees differs
from step to step, and a graph of one step is a graph of all.

A step evicts first, if all slots are in use, by the policy's scores of what the steps before it
have left; the other caches evict last, so that the tokens that a query attends to are the same.
Slots without a token are masked.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction import CachedTokens, selection
from heedful.eviction.selection import Moves, Padding
from heedful.hf.cache.counters import Counters, Meter
from heedful.hf.cache.slots import Slots
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.evicting.masking import SELECTOR_KEYS, F, SelectorRows
from heedful.hf.evicting.slots import SlotMap
from heedful.hf.evicting.step import Step
from heedful.hf.family.call import require

_FREE = -1  # position of a slot without a token


@dataclass
class Places:
    """The tokens of a map, in tensors of fixed shapes that a step changes in place.

    total: how many tokens have come.
    count: how many of the slots are in use.
    at: the position of the token in each slot, negative for none; one sequence may stand for all.
    slot: that of the newest token.
    real: `True` for a token that is no padding; `None` where all are real.
    start: the position of each sequence's first real token; `None` where all are real.
    masked: F of each token, of policies that read it.
    keys: the selector's, of the same.
    """

    total: Int[Tensor, ""]
    count: Int[Tensor, ""]
    at: Int[Tensor, "R n"]
    slot: Int[Tensor, "R 1"]
    real: Bool[Tensor, "B n"] | None = None
    start: Int[Tensor, "B 1"] | None = None
    masked: Float[Tensor, "B n"] | None = None
    keys: Float[Tensor, "B n Ds"] | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        return list(vars(self).values())


class StaticMap(SlotMap):
    """A `SlotMap` whose steps of one token change nothing but tensors.

    Attributes:
        places: the tokens between two calls, once some have come; the rest of the map is out of
            date then (`counters` but for `read_counters`).
        order: the slots of the tokens, by age, when a call of several tokens began.
        counted_by: the layer that counts the bytes of the map, its first.
    """

    counted_by: "StaticLayer"

    places: Places | None = None
    order: Int[Tensor, "R n"] | None = None

    def reset(self) -> None:
        super().reset()
        self.places = self.order = None

    def step(self, real: Bool[Tensor, "B 1"], rows: SelectorRows | None) -> None:
        """Make room for a token if need be, and note it.

        Arguments:
            real: whether it is no padding.
            rows: the selector's, where F is added up.
        """
        x = self.places
        self._evict_if_full()
        slot, own = (x.at < 0).int().argmax(1, keepdim=True), x.total.clone()
        x.slot.copy_(slot)
        x.at.scatter_(1, slot, own.expand_as(slot))
        if x.real is None:
            require(
                real.all(),
                "attention_mask: a token after the prompt is padding, in a static cache whose "
                "prompt had none; pad on the left of the prompt alone",
            )
        else:
            x.real.scatter_(1, slot, real)
            x.start.copy_(torch.minimum(x.start, own).where(real, x.start))
        if rows is not None:
            x.keys.scatter_(1, slot[..., None].expand_as(rows.keys), rows.keys)
            x.masked.scatter_(1, slot, 0)
            queries = rows.queries if x.real is None else rows.queries * real[..., None]
            x.masked.add_(self.mask_sums.of(queries, x.keys, x.at, own, x.masked.dtype))
        x.total.add_(1)
        x.count.add_(1)

    def visible(self) -> Bool[Tensor, "R 1 1 n"]:
        """Slots that the query of the newest token attends to."""
        x = self.places
        visible = x.at >= 0
        if self.window is not None:
            visible = visible & (x.at >= x.total - self.window)
        if x.real is not None:
            visible = visible & x.real
        return visible[:, None, None]

    def _evict_if_full(self) -> None:
        """Let the lowest tokens leave where all slots are in use; else change nothing."""
        x, reader = self.places, self.reader
        padding = None if x.real is None else Padding(x.real, x.start, by_slot=True)
        cached = CachedTokens(x.at, x.total, number=x.masked)
        if reader is not None:
            cached = cached._replace(
                keys=reader.keys if "keys" in self.needs else None,
                values=reader.values if "values" in self.needs else None,
                layer=reader.index, real=x.real,
            )  # fmt: skip
        score = selection.scores(self.budget.policy, cached, padding)
        slots = self._to_evict(score, cached, padding)
        full = x.count >= x.at.shape[1]
        x.at.scatter_(1, slots, x.at.gather(1, slots).masked_fill(full, _FREE))
        x.count.sub_(full * slots.shape[1])

    # Between calls.

    def seal(self) -> None:
        """Put the tokens into tensors of fixed shapes, after a call."""
        self._write_late()
        self._joined = None
        streams, total, limit = self._streams, self.counters.total, self.limit
        at = streams.positions
        rows = max([len(at), *(len(x.contents) for x in streams.values())])
        if self.reader is not None:
            rows = self.reader.batch
        masked = keys = real = start = None
        if self.mask_sums is not None:
            self.mask_sums.fold(streams[F], streams[SELECTOR_KEYS].contents, at, total)
        with torch.inference_mode(False):  # else no call outside it could change them
            if self.mask_sums is not None:
                masked = _padded(streams[F].contents[:, 0, :, 0], limit)
                keys = _padded(streams[SELECTOR_KEYS].contents[:, 0], limit)
            if self._start is not None:
                real = _padded(streams["real"].contents[:, 0, :, 0], limit)
                start = self._start.clone()
            at = _padded(at.expand(rows, -1), limit, _FREE)
            if self.holes is not None:
                at.scatter_(1, self.holes.expand(rows, -1), _FREE)
            count, total = (torch.tensor(x, device=at.device) for x in (self.tokens, total))
            self.places = Places(
                total, count, at, torch.zeros_like(at[:, :1]), real, start, masked, keys
            )
        for x in self.places.tensors:
            if x is not None:
                torch._dynamo.mark_static_address(x)  # so that a CUDA graph can change it
        for name in streams:
            streams[name] = Slots()
        self.grown = True

    def read_counters(self) -> Counters:
        """Count the tokens so far; waits for the device."""
        if self.places is not None:
            total = int(self.places.total)
            self.counters.prefill = self.counters.prefill and total == self.counters.total
            self.counters.total = total
        return self.counters

    def thaw(self) -> None:
        """Put the tokens back into streams, by age, before a call of several tokens."""
        x, counters = self.places, self.read_counters()
        if x is None:
            return
        self._evict_if_full()
        length = int(x.count)
        self.order = order = _by_age(x.at)[:, :length]
        new = {"positions": x.at.gather(1, order)[:, None, :, None]}
        if x.real is not None:
            new["real"] = x.real.gather(1, order)[:, None, :, None]
            self._start = x.start
        if x.masked is not None:
            new[F] = x.masked.gather(1, order)[:, None, :, None]
            at = order[..., None].expand(-1, -1, x.keys.shape[2])
            new[SELECTOR_KEYS] = x.keys.gather(1, at)[:, None]
        self.places = self.holes = None
        for name, tokens in new.items():
            self._streams[name] = Slots()
            self._streams[name].append(tokens.contiguous(), self.limit)
        self.length, self._fresh, self._late, counters.pending = length, 0, 0, 0
        if self.reader is not None:
            self.reader.thaw()

    def begin(
        self,
        new: int,
        real: Bool[Tensor, "B m"] | None,
        device: torch.device,
        rows: SelectorRows | None = None,
    ) -> Step:
        self.thaw()
        return super().begin(new, real, device, rows)

    def before(self, turn: int) -> int:
        self.read_counters()
        return super().before(turn)

    def take_back(self, count: int) -> Moves | None:
        if count:
            raise UserError(
                f"crop: a static cache takes no tokens back, got {count}; make the cache "
                "with static=False"
            )
        return None

    def activate_past_recording(self) -> None:
        raise UserError(
            "a static cache takes no tokens back, as assisted decoding asks; make the cache with "
            "static=False"
        )

    @property
    def tensors(self) -> list[Tensor | None]:
        return super().tensors if self.places is None else self.places.tensors

    @property
    def tokens(self) -> int:
        if self.places is None:
            return super().tokens
        self._evict_if_full()
        return int(self.places.count)

    def positions(self) -> Int[Tensor, "#B n"]:
        if self.places is None:
            return super().positions()
        count, at = self.tokens, self.places.at
        return at.gather(1, _by_age(at)[:, :count])

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        x = self.places
        if x is None:
            return super().map_batch(change)
        own = self.reader is not None or x.masked is not None or x.real is not None
        for name, tensor in vars(x).items():
            if own and tensor is not None and tensor.ndim:
                changed = change(tensor)
                if changed.shape == tensor.shape:
                    tensor.copy_(changed)
                else:
                    setattr(x, name, changed)
        return None


class StaticLayer(EvictingLayer):
    """The cache of one attention layer, with all its slots there from the first call on.

    Arguments:
        index, slot_map, first, meter, int8: as of `EvictingLayer`.

    Attributes:
        last: whether this is the last layer of its map.
        sealed: whether its slots are all there; `keys` and `values` are those of all slots then,
            also of those without a token.
    """

    is_compileable = True
    map: StaticMap

    def __init__(
        self, index: int, slot_map: StaticMap, first: bool, meter: Meter, int8: bool = False
    ) -> None:
        super().__init__(index, slot_map, first, meter, int8)
        self.is_croppable = self.last = False
        if first:
            slot_map.counted_by = self

    def _clear(self) -> None:
        super()._clear()
        self.sealed = self._begun = False

    def get_seq_length(self) -> Int[Tensor, ""] | int:
        """Tokens so far, evicted ones included; a tensor, so that a graph serves any number."""
        places = self.map.places
        return self.map.counters.total if places is None else places.total.clone()

    def get_mask_sizes(self, query_length: int) -> tuple[int, Int[Tensor, ""] | int]:
        """The new token's own column alone; of several tokens, as if all tokens were there.

        The hook makes the mask of one token, and its column tells whether it is padding.
        """
        if self.map.places is None or query_length > 1:
            return self.map.read_counters().total + query_length, 0
        return 1, self.get_seq_length()

    def step(self, real: Bool[Tensor, "B 1"], rows: SelectorRows | None) -> Bool[Tensor, "R 1 1 n"]:
        """Begin a step of one token, before `update`; the first of a map's layers acts.

        Arguments:
            real: whether the token is no padding.
            rows: the selector's, where F is added up.

        Returns:
            The mask of its query.
        """
        if self.batch != real.shape[0]:
            self._begin_batch(real)
        if self._first:
            self.map.step(real, rows)
        self._begun = True
        return self.map.visible()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, as `EvictingLayer.update`."""
        if not self.sealed or key_states.shape[2] != 1:
            return self._update(key_states, value_states)
        if not self._begun:
            raise UserError(
                f"attention layer {self.index} was called without the hook that hands its mask to "
                "the cache; call the model that the cache was made for"
            )
        self._begun = False
        self._keys.put(self.map.places.slot, key_states)
        self._values.put(self.map.places.slot, value_states)
        return self._keys.contents, self._values.contents

    @torch.compiler.disable(reason="calls of several tokens have lengths of their own")
    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        read = super().update(key_states, value_states)
        for slots in (self._keys, self._values):
            slots.fill(self.map.limit)
        self.sealed = True
        if self.last:
            self.map.seal()
            self.map.counted_by._measure()
        self._measure()
        return read

    def _begin(self, new: int, real: Tensor | None, device: torch.device) -> Step:
        step = super()._begin(new, real, device)
        self.thaw()
        return step

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            super()._map_batch(change)

    def thaw(self) -> None:
        """Put the tokens in the order of the map's, before a call of several tokens."""
        if self.sealed:
            self.sealed = False
            self._take(self.map.order, self._keys, self._values)

    @property
    def counters(self) -> Counters:
        return self.map.read_counters()


def _padded(tokens: Tensor, room: int, value: float = 0) -> Tensor:
    """A tensor of `room` tokens that begins with these."""
    padded = tokens.new_full((len(tokens), room, *tokens.shape[2:]), value)
    padded[:, : tokens.shape[1]] = tokens
    return padded


def _by_age(at: Int[Tensor, "R n"]) -> Int[Tensor, "R n"]:
    """The slots by the positions of their tokens, those without one last."""
    return at.masked_fill(at < 0, torch.iinfo(at.dtype).max).argsort(1)
