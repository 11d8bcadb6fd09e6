"""The weights of the newest queries on every token, read where a family calls its attention.

The attention function of an observed module calls the one that the module would have called, and
then hands the cache's layer what the weights follow from. No projection, norm or rotation is
computed again, and the output is the family's own to the last bit.
"""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from heedful.checks import UserError
from heedful.hf.evicting.scores import MOST, Received
from heedful.hf.versions import ImplementationProxy, implementation_of

_BLOCK = 64  # query rows whose weights are in memory at once
_NAMES = {x: f"heedful_observed_{x}" for x in ("sdpa", "eager")}


class AttentionCall(NamedTuple):
    """A call of an attention function, in the layout of transformers.

    query: of the new tokens, which are the last.
    key, value: of all tokens that the call reads.
    mask: `[B or 1, H or 1, Tq, n]`, true where a query sees a key, or added to the logits; `None`
        where queries see all tokens but later ones.
    scaling, softcap, sinks: what becomes of the logits.
    output: what the function has returned for the new tokens.
    """

    query: Float[Tensor, "B H Tq D"]
    key: Float[Tensor, "B Hk n D"]
    value: Float[Tensor, "B Hk n Dv"]
    mask: Tensor | None
    scaling: float | None
    softcap: float | None
    sinks: Float[Tensor, " H"] | None
    output: Float[Tensor, "B Tq H Dv"]


class ObservedConfig(ImplementationProxy):
    """The configuration of an attention module whose weights a cache may read."""

    names = _NAMES

    def __init__(self, config: object) -> None:
        super().__init__(config)
        _register()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        _register()  # a process that opens a pickled model may have made no cache yet


def observe(module: nn.Module) -> None:
    """Let an attention module's calls be observed; its model's own configuration stays.

    Raises:
        ValueError: its attention implementation cannot be observed.
    """
    implementation = implementation_of(module.config)
    if implementation not in _NAMES:
        raise UserError(
            f"model: its attention implementation {implementation!r} tells nobody who attends to "
            f"whom, which the policy reads; take one of {', '.join(_NAMES)}: "
            "model.set_attn_implementation('sdpa')"
        )
    if not isinstance(module.config, ObservedConfig):
        module.config = ObservedConfig(module.config)


def forget(module: nn.Module) -> None:
    """Give an attention module its own configuration back."""
    if isinstance(config := getattr(module, "config", None), ObservedConfig):
        module.config = config.original


def _register() -> None:
    """Make the attention functions of observed modules known; repeats do nothing."""
    for base, name in _NAMES.items():
        if name not in AttentionInterface():
            AttentionInterface.register(name, _observed(base))


def _observed(base: str) -> Callable:
    """The attention function that observes another of this name."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: object,
        heedful_layer: object | None = None,
        heedful_steps: Callable | None = None,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        family = sys.modules[type(module).__module__]
        eager = getattr(family, "eager_attention_forward", None)
        function = family.ALL_ATTENTION_FUNCTIONS.get(base, eager)
        call = (module, query, key, value, attention_mask, *args)
        if heedful_steps is not None:  # of a whole sequence
            return heedful_steps(function, *call, **options)
        output = function(*call, **options)
        if heedful_layer is not None:
            scaling, cap = options.get("scaling"), options.get("softcap")
            sinks = options.get("s_aux")
            terms = (attention_mask, scaling, cap, sinks)
            heedful_layer.observe(AttentionCall(query, key, value, *terms, output[0]))
        return output

    return attention


def attention_received(
    call: AttentionCall, queries: int, real: Bool[Tensor, "B Tq"] | None
) -> Float[Tensor, "B n"]:
    """The weights of the newest queries on every token, summed over them, mean of the heads.

    Arguments:
        call: whose weights these are.
        queries: how many of the newest queries count.
        real: which of the new tokens are no padding; the others' weights count nothing.
    """
    new, keys = call.query.shape[2], call.key.shape[2]
    if queries == 1 and real is None:
        return weights(call, new - 1, new).float().mean(1)[:, 0]
    received = call.key.new_zeros(len(call.query), keys, dtype=torch.float32)
    for start, stop in _blocks(new - queries, new):
        rows = weights(call, start, stop).float().mean(1)
        if real is not None:
            rows = rows.masked_fill(~real[:, start:stop, None].to(rows.device), 0)
        received[:, : rows.shape[2]] += rows.sum(1)
    return received


def attention_of_each(
    call: AttentionCall, observes: int | None, real: Bool[Tensor, "B Tq"] | None
) -> Received:
    """The weights of a call that may be taken back, each of the newest queries apart.

    Arguments:
        call: whose weights these are.
        observes: how many queries the policy reads; `None` is all.
        real: as for `attention_received`.
    """
    new, keys = call.query.shape[2], call.key.shape[2]
    start = max(0, new - MOST - (observes or 0))
    rows = call.key.new_zeros(len(call.query), new - start, keys, dtype=torch.float32)
    for first, stop in _blocks(start, new):
        block = weights(call, first, stop).float().mean(1)
        rows[:, first - start : stop - start, : block.shape[2]] = block
    if real is not None:
        rows = rows.masked_fill(~real[:, start:, None].to(rows.device), 0)
    earlier = None
    if start and observes is None:
        before = call._replace(
            query=call.query[:, :, :start],
            key=call.key if call.mask is not None else call.key[:, :, : keys - new + start],
            mask=None if call.mask is None else call.mask[:, :, :start],
        )
        sums = attention_received(before, start, None if real is None else real[:, :start])
        earlier = pad(sums, (0, keys - sums.shape[1]))
    return Received(rows, earlier, new)


def weights(call: AttentionCall, start: int, stop: int) -> Float[Tensor, "B H m n"]:
    """Weights of some queries on each token, but later ones where there is no mask.

    The logits are in the model's precision and the softmax in fp32, as in the reference of
    standard attention.
    """
    query, key, mask = call.query[:, :, start:stop], call.key, call.mask
    batch, heads, rows, dim = query.shape
    if mask is None and (later := call.query.shape[2] - stop):
        key = key[:, :, :-later]
    keys = key.shape[2]
    grouped = query.reshape(batch, key.shape[1], -1, dim)
    logits = (grouped @ key.mT).view(batch, heads, rows, keys)
    logits = logits * (dim**-0.5 if call.scaling is None else call.scaling)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if mask is not None:
        logits = _masked(logits, mask[:, :, start:stop])
    elif rows > 1:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
        logits = logits.masked_fill(~seen, float("-inf"))
    if call.sinks is None:
        return logits.softmax(-1).to(query.dtype)
    sinks = call.sinks.to(logits.dtype)[:, None, None].expand(batch, -1, rows, 1)
    return torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1].to(query.dtype)


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits, with minus infinity where a mask is false, or with what is added to them."""
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, float("-inf"))
    return logits + mask


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, _BLOCK):
        yield first, min(first + _BLOCK, stop)
