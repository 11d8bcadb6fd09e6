"""Hooks on projections: a layer changes what goes into a family's projections and out of them.

A layer that declares it is called with the module's input, and with queries, keys and values as
the projections give them; norms, rotation and cache remain the family's. The layout of a fused QKV
projection is inferred by running the module on channel indices, each of which it has to pass to its
attention function.
"""

import inspect
import threading
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.hf.cache.layer import LayerCache
from heedful.hf.family.modules import SOURCES
from heedful.hf.versions import attention_replaced
from heedful.nn import HeadShape, Layer, ProjectionContext
from heedful.nn.layer import Projection
from heedful.ops import Visibility

NAME = "heedful"
"""What a converted attention module calls its layer."""

PROJECTION_HOOKS = "heedful_projection_hooks"
"""What a converted attention module calls the hooks on its projections."""

PARTS: tuple[Projection, ...] = ("q", "k", "v")
_APART = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
_FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")

_under_way = threading.local()  # the attention call of this thread


class Call(NamedTuple):
    """Data of an attention call's tokens before it attends.

    segments: the document of every token seen so far, `[B or 1, n]`; `None` where all are of one.
    cache: the layer's part of the cache, if it has one.
    """

    segments: Int[Tensor, "#B n"] | None = None
    cache: LayerCache | None = None

    def tokens(
        self, layer: Layer, part: str, x: Tensor, took: Tensor | None = None
    ) -> ProjectionContext:
        """Context of the tokens of `x` for the layer; the cache keeps the newest of them."""
        if not layer.past_inputs:
            return ProjectionContext(input=took)
        past = None if self.cache is None else self.cache.newest(part, x)
        count = x.shape[1] + (0 if past is None else past.shape[1])
        segments = None if self.segments is None else self.segments[:, -count:]
        return ProjectionContext(took, past, segments)


def begin_call(layer: Layer, visibility: Visibility | None, cache: object) -> Call:
    """Begin the call of one attention module, which its projections run into; `end_call` ends it.

    Attention modules do not run inside each other, so that there is one call in each thread.
    """
    segments = visibility.segments() if layer.past_inputs and visibility is not None else None
    _under_way.call = Call(segments, cache if isinstance(cache, LayerCache) else None)
    return _under_way.call


def end_call() -> None:
    """End the call of the attention module that runs in this thread."""
    _under_way.call = None


class ProjectionEdit(NamedTuple):
    """A forward hook that lets a layer change what a projection gives.

    A class, so that models can be copied and pickled.

    attention: the attention module.
    parts: which of queries, keys and values the projection gives.
    widths: how many channels each of them has.
    order: where these channels stand, one part after the other; `None` where they stand so.
    back: where the part's channels are, in the order of the projection.
    """

    attention: nn.Module
    parts: tuple[Projection, ...]
    widths: tuple[int, ...]
    order: Int[Tensor, " C"] | None = None
    back: Int[Tensor, " C"] | None = None

    def __call__(self, module: nn.Module, inputs: tuple, output: Float[Tensor, "B T C"]) -> Tensor:
        layer: Layer = getattr(self.attention, NAME)
        call = getattr(_under_way, "call", None) or Call()
        if self.order is not None:
            output = output.index_select(-1, self.order.to(output.device))
        changed = []
        for part, x in zip(self.parts, output.split(self.widths, dim=-1), strict=True):
            heads = x.unflatten(-1, (-1, layer.shape.dim))
            tokens = call.tokens(layer, part, heads, inputs[0])
            changed.append(layer.before_rotation(part, heads, tokens).flatten(-2))
        output = changed[0] if len(changed) == 1 else torch.cat(changed, dim=-1)
        return output if self.back is None else output.index_select(-1, self.back.to(output.device))


class ProjectionHook:
    """One projection of an attention module, and the hook on it.

    name: what the attention module calls the projection.
    module: what stands there and has the hook.
    """

    def __init__(self, name: str, hook: ProjectionEdit) -> None:
        self.name, self.hook, self.module = name, hook, None

    def follow(self) -> None:
        """Move the hook to what stands there now: an adapter, maybe, around what stood there."""
        module = getattr(self.hook.attention, self.name)
        if module is self.module:
            return
        self.close()
        for key, hook in list(module._forward_hooks.items()):  # torch.ao copies hooks as it swaps
            if isinstance(hook, ProjectionEdit) and hook.attention is self.hook.attention:
                del module._forward_hooks[key]
        self.module, self.handle = module, module.register_forward_hook(self.hook)

    def close(self) -> None:
        """Take the hook away."""
        if self.module is not None:
            self.handle.remove()
            self.module = None


