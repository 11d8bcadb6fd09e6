"""Edits of attention modules: a layer changes what goes into the projections and out of them.

Hooks on an attention module and on its `q_proj`, `k_proj` and `v_proj`, as Llama and its like have
them, in decoders. The layer has the parameters, so that the library saves, loads and trains them;
the documents come from the mask that the library hands to the module.
"""

import threading
from abc import abstractmethod
from typing import Literal, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from heedful.checks import UserError
from heedful.hf import Conversion
from heedful.hf.attention import visibility_among
from heedful.hf.family.modules import NAME
from heedful.nn import HeadShape, LayerOutput, Standard, StandardAttention

Part = Literal["input", "q", "k", "v"]
PROJECTIONS: dict[Part, str] = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}

_under_way = threading.local()  # the call of an edited attention module in this thread


class _Call(NamedTuple):
    """One call of an attention module; the document of every token, `None` where all are of one."""

    segments: Int[Tensor, "#B Tk"] | None

    def of(self, x: Float[Tensor, "B T C"]) -> Int[Tensor, "#B T"] | None:
        """Documents of the newest tokens: with a cache there are earlier ones."""
        return None if self.segments is None else self.segments[:, -x.shape[1] :]


class EditingLayer(StandardAttention):
    """Standard attention of what the layer makes of its module's input and projections.

    parts: what it changes.
    """

    any_heads = False
    parts: tuple[Part, ...] = ()

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(Standard(), shape)
        self.roles = frozenset({"decoder"})

    @abstractmethod
    def edited(
        self, part: Part, x: Float[Tensor, "B T C"], segments: Int[Tensor, "#B T"] | None = None
    ) -> Float[Tensor, "B T C"]:
        """The module's input, or queries, keys or values before norms and the rotary embedding."""

    def forward(self, *qkv: Tensor, **options) -> LayerOutput:
        """Softmax attention; raises where nothing has been edited."""
        if getattr(_under_way, "call", None) is None:
            raise UserError(
                f"{type(self).__name__} acts through hooks on its attention module, which are not "
                "there: convert and load with heedful_lab.rivals.models"
            )
        return super().forward(*qkv, **options)


def edit(conversion: Conversion) -> Conversion:
    """Put the hooks of editing layers into a converted model; `revert` removes them.

    Raises:
        ValueError: a module has no projections of its own for queries, keys and values; the model
            is reverted then.
    """
    for module in conversion.model.modules():
        layer = getattr(module, NAME, None)
        if not isinstance(layer, EditingLayer):
            continue
        try:
            _check_projections(module, layer)
        except UserError:
            conversion.revert()
            raise
        conversion.hooks.append(_Edit(module, layer.parts))
    return conversion


class _Edit:
    """The hooks on one attention module; `remove` takes them away."""

    def __init__(self, module: nn.Module, parts: tuple[Part, ...]) -> None:
        self.module, self.input = module, "input" in parts
        self.parts: tuple[Part, ...] = tuple(x for x in PROJECTIONS if x in parts)
        self.handles: dict[str, tuple[nn.Module, object]] = {}
        self.around = [
            module.register_forward_pre_hook(self.begin, with_kwargs=True),
            module.register_forward_hook(_end, always_call=True),
        ]
        self.follow()

    def begin(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Begin a call of the attention module, into which its projections run."""
        self.follow()
        visibility = visibility_among(args, kwargs)
        call = _Call(None if visibility is None else visibility.segments())
        _under_way.call = call
        if not self.input:
            return args, kwargs
        x = args[0] if args else kwargs["hidden_states"]
        x = getattr(module, NAME).edited("input", x, call.of(x))
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    def follow(self) -> None:
        """Move hooks to what stands there now: an adapter, maybe, around what stood there."""
        for part in self.parts:
            now = getattr(self.module, PROJECTIONS[part])
            hooked, handle = self.handles.get(part, (None, None))
            if now is hooked:
                continue
            if handle is not None:
                handle.remove()
            for key, hook in list(now._forward_hooks.items()):  # torch.ao copies hooks as it swaps
                if isinstance(hook, _Projection) and hook.attention is self.module:
                    del now._forward_hooks[key]
            own = _Projection(self.module, part)
            self.handles[part] = now, now.register_forward_hook(own)

    def remove(self) -> None:
        """Take the hooks away, from what stands there now."""
        self.follow()
        for _, handle in self.handles.values():
            handle.remove()
        for handle in self.around:
            handle.remove()


class _Projection(NamedTuple):
    """A forward hook that lets the layer change what a projection gives; models can be copied."""

    attention: nn.Module
    part: Part

    def __call__(self, module: nn.Module, args: tuple, output: Float[Tensor, "B T C"]) -> Tensor:
        call = getattr(_under_way, "call", None) or _Call(None)
        return getattr(self.attention, NAME).edited(self.part, output, call.of(output))


def _end(module: nn.Module, args: tuple, output: object) -> None:
    """End the call of the attention module that runs in this thread."""
    _under_way.call = None


def _check_projections(module: nn.Module, layer: EditingLayer) -> None:
    """Raise unless each projection gives the queries, keys or values of all heads, and no more."""
    shape = layer.shape
    heads = {"q": shape.heads, "k": shape.key_heads, "v": shape.key_heads}
    for part, name in PROJECTIONS.items():
        channels = getattr(getattr(module, name, None), "out_features", None)
        if channels != heads[part] * shape.dim:
            found = "none" if channels is None else f"one of {channels} channels"
            raise UserError(
                f"model: {type(module).__name__} must have a {name} that gives "
                f"{heads[part] * shape.dim} channels, as Llama and its like have, for "
                f"{type(layer).__name__}, and has {found}; take another model or mechanism"
            )
