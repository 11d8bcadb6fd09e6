"""The one place where tokens are chosen to leave a cache, and moved out of it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from heedful.eviction.policy import Eviction
from heedful.nn import Given, Layer
from heedful.ops import Visibility

_BLOCK = 64  # query rows whose weights stand in memory at once


def check_policy(policy: Eviction, layer: Layer, tokens: int) -> None:
    """Raise unless the policy can serve the layer under a budget of so many tokens."""
    name = type(policy).__name__
    if layer.summarises:
        raise ValueError(
            f"eviction: {name} cannot serve {type(layer).__name__}, whose cache holds summaries in "
            "place of far tokens already; leave eviction out"
        )
    if layer.past_queries:
        raise ValueError(
            f"eviction: {name} cannot serve {type(layer).__name__} with a convolution over keys, "
            "whose neighbours would change; give this layer None tokens (it keeps everything), or "
            "take a mechanism without convolutions"
        )
    if layer.keys_per_head > 1:
        raise ValueError(
            f"eviction: {name} cannot serve {type(layer).__name__}, which counts rotary positions "
            "along the row; leave eviction out"
        )
    if policy.reads_hidden and not layer.keeps:
        raise ValueError(
            f"eviction: {name} needs a mechanism that hides tokens (selective attention), and "
            f"this layer is {type(layer).__name__}; take another policy"
        )
    if layer.keeps_first and tokens < policy.recent + 2:
        raise ValueError(
            f"tokens must be at least {policy.recent + 2} here: the mechanism's first token, "
            f"{policy.recent} recent ones and the next one, got {tokens}"
        )


def servable(visibility: Visibility, layer: Layer, known: int) -> Visibility:
    """Who sees whom in a call, as a cache that evicts can serve it; what it cannot is refused.

    Arguments:
        visibility: of all tokens seen so far.
        layer: whose cache it is.
        known: how many of the tokens were there before the call.
    """
    if layer.keeps_first and visibility.documents is not None:
        raise ValueError(
            f"eviction: {type(layer).__name__} protects the first token of every chunk or "
            "document, which a cache that evicts may have let go; use heedful.new_cache(model, "
            "eviction=False)"
        )
    if visibility.mutual is None:
        return visibility
    if bool((visibility.mutual[:, known:] >= 0).any()):
        raise ValueError(
            "the cache evicts tokens, and this call has tokens that see later ones (an "
            "image); use heedful.new_cache(model, eviction=False)"
        )
    return replace(visibility, mutual=None)


class Guarded(NamedTuple):
    """What decides beside a policy which of a layer's tokens may go.

    seen: how many tokens the layer has seen.
    prompt: how many of them are the prompt's.
    first: whether the first one stays whatever the policy says, and even where no query sees it
        any more: the mechanism treats it apart, and would take another one for it.
    windows: how far back the layer's queries see.
    padding: `True` for a real token, of all seen, `[B or 1, seen]`; `None` where all are.
    """

    seen: int
    prompt: int
    first: bool
    windows: tuple[int, ...]
    padding: Tensor | None


def chosen(
    worth: Float[Tensor, "B n"], at: Int[Tensor, "B n"], policy: Eviction, tokens: int, row: Guarded
) -> Int[Tensor, "B m"]:
    """The slots of the tokens that go, ascending, so that less than `tokens` are left.

    Padding goes first, and what no query sees any more; protected tokens never. Of tokens that are
    worth the same the oldest go.

    Arguments:
        worth: the policy's scores.
        at: where the tokens of all slots stand in their rows.
        policy: for what it protects.
        tokens: the budget.
        row: what else decides.
    """
    real, start = None, 0
    if row.padding is not None:
        start = row.padding.int().argmax(1, keepdim=True)
        real = row.padding.expand(len(at), -1).gather(1, at)
    protected = (at < start + max(policy.sinks, row.first)) | (at >= row.seen - policy.recent)
    if policy.keep_prompt:
        protected |= at < row.prompt
        kept = protected if real is None else protected & real
        if int(kept.sum(1).max()) >= tokens:
            raise ValueError(
                f"keep_prompt=True needs room for the prompt of {row.prompt} tokens, "
                f"{policy.recent} recent ones and the next one, and the budget is {tokens}; give "
                "more tokens, or keep_prompt=False"
            )
    worth = worth.float().masked_fill(protected, float("inf"))
    dead = torch.zeros_like(protected) if real is None else ~real
    for reach in row.windows:
        dead = dead | (at <= row.seen - reach)
    if row.first:
        dead = dead & (at != start)
    worth = worth.masked_fill(dead, float("-inf"))
    drop = at.shape[1] - (tokens - 1)
    oldest = at.argsort(dim=1)
    lowest = worth.gather(1, oldest).argsort(dim=1, stable=True)[:, :drop]
    return oldest.gather(1, lowest).sort(dim=1).values


class Moves(NamedTuple):
    """How `n` slots become `n - m`: the tokens in `source` go to the slots `to`, `[B, m]`.

    keep: from which slot each of the slots that stay gets its token, `[B, n - m]`.
    """

    to: Int[Tensor, "B m"]
    source: Int[Tensor, "B m"]
    keep: Int[Tensor, "B left"]

    def on(self, device: torch.device) -> "Moves":
        """The same on another device."""
        return Moves(*(x.to(device) for x in self))

    def of(self, x: Float[Tensor, "B S n"]) -> Float[Tensor, "B S left"]:
        """One number per token after the moves."""
        return x.gather(2, self.keep[:, None].expand(-1, x.shape[1], -1))


def moves(gone: Int[Tensor, "B m"], held: int) -> Moves:
    """What fills the slots `gone`, ascending, of `held` ones.

    What stays of the last m slots goes into the holes before them, in the holes' order. The rest of
    `gone` are last slots themselves: what is moved there is dropped with them.
    """
    left = held - gone.shape[1]
    marked = torch.zeros(len(gone), held, dtype=torch.bool, device=gone.device)
    source = left + marked.scatter_(1, gone, True)[:, left:].int().argsort(dim=1, stable=True)
    slots = torch.arange(held, device=gone.device).repeat(len(gone), 1)
    return Moves(gone, source, slots.scatter_(1, gone, source)[:, :left])


def observed(
    layer: Layer,
    q: Float[Tensor, "B H Tq D"],
    k: Float[Tensor, "B Hk n D"],
    queries: int,
    *,
    visibility: Visibility,
    scale: float | None,
    given: Given,
) -> Float[Tensor, "B n"]:
    """What the newest queries give every token, summed over them, mean of the heads' weights.

    Arguments:
        layer: whose maps these are.
        q, k: of the last call: queries of its tokens, which are the last, and all keys.
        queries: how many of the newest queries are asked.
        visibility, scale, given: of that call; `given.state` is the one before it.
    """
    new, state = q.shape[2], given.state
    total = torch.zeros(len(k), k.shape[2], dtype=torch.float32, device=k.device)
    # A state runs through all rows: the newest need what those before them have hidden.
    for start, stop in _in_pieces(0 if layer.keeps else new - queries, new):
        later = new - stop
        cut = k.shape[2] - later
        known = given.before(later, stop - start)._replace(state=state)
        if known.beside is not None:
            known = known._replace(beside=known.beside[:, :, :cut])
        maps = layer.maps(
            q[:, :, start:stop], k[:, :, :cut], visibility=visibility.part(0, cut), scale=scale,
            given=known,
        )  # fmt: skip
        asked = maps.weights[:, :, max(0, new - queries - start) :]
        total[:, :cut] += asked.float().abs().mean(1).sum(1)
        if maps.hiding is not None:
            hiding = maps.hiding.sum(2)
            state = hiding if state is None else pad(state, (0, cut - state.shape[2])) + hiding
    return total


def _in_pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, _BLOCK):
        yield first, min(first + _BLOCK, stop)
