"""A family's rotary embedding, to be used at any positions.

The rotation is inferred by running the family's attention on one vector at two positions: its own
functions must turn the first result into the second. Other rotations are not supported.
"""

import inspect
from contextlib import suppress
from typing import NamedTuple

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from heedful.checks import UserError
from heedful.hf.versions import attention_replaced

_ADAPTING = ("dynamic", "longrope")  # whose frequencies change with the length of the row


class FamilyRotation(NamedTuple):
    """The rotary embedding of one attention layer.

    rotary: the module that turns positions into cosines and sines.
    apply: the family's function that rotates with these.
    kind: the layer's kind, where the module asks for it.
    width: how many of a head's first channels it rotates; `None` for all.
    factor: by how much the family lengthens what it rotates, which is left out here.
    """

    rotary: nn.Module
    apply: object
    kind: str | None
    width: int | None
    factor: float

    def __call__(
        self, x: Float[Tensor, "B H n D"], positions: Real[Tensor, "#B n"]
    ) -> Float[Tensor, "B H n D"]:
        """`x` rotated to these positions, computed in fp32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        kind = {} if self.kind is None else {"layer_type": self.kind}
        cos, sin = (x / self.factor for x in self.rotary(wide, positions.float(), **kind))
        if self.width is None:
            return self.apply(wide, wide, cos, sin)[0].to(x.dtype)
        turned = self.apply(wide[..., : self.width], wide[..., : self.width], cos, sin)[0]
        return torch.cat([turned, wide[..., self.width :]], dim=-1).to(x.dtype)


class _Reached(Exception):
    """The attention function was called: all that is needed of a family's attention."""


class _Watched(TorchFunctionMode):
    """Sees whether a tensor is used while it is on."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.used = tensor, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.used |= any(x is self.tensor for x in args)
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def rotation_of(model: PreTrainedModel, module: nn.Module) -> FamilyRotation | None:
    """The rotary embedding of an attention module; `None` where it has none.

    Arguments:
        model: that the module is in.
        module: the attention module.

    Raises:
        ValueError: the family rotates in a way that cannot be followed.
    """
    source = inspect.getmodule(type(module))
    takes = inspect.signature(type(module).forward).parameters
    if "position_embeddings" not in takes:
        if "rotary" in inspect.getsource(type(module).forward):
            raise _refused(module, "it makes its rotary embedding inside its attention")
        return None
    apply = getattr(source, "apply_rotary_pos_emb", None)
    if apply is None:
        raise _refused(module, "it rotates by a function of its own")
    candidates = [
        each
        for each in model.modules()
        if type(each).__name__.endswith("RotaryEmbedding")
        and inspect.getmodule(type(each)) is source
    ]
    reason = "no rotary embedding of its family was found"
    for rotary in candidates:
        rotation = _rotation(module, rotary, apply)
        if rotation is None:
            reason = f"its frequencies change with the length of the row ({', '.join(_ADAPTING)})"
            continue
        try:
            rotates = _probe(module, rotation)
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            reason = f"its attention cannot be asked alone ({type(error).__name__}: {error})"
            continue
        if rotates is None:
            reason = "its keys at one position are not what its own functions make of another's"
            continue
        return rotation if rotates else None
    raise _refused(module, reason)


def _rotation(module: nn.Module, rotary: nn.Module, apply) -> FamilyRotation | None:
    kind = None
    if "layer_type" in inspect.signature(type(rotary).forward).parameters:
        kind = module.config.layer_types[module.layer_idx]
    rope = getattr(rotary, "rope_type", "default")
    if (rope.get(kind, "default") if isinstance(rope, dict) else rope) in _ADAPTING:
        return None
    name = "attention_scaling" if kind is None else f"{kind}_attention_scaling"
    factor = torch.tensor(getattr(rotary, name, 1.0), dtype=torch.float32).item()  # as of cosines
    return FamilyRotation(rotary, apply, kind, getattr(module, "rotary_ndims", None), factor)


def _probe(module: nn.Module, rotation: FamilyRotation) -> bool | None:
    """Test whether the module rotates its keys as `rotation`; `None` where it does otherwise."""
    keys: list[Tensor] = []

    def attend(module, query, key, value, *args, **kwargs):
        keys.append(key)
        raise _Reached

    weight = next(p for p in module.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    width = next(p.shape[-1] for n, p in module.named_parameters() if n.endswith("proj.weight")
                 or "query_key_value" in n or n.endswith("qkv.weight") or p.ndim == 2)  # fmt: skip
    x = torch.randn(1, 1, width, generator=generator).to(weight.device, weight.dtype)
    x = x.expand(2, -1, -1)  # in rows of their own, so that no convolution mixes them
    kind = {} if rotation.kind is None else {"layer_type": rotation.kind}
    places = torch.tensor([[0.0], [7.0]], device=weight.device)
    cos, sin = rotation.rotary(x, places, **kind)
    watched = _Watched(cos)
    with attention_replaced(module, attend), watched, suppress(_Reached):
        type(module).forward(module, x, position_embeddings=(cos, sin), attention_mask=None)
    if weight.device.type == "meta":  # there are no numbers to compare
        return watched.used
    first, second = keys[0][:1], keys[0][1:]
    if torch.equal(first, second):
        return False
    expected = rotation(first, places[1:])
    error = (expected - second).abs().max() / second.abs().max()
    return True if error < 16 * torch.finfo(second.dtype).eps else None


def _refused(module: nn.Module, reason: str) -> UserError:
    return UserError(
        f"model: the rotary embedding of {type(module).__name__} cannot be applied at any "
        f"position, because {reason}; take a mechanism or a policy that does not need this"
    )