def projection_hooks(module: nn.Module, layer: Layer) -> list[ProjectionHook]:
    """The projections of an attention module as a layer can change them; nothing is hooked yet.

    Raises:
        ValueError: the family does not project so that its queries, keys and values can be told
            apart, or cannot take as many of them as the layer gives it.
    """
    shape, several = layer.shape, layer.queries_per_head
    queries, keys = shape.heads * shape.dim, shape.key_heads * shape.dim
    widths = (queries, keys, keys)
    for names in _APART:
        if not all(isinstance(getattr(module, name, None), nn.Module) for name in names):
            continue
        for name, width in zip(names, widths, strict=True):
            channels = getattr(getattr(module, name), "out_features", width)
            if channels != width:
                raise _refused(
                    module,
                    f"its {name} gives {channels} channels, and its queries, keys and values have "
                    f"{queries}, {keys} and {keys}: it makes something else of the others",
                )
        if several > 1:
            _check_widened(module, names, shape, several)
        each = zip(names, PARTS, widths, strict=True)
        return [
            ProjectionHook(name, ProjectionEdit(module, (part,), (width,)))
            for name, part, width in each
        ]
    fused = [name for name in _FUSED if isinstance(getattr(module, name, None), nn.Module)]
    if len(fused) != 1:
        raise _refused(
            module,
            f"it has neither projections of queries, of keys and of values by known names "
            f"({', '.join(_APART[0])}) nor one of all three ({', '.join(_FUSED)})",
        )
    if several > 1:
        raise _refused(
            module,
            f"its {fused[0]} gives queries, keys and values in one, cut at fixed places, and the "
            f"mechanism gives it {several} queries per head",
        )
    order = _order(module, fused[0], shape, widths)
    back = None if order is None else order.argsort()
    return [ProjectionHook(fused[0], ProjectionEdit(module, PARTS, widths, order, back))]


class _Reached(Exception):
    """The attention function was called; the arguments are queries, keys and values."""


@torch.no_grad()
def _operands(
    module: nn.Module, shape: HeadShape, outputs: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Operands that a family makes of its projections' outputs, at a position without rotation.

    Arguments:
        outputs: by the projection's name, what it shall give, `[1, 1, C]`.
    """

    def attend(module, query, key, value, *args, **kwargs):
        raise _Reached(query, key, value)

    device = next(iter(outputs.values())).device
    weight = next(p for p in module.parameters() if p.is_floating_point())
    x = torch.zeros(1, 1, shape.hidden, device=weight.device, dtype=weight.dtype)
    options = {"attention_mask": None}
    if shape.role == "cross":
        source = x.new_zeros(1, 1, shape.source or shape.hidden)
        takes = inspect.signature(type(module).forward).parameters
        options |= {name: source for name in SOURCES if name in takes}
    hooks = [
        getattr(module, name).register_forward_hook(lambda *_, output=output: output)
        for name, output in outputs.items()
    ]
    reason = "it does not call its attention function"
    try:
        with attention_replaced(module, attend):
            for width in (shape.dim // 2, shape.dim):  # some families give every angle once
                angles = (torch.ones(1, 1, width), torch.zeros(1, 1, width))
                angles = tuple(x.to(device) for x in angles)
                try:
                    type(module).forward(module, x, position_embeddings=angles, **options)
                except _Reached as reached:
                    return reached.args
                except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    why = f"{type(error).__name__}: {error}"
                    reason = f"its attention cannot be asked alone ({why})"
    finally:
        for hook in hooks:
            hook.remove()
    raise _refused(module, reason)


def _order(
    module: nn.Module, name: str, shape: HeadShape, widths: tuple[int, int, int]
) -> Int[Tensor, " C"] | None:
    """Order of the channels of queries, keys and values in one projection's output."""
    channels = torch.arange(sum(widths), dtype=torch.float32)[None, None]
    device = next(getattr(module, name).parameters()).device
    channels = channels if device.type == "meta" else channels.to(device)
    operands = _operands(module, shape, {name: channels})
    heads = (shape.heads, shape.key_heads, shape.key_heads)
    fits = [x.shape == (1, n, 1, shape.dim) for x, n in zip(operands, heads, strict=True)]
    order = torch.cat([x.flatten() for x in operands]).cpu()
    numbers = channels.flatten().cpu()
    if not all(fits) or not torch.equal(order.sort().values, numbers):
        raise _refused(
            module,
            f"not every channel that its {name} gives reaches its attention as it is, so that "
            "queries, keys and values cannot be told apart",
        )
    return None if torch.equal(order, numbers) else order.long()


def _check_widened(
    module: nn.Module, names: tuple[str, ...], shape: HeadShape, queries_per_head: int
) -> None:
    """Raise unless the family takes so many queries per head."""
    weight = next(p for p in module.parameters() if p.is_floating_point())
    sizes = (shape.heads * queries_per_head, shape.key_heads, shape.key_heads)
    outputs = {
        name: torch.ones(1, 1, n * shape.dim, device=weight.device, dtype=weight.dtype)
        for name, n in zip(names, sizes, strict=True)
    }
    for operand, n in zip(_operands(module, shape, outputs), sizes, strict=True):
        if operand.shape != (1, n, 1, shape.dim):
            raise _refused(
                module,
                f"of {n} heads it makes {tuple(operand.shape)}, and the mechanism gives it "
                f"{queries_per_head} queries per head",
            )


def _refused(module: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"model: {type(module).__name__} cannot be given a mechanism that changes queries, keys or "
        f"values before the rotary embedding, because {reason}"
    )
