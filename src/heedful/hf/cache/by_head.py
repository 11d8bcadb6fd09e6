"""The cache of a layer whose key heads have budgets of their own.

Of a layer that finds something far back, often one head alone looks there. So each key head caches
as many tokens as its own budget has room for. All heads evict in the same order, and a head's
tokens are always among those of every head with a larger budget: what a layer keeps per token and
not per head (positions, F, own selector keys) is there once, for the heads with most.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction import CachedTokens, Eviction, gather
from heedful.eviction.gather import Moves
from heedful.hf.cache.budget import Budget
from heedful.hf.cache.counters import Meter
from heedful.hf.cache.int8 import Int8Slots, heads_read_together
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.slots import Slots
from heedful.hf.cache.tokens import StoredTokens
from heedful.hf.cache.undo import LastCall
from heedful.hf.intercept import run_layer
from heedful.nn import Layer, LayerInputs, LayerOutput
from heedful.ops import Visibility


class ByHeadCache(LayerCache):
    """The tokens of one attention layer, of which each key head caches its own.

    Arguments:
        layer, sliding, meter, int8: as of any layer's cache.
        budget: with one number of tokens per key head.

    Raises:
        ValueError: the layer's heads depend on each other, or the policy reads attention or keys.
    """

    def __init__(
        self,
        layer: Layer,
        sliding: int | None,
        budget: Budget,
        meter: Meter | None = None,
        int8: bool = False,
    ) -> None:
        windows = [w for w in (sliding, layer.window) if w is not None]
        if windows:  # which alone never keep more
            most = max(min(windows), budget.policy.sinks + budget.policy.recent + 2)
            budget = replace(budget, tokens=tuple(min(n, most) for n in budget.tokens))
        super().__init__(layer, sliding, budget, meter, int8)
        self._room, self._changes = max(budget.tokens), True
        self._by_heads = False  # it is groups of heads that are read one by one here
        self._reads_itself = True

    def _clear(self) -> None:
        super()._clear()
        self._tokens = TokensByHead(self.budget.tokens, self._int8)

    @property
    def keys(self) -> None:
        """There is no one tensor of all heads."""

    values = keys

    def _measure_call(self) -> None:
        self._measure()  # the places of groups are new tensors

    @property
    def _copied(self) -> int:
        return self._tokens.beside.copy_nbytes

    def count_cached(self, real: Bool[Tensor, "B n"] | None) -> Float[Tensor, "B 1"] | float:
        total = 0.0
        for group in self._tokens.groups:
            if real is None:
                count = group.keys.length
            else:
                at = group.of(self._tokens.positions[:, 0])
                count = real.gather(1, at.to(real.device)).sum(1, keepdim=True)
            total = total + count * len(group.heads)
        return total / len(self.budget.tokens)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens; returns these, as no one tensor has all."""
        heads = len(self.budget.tokens)
        if key_states.shape[1] != heads:
            raise UserError(
                f"keys must have the {heads} key heads that the layer has budgets for, got "
                f"{key_states.shape[1]}; give the layer one number of tokens"
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def _for_attention(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values

    _reader = ("a cache with budgets of key heads", "give its layers one number of tokens")

    def _run(
        self, layer: Layer, rows: Tensor, k: Tensor, v: Tensor, call: LastCall, later: int = 0
    ) -> LayerOutput:
        """The layer for query rows that are followed by so many later tokens, group by group."""
        inputs, heads = call.inputs, len(self.budget.tokens)
        before = 0 if inputs.state is None else inputs.state.shape[2]
        size, new = rows.shape[1] // heads, self.length - later - before
        outputs: list[Tensor | None] = [None] * heads
        for group in self._tokens.groups:
            count = group.keys.length - later
            own = group.inputs(inputs, count, new)
            visibility = group.visibility(call.visibility, count)
            for part in group.parts():
                of = [size * head + i for head in group.heads[part] for i in range(size)]
                k, v = (x.read(part, slice(count)) for x in (group.keys, group.values))
                self._measure(copied=k.nbytes + v.nbytes if self._int8 else 0)
                out = run_layer(
                    layer, rows[:, of], k, v, visibility=visibility, scale=call.scale,
                    inputs=own.of_heads(of),
                )  # fmt: skip
                for head, x in zip(group.heads[part], out.output.split(size, dim=1), strict=True):
                    outputs[head] = x
            if group.largest:
                state = out.state  # of all tokens, the same whichever head it is from
        return LayerOutput(torch.cat(outputs, dim=1), state)

    def _evict_over_budget(self, call: LastCall) -> None:
        if not any(group.keys.length >= group.tokens for group in self._tokens.groups):
            return
        cached, protection = self._candidates(call)
        before = self._nbytes + self._copied
        copied, moves = self._tokens.evict(self.policy, cached, protection)
        if moves is not None and self._state is not None:
            self._state = moves.of(self._state)
        self._measure(most=before + copied)


class HeadGroup:
    """The tokens of the key heads that share a budget.

    Arguments:
        heads: which key heads of the layer these are.
        tokens: their budget.
        int8: whether tokens have eight bits per number.
        largest: whether theirs is the layer's largest budget, so that they have all of its tokens.

    Attributes:
        keys, values: of these heads.
        places: for each of their tokens its slot among the layer's; `None` of the largest.
    """

    def __init__(self, heads: list[int], tokens: int, int8: bool, largest: bool) -> None:
        kind = Int8Slots if int8 else Slots
        self.heads, self.tokens, self.largest = heads, tokens, largest
        self.keys, self.values = kind(), kind()
        self.places: Int32[Tensor, "B n"] | None = None

    def append(self, keys: Tensor, values: Tensor, start: int) -> None:
        """Add new tokens of all heads, the first of which is the layer's token in slot `start`."""
        self.keys.append(keys[:, self.heads], self.tokens)
        self.values.append(values[:, self.heads], self.tokens)
        if self.largest:
            return
        new = torch.arange(start, start + keys.shape[2], dtype=torch.int32, device=keys.device)
        new = new.expand(len(keys), -1)
        self.places = new if self.places is None else torch.cat([self.places, new], dim=1)

    def of(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of something that all tokens of the layer have, what belongs to these, along `dim`."""
        return x if self.places is None else _gathered(x, self.places, dim)

    def mask(self, tokens: int) -> Bool[Tensor, "B {tokens}"]:
        """Which of all tokens of the layer these are."""
        mask = torch.zeros(len(self.places), tokens, dtype=torch.bool, device=self.places.device)
        return mask.scatter_(1, self.places.long(), True)

    def move(self, moves: Moves) -> int:
        """Drop tokens; returns the bytes of a new buffer."""
        if self.places is not None:
            self.places = moves.of(self.places[:, None])[:, 0]
        return max(slots.move(moves, self.tokens) for slots in (self.keys, self.values))

    def parts(self) -> list[slice]:
        """Heads in parts, each of which is read at a time."""
        if isinstance(self.keys, Int8Slots):
            return heads_read_together(self.keys.codes, self.values.codes)
        return [slice(0, len(self.heads))]

    def inputs(self, inputs: LayerInputs, tokens: int, new: int) -> LayerInputs:
        """What the layer is given beside, for the first tokens, of which so many are new."""
        if self.places is None:
            return inputs
        places, state, beside = self.places[:, :tokens], inputs.state, inputs.beside
        if state is not None:
            state = _gathered(state, places[:, : tokens - new], 2)
        if beside is not None:
            beside = _gathered(beside, places, 2)
        return inputs._replace(state=state, beside=beside)

    def visibility(self, visibility: Visibility, tokens: int) -> Visibility:
        """Who sees whom among the first of these tokens, of that among all of the layer's."""
        if self.places is None:
            return visibility.part(0, tokens)
        places = self.places[:, :tokens]
        parts = {
            name: _gathered(x.expand(len(places), -1), places, 1)
            for name in ("documents", "padding", "positions")
            if (x := getattr(visibility, name)) is not None
        }
        return replace(visibility, **parts)


class TokensByHead(StoredTokens):
    """The tokens of a layer, with keys and values in groups of heads.

    Arguments:
        tokens: the budget of each key head.
        int8: whether the streams have eight bits per number.

    Attributes:
        groups: of heads, from the largest budget to the smallest.
    """

    def __init__(self, tokens: tuple[int, ...], int8: bool = False) -> None:
        super().__init__(int8)
        most = max(tokens)
        self.groups = [
            HeadGroup([i for i, n in enumerate(tokens) if n == count], count, int8, count == most)
            for count in sorted(set(tokens), reverse=True)
        ]
        self.keys, self.values = self.groups[0].keys, self.groups[0].values
        self.of_heads = [x for group in self.groups for x in (group.keys, group.values)]
        self.streams = list(self.of_heads)

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*super().tensors, *(group.places for group in self.groups)]

    def append(
        self, keys: Float[Tensor, "B Hk m D"], values: Float[Tensor, "B Hk m D"], limit: int | None
    ) -> bool:
        start = self.length
        for group in self.groups:
            group.append(keys, values, start)
        return True  # the places of groups are new tensors

    def drop_last(self, count: int) -> None:
        super().drop_last(count)
        for group in self.groups[1:]:
            group.places = group.places[:, : group.keys.length]

    def evict(
        self, policy: Eviction, cached: CachedTokens, protection: gather.Protection
    ) -> tuple[int, Moves | None]:
        """Evict what the budgets have no room for.

        From the smallest budget up, so that a head with more tokens keeps those of one with fewer.

        Returns:
            The bytes that were copied for less room, and what has moved of all tokens, if anything.
        """
        score = gather.scores(policy, cached, protection.padding)
        kept, moves, copied = None, None, 0
        for group in reversed(self.groups):
            count = group.keys.length
            if count >= group.tokens:
                slots = gather.slots_to_evict(
                    group.of(score), group.of(cached.positions), policy, group.tokens, protection,
                    None if kept is None else group.of(kept),
                )  # fmt: skip
                moves = gather.moves(slots, count)
                copied = max(copied, group.move(moves))
            if not group.largest:
                kept = group.mask(self.positions.shape[2])
                moves = None
        if moves is None:
            return copied, None
        self._move_all(moves)
        return copied, moves

    def _move_all(self, moves: Moves) -> None:
        """Move what there is once per token as the heads with most have moved theirs."""
        slot = torch.arange(self.positions.shape[2], device=self.positions.device)
        slot = slot.repeat(len(self.positions), 1).scatter_(1, moves.source, moves.to)
        for group in self.groups[1:]:
            group.places = slot.gather(1, group.places.long()).int()
        self._places.move(moves, self.groups[0].tokens)
        if self.beside.buffer is not None:
            self.beside.move(moves, self.groups[0].tokens)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        super().map_batch(change)
        for group in self.groups[1:]:
            if group.places is not None:
                group.places = change(group.places)


def _gathered(x: Tensor, places: Int[Tensor, "B n"], dim: int) -> Tensor:
    """The entries of `x` at these places of each sequence, along `dim`."""
    shape = [1] * x.ndim
    shape[0], shape[dim] = places.shape
    sizes = list(x.shape)
    sizes[dim] = places.shape[1]
    return x.gather(dim, places.long().view(shape).expand(sizes))
