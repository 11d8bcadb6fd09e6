"""One attention layer's part of a KV cache: its tokens, and what its mechanism keeps of them.

Keys and values, and beside them what the layer declares: the last query rows (a convolution reads
them), rows from before the rotation, one number per key and selector (selective attention's F), own
selector keys. A budget makes it let go of tokens; the memory that they held is used for the next.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import CacheLayerMixin

from heedful.eviction import Eviction, Held, gather
from heedful.hf.cache.slots import SLACK, Meter, Slots, nbytes_of
from heedful.hf.cache.undo import Newest, Recorded
from heedful.hf.versions import hand_over
from heedful.nn import Given, Layer, LayerOutput
from heedful.nn.layer import NOTHING
from heedful.ops import Visibility

UNDO = 128  # query rows of the last calls that can be taken back where a state runs through them


class LayerCache(CacheLayerMixin):
    """One attention layer's part of the cache.

    The tokens stand in order until a budget lets some go; from then on `_positions` says where each
    belongs, and only the newest are in order, at the end. `meter` counts the whole cache's bytes.
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self,
        layer: Layer,
        sliding: int | None = None,
        policy: Eviction | None = None,
        tokens: int | None = None,
        meter: Meter | None = None,
    ) -> None:
        if layer.past_queries and layer.keeps:
            raise ValueError(f"{type(layer).__name__} needs both query rows and a state")
        self._owner, self._kind = weakref.ref(layer), _kind(layer)
        self._past, self._past_inputs = layer.past_queries, layer.past_inputs
        self._stateful = bool(layer.keeps)
        windows = [w for w in (sliding, layer.window) if w is not None]
        self.window = min(windows, default=None)
        if tokens is not None and self.window is not None and self.window <= tokens:
            tokens = None  # the window alone never holds more
        self.policy = policy if tokens is not None else None
        self.tokens, self._first = tokens, layer.keeps_first
        if self.policy is not None:
            gather.check_policy(self.policy, layer, tokens)
        self.record_past = False
        self.meter = Meter() if meter is None else meter
        self._bytes = 0
        self._clear()

    def _clear(self) -> None:
        self._keys, self._values, self._beside = Slots(), Slots(), Slots()
        self._newest = Newest()
        self._state: Tensor | None = None
        self._score: Tensor | None = None
        self._positions: Int[Tensor, "B 1 n"] | None = None
        self._rows: Float[Tensor, "B H r D"] | None = None
        self._recorded: Recorded | None = None
        self.seen = self.arrived = self._prompt = 0
        self._stepped = False

    def _streams(self) -> list[Slots]:
        """What is kept per token and head."""
        all_of_them = (self._keys, self._values, self._beside)
        return [slots for slots in all_of_them if slots.buffer is not None]

    # What transformers asks of a layer.

    @property
    def keys(self) -> Tensor | None:
        return self._keys.held

    @property
    def values(self) -> Tensor | None:
        return self._values.held

    @property
    def is_initialized(self) -> bool:
        return self._keys.buffer is not None

    @property
    def is_croppable(self) -> bool:
        return self.policy is None or self.policy.observes == 0

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return self._keys.length

    @property
    def _limit(self) -> int | None:
        """For how many tokens room is made ahead of them; a window's slides through some more."""
        if self.tokens is not None or self.window is None:
            return self.tokens
        reach = self.window + self._past
        return reach + max(8, reach // SLACK)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before there are tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns those of all."""
        hand_over(self, kwargs)
        batch, new = key_states.shape[0], key_states.shape[2]
        self._check_batch(batch)
        if self.policy is not None and torch.is_grad_enabled() and key_states.requires_grad:
            raise ValueError(
                "the cache evicts tokens, which has no gradients: call the model under "
                "torch.no_grad(), or with heedful.new_cache(model, eviction=False)"
            )
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
        before = self._keys.room, self._values.room
        keys = self._keys.append(key_states, self._limit)
        values = self._values.append(value_states, self._limit)
        after = self._keys.room, self._values.room
        moved = [old for old, new in zip(before, after, strict=True) if old != new]
        if self.policy is not None:
            at = torch.arange(self.seen, self.seen + new, device=key_states.device)
            at = at.expand(batch, 1, -1)
            self._positions = at if self._positions is None else torch.cat([self._positions, at], 2)
        self.seen += new
        self.arrived = new
        self._stepped |= new == 1 and self.seen > 1
        self._prompt = self._prompt if self._stepped else self.seen
        self._measure(copied=max(moved, default=0))  # old and new were there at once
        return keys, values

    def _check_batch(self, batch: int) -> None:
        if self.is_initialized and self._keys.buffer.shape[0] != batch:
            raise ValueError(
                f"the cache holds a batch of {self._keys.buffer.shape[0]} rows and the call "
                f"has {batch}; use batch_select_indices or batch_repeat_interleave, or a new cache"
            )

    def newest(self, part: str, rows: Float[Tensor, "B T ..."]) -> Float[Tensor, "B r ..."] | None:
        """The newest tokens' rows before these, from before the rotation; these are kept."""
        self._check_batch(len(rows))
        return self._newest.add(part, rows, self._past_inputs, all_of_them=self.record_past)

    def get_seq_length(self) -> int:
        """Tokens seen: positions go on from here, whatever was let go."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As if everything seen were there; `attend` takes its part of the mask."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on nothing is let go before `crop`, which can take back the last calls."""
        if not self.is_croppable:
            raise ValueError(
                f"{type(self.policy).__name__} cannot take tokens back, as assisted decoding asks: "
                "its scores add up over queries; decode without, or with another policy"
            )
        self.record_past = True

    def end_past_recording(self) -> None:
        """From now on what a window or a budget has no room for is let go again."""
        if self.record_past:
            self.crop(0)
            self.record_past = False

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest `-tokens_to_remove` tokens."""
        count = -tokens_to_remove
        if count < 0:
            raise ValueError(
                f"crop takes minus the number of tokens to remove, got {tokens_to_remove}"
            )
        if count > self.length:
            raise ValueError(f"crop cannot take back {count} tokens of the {self.length} held")
        rows = self._past or self._past_inputs or self._stateful
        simple = not rows and self.policy is None and self.window is None
        if count and not simple:
            known = 0 if self._recorded is None else self._recorded.rows
            if not self.record_past or count > known:
                raise ValueError(
                    f"crop can take back {known} tokens here, asked for {count}: call "
                    "activate_past_recording() before the calls that may be undone"
                )
        if self.is_initialized and count:
            for slots in self._streams():
                slots.drop_last(count)
            self.seen -= count
            self._newest.drop_last(count)
            if self._positions is not None:
                self._positions = self._positions[..., : self.length]
            self._undo(count)
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            self._keep_rows()
            self._newest.keep(self._past_inputs)
            self._let_go(recorded.visibility.part(0, self.seen))
        self._measure()

    def reset(self) -> None:
        self._clear()
        self._measure()

    def offload(self) -> None:
        """Keys and values go to the CPU; what the mechanism keeps beside is small and stays."""
        for slots in (self._keys, self._values):
            slots.on_rows(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        for slots in (self._keys, self._values):
            slots.on_rows(lambda x: x.to(self.device, non_blocking=True))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._on_rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._on_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._on_rows(lambda x: x[indices.to(x.device)])

    def _on_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        for slots in self._streams():
            slots.on_rows(change)
        self._newest.on_rows(change)
        for name in ("_state", "_score", "_positions", "_rows"):
            if (x := getattr(self, name)) is not None:
                setattr(self, name, change(x))
        self._measure()

    # Attention over what is held.

    def attend(
        self,
        layer: Layer,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B Hk Tk D"],
        v: Float[Tensor, "B Hk Tk D"],
        *,
        visibility: Visibility,
        scale: float | None,
        given: Given,
    ) -> Float[Tensor, "B H Tq D"]:
        """The layer's output for the tokens that came with the last `update`.

        Arguments:
            layer: the layer that this part of the cache belongs to.
            q: queries of the new tokens.
            k, v: what `update` returned.
            visibility: who sees whom among all tokens seen so far.
            scale, given: for the layer.
        """
        new, whole = q.shape[2], visibility
        beside = layer.beside(given)
        if beside is not None:
            given = given._replace(beside=self._beside.append(beside.to(k.dtype), self._limit))
        visibility = self._of_held(whole)
        forgets = self.window is not None and self.seen >= self.window > 0
        shown = visibility.window is None and visibility.documents is None
        if self._rows is not None and forgets and shown and layer.window is None:
            raise ValueError(
                f"{self._kind}: this family's cache forgets tokens that its mask shows, so that "
                "earlier query rows cannot be computed again; call the model with use_cache=False"
            )
        rows = q
        if self._past and self._rows is not None:
            rows = torch.cat([self._rows[:, :, -self._past :], q], dim=2)
        first = new - UNDO if self.record_past and self._stateful else 0
        if first > 0:  # in two calls, so that the state is known where undoing may begin
            early = self._call(layer, q[:, :, :first], k, v, visibility, scale, given, UNDO)
            self._state = early.state
        before = self._state
        out = self._call(layer, rows[:, :, max(0, first) :], k, v, visibility, scale, given, 0)
        self._state = out.state
        output = out.output if first <= 0 else torch.cat([early.output, out.output], dim=2)
        if self.record_past:
            self._record(q, before, whole, scale, given._replace(bias=None))  # no state reads it
        elif self._past:
            self._rows = rows
            self._keep_rows()
        if not self.record_past:
            self._let_go(whole, q, scale, given, before)
        self.arrived = 0
        self._measure()
        return output[:, :, -new:]

    def _call(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, visibility: Visibility,
        scale: float | None, given: Given, later: int,
    ) -> LayerOutput:  # fmt: skip
        """The layer for query rows that are followed by so many later tokens."""
        keys = k.shape[2] - later
        given = given.before(later, rows.shape[2])._replace(state=self._state)
        if given.beside is not None:
            given = given._replace(beside=given.beside[:, :, :keys])
        return layer(
            rows, k[:, :, :keys], v[:, :, :keys], visibility=visibility.part(0, keys),
            scale=scale, given=given,
        )  # fmt: skip

    def _of_held(self, visibility: Visibility) -> Visibility:
        """Who sees whom among the held tokens, from the same of all tokens seen."""
        if self.policy is None:
            return visibility.last(self.length)
        visibility = gather.servable(visibility, self._owner(), self.seen - self.arrived)
        if visibility.plain:
            # All that is held is seen, and the newest tokens are the last: as if it were in place.
            return visibility
        at = self._positions[:, 0]
        parts = {
            name: x.expand(len(at), -1).gather(1, at)
            for name in ("documents", "padding")
            if (x := getattr(visibility, name)) is not None
        }
        return replace(visibility, positions=at, **parts)

    def positions(self) -> Int[Tensor, "B n"]:
        """Where the held tokens stand in their rows, ascending."""
        if not self.is_initialized:
            return torch.empty(0, 0, dtype=torch.int64)
        if self._positions is not None:
            return self._positions[:, 0].sort(1).values
        at = torch.arange(self.seen - self.length, self.seen, device=self.device)
        return at.expand(self._keys.buffer.shape[0], -1)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of keys, values and what is kept beside them, if no token had been evicted."""
        tensors = [slots.buffer for slots in self._streams()]
        tensors += [] if self._state is None else [self._state]
        per_token = sum(x[:, :, :1].numel() * x.element_size() for x in tensors if x.shape[2])
        reach = self.seen if self.window is None else self.window - 1 + self._past
        return per_token * min(self.seen, reach)

    def check_owner(self, layer: Layer) -> None:
        """Raise unless this part of the cache belongs to that layer; take it after a copy."""
        owner = None if self._owner is None else self._owner()
        if owner is layer:
            return
        if self._kind != _kind(layer) or (owner is not None and self.seen):
            raise ValueError(
                f"the cache belongs to another model or mechanism ({self._kind}, and this "
                f"layer is {_kind(layer)}); make one with heedful.new_cache(model)"
            )
        self._owner = weakref.ref(layer)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_owner": None}

    def __deepcopy__(self, memo: dict) -> "LayerCache":
        copied = copy.copy(self)
        copied._owner = self._owner
        for name, x in self.__dict__.items():
            if name not in ("_owner", "policy"):
                setattr(copied, name, copy.deepcopy(x, memo))
        return copied

    # Undoing.

    def _record(
        self, q: Tensor, before: Tensor | None, visibility: Visibility, scale: float | None,
        given: Given,
    ) -> None:  # fmt: skip
        """Note what undoing the last calls takes, this one with them."""
        old = self._recorded
        if self._past or self._stateful:
            self._rows = q if self._rows is None else torch.cat([self._rows, q], dim=2)
        rows = (0 if old is None else old.rows) + q.shape[2]
        if old is not None and rows <= UNDO:
            before = old.state
            given = old.given.joined(given)
        elif self._stateful:
            rows = min(rows, q.shape[2], UNDO)
        self._recorded = Recorded(before, rows, visibility, scale, given)

    def _undo(self, count: int) -> None:
        """Rows and state as they were `count` tokens ago; keys and values are already."""
        recorded = self._recorded
        if recorded is None:
            return
        if self._rows is not None:
            self._rows = self._rows[:, :, : self._rows.shape[2] - count]
        left = recorded.rows - count
        if not self._stateful:
            return
        self._state = recorded.state
        if not left:
            return
        layer = self._owner()
        given = recorded.given.before(count, left)._replace(beside=self._beside.held)
        self.arrived = left
        whole = recorded.visibility.part(0, self.seen)
        self._state = layer(
            self._rows[:, :, -left:], self.keys, self.values, visibility=self._of_held(whole),
            scale=recorded.scale, given=given._replace(state=recorded.state),
        ).state  # fmt: skip

    def _keep_rows(self) -> None:
        """Only the query rows that the next token's output depends on."""
        if self._rows is not None:
            rows = self._rows[:, :, max(0, self._rows.shape[2] - self._past) :]
            self._rows = rows.clone() if self._past else None

    # Letting go.

    def _let_go(
        self, visibility: Visibility, q: Tensor | None = None, scale: float | None = None,
        given: Given = NOTHING, state: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Of what no window reaches any more, or what the budget has no room for.

        What follows `visibility` is of the last call, for policies that observe its queries;
        `state` is the one before it.
        """
        if self.policy is not None:
            self._evict(visibility, q, scale, given._replace(state=state))
        elif self.window is not None:
            # A row above the newest one reads as far back as its own window.
            spare = self.length - (self.window - 1 + self._past)
            if spare > 0:
                for slots in self._streams():
                    slots.drop_first(spare)
                if self._state is not None:
                    self._state = self._state[..., spare:]

    @torch.no_grad()
    def _evict(
        self, visibility: Visibility, q: Tensor | None, scale: float | None, given: Given
    ) -> None:
        policy, held = self.policy, self.length
        if policy.observes == 0 and held < self.tokens:
            return
        attention, queries = None, 0
        if policy.observes != 0:
            queries = q.shape[2] if policy.observes is None else min(policy.observes, q.shape[2])
            attention = gather.observed(
                self._owner(), q, self.keys, queries, visibility=self._of_held(visibility),
                scale=scale, given=given,
            )  # fmt: skip
        at, score = self._positions[:, 0], self._score
        score = None if score is None else pad(score[:, 0], (0, held - score.shape[2]))
        hidden = self._state.amin(1) if policy.reads_hidden else None
        worth = policy.score(Held(at, self.seen, hidden, attention, queries, score))
        if policy.observes != 0:
            self._score = worth[:, None]
        if held < self.tokens:
            return
        windows = tuple(w for w in (visibility.window, self.window) if w is not None)
        row = gather.Guarded(self.seen, self._prompt, self._first, windows, visibility.padding)
        made = gather.moves(gather.chosen(worth, at, policy, self.tokens, row), held)
        before, copied = self._bytes, 0
        for slots in self._streams():
            old = slots.buffer
            slots.move(made.on(old.device), self.tokens)
            if slots.buffer is not old:  # for a moment both were there
                copied = max(copied, nbytes_of([slots.buffer]))
        for name in ("_positions", "_state", "_score"):
            if (x := getattr(self, name)) is not None:
                setattr(self, name, made.of(x))
        self._measure(most=before + copied)

    def _tensors(self) -> list[Tensor | None]:
        held = [slots.buffer for slots in self._streams()]
        held += self._newest.tensors
        return [*held, self._state, self._score, self._positions, self._rows]

    def _measure(self, *, most: int = 0, copied: int = 0) -> None:
        """Tell the meter what the tensors take now.

        For a moment it was `most` in all, or `copied` more than now.
        """
        now = nbytes_of(self._tensors())
        self.meter.change(now - self._bytes, max(copied, most - now))
        self._bytes = now


def _kind(layer: Layer) -> str:
    """What a cache must fit: the mechanism and the heads."""
    shape = layer.shape
    return (
        f"{type(layer).__name__} {shape.layer} with {shape.heads} heads, {shape.key_heads} key "
        f"heads of {shape.dim}, {layer.past_queries} query rows"
    )
