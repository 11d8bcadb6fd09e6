"""The one place where the tokens to evict are chosen, and their slots in a cache filled again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from heedful.checks import UserError
from heedful.eviction.policy import CachedTokens, Eviction
from heedful.nn import Layer, LayerInputs
from heedful.ops import Visibility

_BLOCK = 64  # query rows whose weights are in memory at once


def check_policy(policy: Eviction, layer: Layer, tokens: int | None) -> None:
    """Raise unless the policy supports the layer, under a budget of so many tokens if any."""
    name = type(policy).__name__
    if layer.summarises:
        raise UserError(
            f"eviction: {name} does not support {type(layer).__name__}, whose cache has summaries "
            "in place of far tokens already; leave eviction out"
        )
    if layer.tails.get("queries") and not layer.tails.get("keys"):
        raise UserError(
            f"eviction: {name} does not support {type(layer).__name__} with a convolution over "
            "keys, whose neighbours would change; give this layer None tokens (it keeps "
            "everything), or take a mechanism without convolutions"
        )
    policy.check(layer)
    least = layer.newest_keys + 2
    if tokens is not None and layer.newest_keys and tokens < policy.sinks + least:
        raise UserError(
            f"tokens must be at least {policy.sinks + least} here: {policy.sinks} sinks, the "
            f"{layer.newest_keys} newest, whose keys are not final, one that leaves and the next "
            f"one, got {tokens}"
        )
    if tokens is not None and layer.keeps_first and tokens < policy.recent + 2:
        raise UserError(
            f"tokens must be at least {policy.recent + 2} here: the mechanism's first token, "
            f"{policy.recent} recent ones and the next one, got {tokens}"
        )


def check_visibility(visibility: Visibility, layer: Layer, before: int) -> Visibility:
    """Visibility of a call, without what an evicting cache does not need.

    Arguments:
        visibility: of all tokens so far.
        layer: whose cache it is.
        before: how many of the tokens came before the call.

    Raises:
        ValueError: tokens that may be evicted are treated apart, or see later ones.
    """
    if layer.keeps_first and visibility.documents is not None:
        raise UserError(
            f"eviction: {type(layer).__name__} protects the first token of every chunk or "
            "document, which a cache that evicts may have evicted; use heedful.new_cache(model, "
            "eviction=False)"
        )
    if visibility.mutual is None:
        return visibility
    if bool((visibility.mutual[:, before:] >= 0).any()):
        raise UserError(
            "the cache evicts tokens, and this call has tokens that see later ones (an "
            "image); use heedful.new_cache(model, eviction=False)"
        )
    return replace(visibility, mutual=None)


class Padding(NamedTuple):
    """The padding of some sequences.

    real: `True` for a real token, `[B or 1, total]` of all that have come, or `[B, n]` of those in
        the slots.
    start: the position of each sequence's first real token, `[B or 1, 1]`.
    by_slot: whether `real` is of those in the slots.
    """

    real: Bool[Tensor, "#B m"]
    start: Int[Tensor, "#B 1"]
    by_slot: bool = False

    @classmethod
    def of(cls, real: Bool[Tensor, "#B total"] | None) -> "Padding | None":
        """From a mask of all tokens that have come; `None` where all are real."""
        return None if real is None else cls(real, real.int().argmax(1, keepdim=True))

    def at(self, positions: Int[Tensor, "B n"]) -> Bool[Tensor, "B n"]:
        """`True` for the slots whose tokens are real."""
        return (
            self.real if self.by_slot else self.real.expand(len(positions), -1).gather(1, positions)
        )


class KeepRules(NamedTuple):
    """Rules that decide, beside the policy's scores, which tokens are evicted.

    total: how many tokens of each sequence have come.
    prompt: how many of them are the prompt's.
    first: whether the first one is never evicted, not even where no query sees it any more: the
        mechanism treats it apart, and would take another one for it.
    windows: how far back the layer's queries see.
    padding: which tokens are padding; `None` where all are real.
    newest: how many of the newest tokens are never evicted, and stay the last ones in order.
    """

    total: int
    prompt: int
    first: bool
    windows: tuple[int, ...]
    padding: Padding | None
    newest: int = 0


def scores(policy: Eviction, cached: CachedTokens, padding: Padding | None) -> Float[Tensor, "B n"]:
    """The policy's scores, with positions counted from each sequence's first real token.

    So padding on the left decides nothing; its own tokens count as at position 0, and are evicted
    first whatever their scores.
    """
    if padding is not None:
        positions = (cached.positions - padding.start).clamp(min=0)
        cached = cached._replace(positions=positions)
    return policy.score(cached)


def slots_to_evict(
    score: Float[Tensor, "B n"],
    positions: Int[Tensor, "B n"],
    policy: Eviction,
    tokens: int,
    rules: KeepRules,
) -> Int[Tensor, "B m"]:
    """The slots to evict, so that less than `tokens` tokens are left.

    Padding comes first, and what no query sees any more; protected tokens never. Of equal scores
    the oldest token is evicted.

    Arguments:
        score: the policy's.
        positions: of the tokens in all slots.
        policy: for what it protects.
        tokens: the budget.
        rules: what else decides.

    Returns:
        Slots in ascending order.
    """
    real, start = None, 0
    if rules.padding is not None:
        start, real = rules.padding.start, rules.padding.at(positions)
    first = start + max(policy.sinks, rules.first)
    protected = (positions < first) | (positions >= rules.total - policy.recent)
    if policy.keep_prompt:
        protected |= positions < rules.prompt
        _check_room(protected if real is None else protected & real, policy, tokens, rules)
    score = score.float().masked_fill(protected, float("inf"))
    unseen = None if real is None else ~real
    for window in rules.windows:
        far = positions <= rules.total - window
        unseen = far if unseen is None else unseen | far
    if unseen is not None:
        if rules.first:
            unseen = unseen & (positions != start)
        score = score.masked_fill(unseen, float("-inf"))
    if rules.newest:
        newest = positions >= rules.total - rules.newest
        score = score.masked_fill(newest, float("inf"))
    count = positions.shape[1] - (tokens - 1)
    if count == 1:
        score = score.nan_to_num(float("inf"), float("inf"), float("-inf"))
        others = score > score.amin(1, keepdim=True)
        return positions.masked_fill(others, rules.total).argmin(1, keepdim=True)
    by_age = positions.argsort(dim=1)
    lowest = score.gather(1, by_age).argsort(dim=1, stable=True)[:, :count]
    return by_age.gather(1, lowest).sort(dim=1).values


def _check_room(
    protected: Bool[Tensor, "B n"], policy: Eviction, tokens: int, rules: KeepRules
) -> None:
    """Raise unless the protected tokens and the next one fit into the budget."""
    if int(protected.sum(1).max()) >= tokens:
        raise UserError(
            f"keep_prompt=True needs room for the prompt of {rules.prompt} tokens, "
            f"{policy.recent} recent ones and the next one, and the budget is {tokens}; give "
            "more tokens, or keep_prompt=False"
        )


class Moves(NamedTuple):
    """Moves from `n` slots to `left`: the tokens in `source` go to the slots `to`, `[B, n - left]`.

    One alone comes from the last slot.
    """

    to: Int[Tensor, "B m"]
    source: Int[Tensor, "B m"]
    left: int

    @property
    def keep(self) -> Int[Tensor, "B left"]:
        """From which slot each of the slots that stay gets its token."""
        (batch, size), device = self.to.shape, self.to.device
        slot = torch.arange(self.left + size, device=device).repeat(batch, 1)
        return slot.scatter_(1, self.to, self.source)[:, : self.left]

    def on(self, device: torch.device) -> "Moves":
        """The same on another device."""
        if self.to.device == device:
            return self
        return Moves(self.to.to(device), self.source.to(device), self.left)

    def of(self, x: Shaped[Tensor, "B S n"]) -> Shaped[Tensor, "B S left"]:
        """One number per token after the moves."""
        if self.to.shape[1] > 1:  # a part of the old tensor would keep all of it
            return x.gather(2, self.keep[:, None].expand(-1, x.shape[1], -1))
        last = x[:, :, self.left :]
        return x.scatter(2, self.to[:, None].expand_as(last), last)[:, :, : self.left]


def moves(slots: Int[Tensor, "B m"], count: int, newest: int = 0) -> Moves:
    """Moves that fill the slots to evict, ascending, of `count` ones.

    What stays of the last m slots goes into the holes before them, in the holes' order. The other
    slots to evict are last slots themselves: what is moved there is dropped with them. The last
    `newest` slots are apart from that, and stay the last ones.
    """
    batch, size = slots.shape
    left = count - size
    if newest:
        body, last = moves(slots, count - newest), torch.arange(newest, device=slots.device)
        last = last.expand(batch, -1)
        to = torch.cat([body.to, last + (left - newest)], dim=1)
        return Moves(to, torch.cat([body.source, last + (count - newest)], dim=1), left)
    if size == 1:
        return Moves(slots, torch.full_like(slots, left), left)
    evicted = torch.zeros(batch, count, dtype=torch.bool, device=slots.device)
    source = left + evicted.scatter_(1, slots, True)[:, left:].int().argsort(dim=1, stable=True)
    return Moves(slots, source, left)


def attention_received(
    layer: Layer,
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk n Dk"],
    queries: int,
    *,
    visibility: Visibility,
    scale: float | None,
    inputs: LayerInputs,
) -> Float[Tensor, "B n"]:
    """The weights of the newest queries on every token, summed over them, mean of the heads.

    Arguments:
        layer: whose maps these are.
        q, k: of the last call: queries of its tokens, which are the last, and all keys.
        queries: how many of the newest queries count.
        visibility, scale, inputs: of that call; `inputs.state` is the one before it.
    """
    new, state = q.shape[2], inputs.state
    received = torch.zeros(len(k), k.shape[2], dtype=torch.float32, device=k.device)
    # F runs through all rows: the newest need what those before them have masked.
    for start, stop in _blocks(0 if layer.running == "F" else new - queries, new):
        later = new - stop
        cut = k.shape[2] - later
        block = inputs.before(later, stop - start)._replace(state=state)
        if block.rows is not None:
            block = block._replace(rows={name: x[:, :, :cut] for name, x in block.rows.items()})
        maps = layer.maps(
            q[:, :, start:stop], k[:, :, :cut], visibility=visibility.part(0, cut), scale=scale,
            inputs=block,
        )  # fmt: skip
        newest = maps.weights[:, :, max(0, new - queries - start) :]
        received[:, :cut] += newest.float().abs().mean(1).sum(1)
        if maps.masking is not None:
            masking = maps.masking.sum(2)
            state = masking if state is None else pad(state, (0, cut - state.shape[2])) + masking
    return received


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, _BLOCK):
        yield first, min(first + _BLOCK, stop)
