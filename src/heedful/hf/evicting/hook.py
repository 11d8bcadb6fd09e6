"""The hook that hands an attention module the part of its mask that an evicting cache needs.

Where the cache's policy reads attention weights, it also tells the module's attention function
which layer reads them (observing.py).

The mask of a call is made for all tokens that have come. An evicting layer reads some of them, in
the order of its slots, and gets these columns. Without a mask there is nothing to hand over. The
hook leaves every other cache alone, and keeps nothing of a call: what a call needs is the cache's.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import linear
from transformers import Cache

from heedful.checks import UserError
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.evicting.masking import SelectorRows
from heedful.hf.evicting.observing import forget, observe
from heedful.hf.evicting.static import StaticLayer
from heedful.hf.evicting.step import Step
from heedful.hf.family.call import see_themselves
from heedful.hf.family.modules import NAME
from heedful.hf.versions import cache_name

Mask = Tensor | BlockMask


class MaskColumns:
    """A forward pre-hook of one attention module.

    It also hands the module's input to the selectors beside it, where the layer evicts by these.

    Arguments:
        index: of the module's layer in a cache.
        name: of the cache among the module's arguments.

    Attributes:
        selects: whether the module has a selector beside it.
        observed: whether the module's attention weights can be read.
        proven: the attention implementation for which the module's model was proven to be served.
        proven_observed: the one for which its attention weights were.
        proven_static: the one for which caches were whose shapes do not change.
    """

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.selects = self.observed = False
        self.proven: str | None = None
        self.proven_observed: str | None = None
        self.proven_static: str | None = None

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        mask = kwargs.get("attention_mask")
        if mask is None and not self.selects and not self.observed:
            return None
        cache = kwargs.get(self.name)
        if not isinstance(cache, Cache) or self.index >= len(cache.layers):
            return None
        layer = cache.layers[self.index]
        if not isinstance(layer, EvictingLayer):
            return None
        rows = None
        if layer.map.mask_sums is not None and self.selects:
            rows = _rows(module, args[0] if args else kwargs["hidden_states"])
        if layer.sealed and mask is not None and mask.shape[-2] == 1:
            return args, kwargs | {"attention_mask": _static(mask, layer, rows)}
        if rows is not None:
            layer.rows = rows
        more = {"heedful_layer": layer} if layer.map.observes and self.observed else {}
        if mask is not None and isinstance(mask, Mask):
            more["attention_mask"] = columns(mask, layer)
        return (args, kwargs | more) if more else None


def install(modules: dict[int, nn.Module], observed: bool) -> list[MaskColumns]:
    """The hooks of attention modules by layer, put where they lack one.

    Arguments:
        modules: of an unconverted decoder.
        observed: whether their attention weights are to be read.

    Raises:
        ValueError: they are, and the weights of their attention implementation cannot be observed.
    """
    hooks = []
    if observed:
        for module in modules.values():
            observe(module)
    for index, module in modules.items():
        hook = hook_of(module)
        if hook is None:
            hook = MaskColumns(index, cache_name(module.forward))
            module.register_forward_pre_hook(hook, with_kwargs=True)
        hook.observed = hook.observed or observed
        hook.selects = hasattr(getattr(module, NAME, None), "selector_weights")
        hooks.append(hook)
    return hooks


def remove(model: nn.Module) -> None:
    """Take the hooks out of a model; masks no longer fit the caches that were made for it."""
    for module in model.modules():
        forget(module)
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, MaskColumns):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def hook_of(module: nn.Module) -> MaskColumns | None:
    """The hook of an attention module, if it has one."""
    hooks = module._forward_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, MaskColumns)), None)


def selector_rows(module: nn.Module, x: Float[Tensor, "B T E"]) -> SelectorRows | None:
    """The selector's queries and keys of an attention module's input, where it has a selector."""
    if not hasattr(module._modules.get(NAME), "selector_weights"):
        return None
    return _rows(module, x)


def _rows(module: nn.Module, x: Float[Tensor, "B T E"]) -> SelectorRows:
    """The same of a module that has one."""
    query, key = module._modules[NAME].selector_weights()
    if x.dtype == query.dtype:
        return SelectorRows(linear(x, query), linear(x, key))
    wide = torch.promote_types(x.dtype, query.dtype)
    rows = (linear(x.to(wide), weight.to(wide)) for weight in (query, key))
    return SelectorRows(*(row.to(x.dtype) for row in rows))


def columns(mask: Mask, layer: EvictingLayer) -> Mask:
    """The columns of the tokens that a layer reads in this call, in the order of its slots.

    Arguments:
        mask: of all tokens so far: `[B, H, T, total]`, true or additive; `[B, total]`, true for
            tokens that are no padding; or a `BlockMask`.
        layer: of the cache; the call begins with this.
    """
    total = mask.shape[-1]
    before = layer.before
    new = total - before if len(mask.shape) == 2 else mask.shape[-2]
    if total != before + new:
        raise UserError(
            f"attention_mask must have a column for each of the {before} tokens so far and the "
            f"{new} new ones, got {total}; a cache that evicts counts evicted tokens too"
        )
    step = layer.announce(new, _real(mask, before, new), _device(mask))
    if step.whole:
        return mask
    if layer.map.budget is None:
        return _cut(mask, step.read)
    return _chosen(mask, layer.map.at, step)


def _static(mask: Tensor, layer: StaticLayer, rows: SelectorRows | None) -> Tensor:
    """The mask of one token's query over all slots of a static cache.

    Arguments:
        mask: `[B, 1, 1, 1]`, whether the token sees itself.
        layer: of the cache; the step begins with this.
        rows: the selector's of the token, where the cache evicts by these.
    """
    if mask.shape[-1] != 1:
        raise UserError(
            f"attention_mask of one token must have one column for a static cache, got "
            f"{tuple(mask.shape)}; leave it out, as the cache knows the padding of its prompt"
        )
    visible = layer.step(see_themselves(mask), rows)
    if mask.dtype == torch.bool:
        return visible
    return mask.new_zeros(()).where(visible, torch.finfo(mask.dtype).min)


def _real(mask: Mask, before: int, new: int) -> Bool[Tensor, "B m"]:
    """New tokens that are no padding: those that see themselves."""
    if isinstance(mask, BlockMask):
        row = torch.arange(new, device=_device(mask))
        rows = torch.arange(mask.shape[0], device=_device(mask))[:, None]
        real = mask.mask_mod(rows, torch.zeros_like(rows), row, row + before)
        return real.expand(len(rows), new)  # a function may leave the rows out
    if mask.ndim == 2:
        return mask[:, before:].bool()
    return see_themselves(mask)


def _cut(mask: Mask, count: int) -> Mask:
    """The last columns."""
    if isinstance(mask, BlockMask):
        at = torch.arange(mask.shape[-1] - count, mask.shape[-1], device=_device(mask))
        return _of_blocks(mask, at[None])
    return mask[..., -count:]


def _chosen(mask: Mask, at: Int[Tensor, "#B n"], step: Step) -> Mask:
    """The columns at these positions."""
    if isinstance(mask, BlockMask):
        return _of_blocks(mask, at)
    if len(at) == 1:
        return mask.index_select(-1, at[0])
    if mask.ndim == 2:
        return mask.expand(len(at), -1).gather(1, at)
    _, heads, queries, _ = mask.shape
    at = at[:, None, None].expand(-1, heads, queries, -1)
    return mask.expand(len(at), -1, -1, -1).gather(3, at)


def _of_blocks(mask: BlockMask, at: Int[Tensor, "#B n"]) -> BlockMask:
    batch, _, queries, _ = mask.shape
    shared = len(at) == 1

    def chosen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask.mask_mod(b, h, q, at[0 if shared else b, kv])

    return create_block_mask(chosen, batch, None, queries, at.shape[1], device=_device(mask))


def _device(mask: Mask) -> torch.device:
    """The device of a mask; a `BlockMask` tells that of its parts alone."""
    return mask.kv_num_blocks.device if isinstance(mask, BlockMask) else mask.device
