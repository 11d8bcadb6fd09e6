"""Data of one forward pass: token ids, positions, packed documents, padding.

transformers looks for packed documents only where there is neither a mask nor a cache, and else
lets them see each other. So `ReadCall` reads a model's arguments before the model does. To read a
tensor's value means to wait for a GPU: all values of a pass are read at once, and none where it has
neither a mask nor positions.
"""

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Real, Shaped
from torch import Tensor
from torch.nn import functional as F
from transformers.utils import is_tracing

from heedful.checks import UserError
from heedful.hf.versions import cache_among, cache_of
from heedful.nn.layer import Shared
from heedful.ops import Visibility

_PACKED = "heedful_packed"  # marks a cache that holds packed documents


class Strength(NamedTuple):
    """LoRA strength: of each sequence or token, or of all; `None` turns LoRA off."""

    factor: Float[Tensor, "B n"] | float | None


@dataclass
class ForwardPass:
    """Data known of a forward pass.

    token_ids: the new tokens, where ids were given.
    positions: theirs.
    documents: the document of every token; `None` where all are of one.
    mask_shape: of its 2-D mask, `None` without one.
    unpadded: whether all tokens of that mask are real; `None` where that is not known.
    target: real tokens of a decoder's row so far, noted for its cross-attention.
    shared: what layers keep for each other.
    sources: the arguments that documents and padding were read from.
    strength: of matrices that act after an eviction, once it is known.
    """

    token_ids: Int[Tensor, "B T"] | None = None
    positions: Int[Tensor, "#B T"] | None = None
    documents: Int[Tensor, "#B T"] | None = None
    mask_shape: torch.Size | None = None
    unpadded: bool | None = None
    target: Bool[Tensor, "B n"] | None = None
    shared: Shared | None = None
    sources: tuple = (None, None, None, None)
    strength: Strength | None = None


class _Thread(threading.local):
    """A mask function is handed no positions: it finds the pass here."""

    forward_pass: ForwardPass | None = None


_thread = _Thread()


def forward_pass() -> ForwardPass:
    """The forward pass under way in this thread; an empty one between passes."""
    if _thread.forward_pass is None:
        _thread.forward_pass = ForwardPass()
    return _thread.forward_pass


class ReadCall(NamedTuple):
    """A forward pre-hook that reads packed documents, ids and positions from a model's arguments.

    A class, so that converted models can be copied and pickled.

    names: the parameters of the model's forward, in order.
    apart: whether attention can keep documents apart, as no other layer mixes tokens.
    crosses: whether the model has cross-attention.
    """

    names: tuple[str, ...]
    apart: bool
    crosses: bool = False

    def __call__(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        mask = arguments.get("attention_mask")
        if isinstance(mask, dict):
            return  # the model around this one has read its call, and made the masks
        if isinstance(mask, Tensor) and mask.ndim == 4:
            # Generate makes it of the padding for a static cache; else it may say anything.
            static = getattr(cache_among(arguments), "is_compileable", False)
            mask = see_themselves(mask).int() if static else None
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        sources = (
            mask,
            arguments.get("position_ids"),
            cache_among(arguments),
            arguments.get("cu_seq_lens_q"),
        )
        around = forward_pass()
        if mask is not None and all(map(operator.is_, sources, around.sources)):
            documents, unpadded = around.documents, around.unpadded  # a head's, around this one
        else:
            documents, unpadded = _read(arguments, mask)
        if documents is not None and not self.apart:
            require(
                (documents == documents[:, :1]).all(),
                "position_ids start again, and this model has layers beside attention (recurrent "
                "ones, convolutions) that would mix packed documents: give each a row of its own"
                if not self.crosses
                else "position_ids start again, and cross-attention would mix packed documents: "
                "give each a row of its own",
            )
            documents = None
        _thread.forward_pass = ForwardPass(
            token_ids=arguments.get("input_ids"),
            positions=_positions(arguments),
            documents=documents,
            mask_shape=None if mask is None else mask.shape,
            unpadded=unpadded,
            shared=Shared(),
            sources=sources,
        )


class ForgetCall(NamedTuple):
    """The forward hook that ends what `ReadCall` began, also after an error."""

    def __call__(self, module: torch.nn.Module, args: tuple, output: object) -> None:
        packed, _thread.forward_pass = forward_pass().documents is not None, None
        if packed and (cache := cache_of(output)) is not None:
            setattr(cache, _PACKED, True)


def see_themselves(mask: Shaped[Tensor, "B H T n"]) -> Bool[Tensor, "B T"]:
    """The newest tokens that attend to themselves, by a mask or by what is added to logits."""
    own = mask[:, 0, :, -mask.shape[2] :].diagonal(dim1=-2, dim2=-1)
    return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2


def require(condition: Tensor, message: str) -> None:
    """Raise unless this holds; a compiled or exported model raises when it runs."""
    if is_tracing(condition):
        torch._assert_async(condition, message)
    elif not bool(condition):
        raise UserError(message)


def _read(
    arguments: dict, mask: Real[Tensor, "B n"] | None
) -> tuple[Int[Tensor, "#B T"] | None, bool | None]:
    """The document of every token, if there are several, and whether no token is padding.

    A document starts at each real token whose position is not after that of the real token before
    it. Positions of padding mean nothing: `generate` fills them with whatever number.
    """
    if getattr(cache_among(arguments), _PACKED, False):
        raise UserError(
            "the cache holds packed documents, and a new token would see all of them; generate "
            "from one document per row"
        )
    cached, positions = _cached_tokens(arguments), arguments.get("position_ids")
    cached = isinstance(cached, Tensor) or cached > 0  # a tensor is of a static cache with tokens
    positions = positions if isinstance(positions, Tensor) and positions.ndim == 2 else None
    step = cached and positions is not None and positions.shape[1] == 1
    starts = None
    if step and not is_tracing(positions):
        again = (positions == 0).any()  # a first glance: only there a document can start
    elif positions is not None:
        starts = _starts(positions, mask, cached)
        again = starts.any()
    questions = [] if mask is None else [mask.bool().all()]
    questions += [] if positions is None else [again]
    answers = _values(questions)
    unpadded = None if mask is None else answers[0]
    if positions is None or answers[-1] is False:
        return None if cached else _from_offsets(arguments), unpadded
    if not cached:
        return starts.cumsum(1), unpadded
    starts = _starts(positions, mask, cached) if starts is None else starts
    require(
        ~starts.any(),
        "position_ids start again in a step that continues a filled cache: a new document would "
        "see the old ones; start it with a new cache",
    )
    return None, unpadded


def _values(questions: Sequence[Bool[Tensor, ""]]) -> list[bool | None]:
    """The values of some tensors, read at once; `None` where a graph is traced."""
    if not questions or is_tracing(questions[0]):
        return [None] * len(questions)
    device = next((x.device for x in questions if x.device.type != "cpu"), questions[0].device)
    return torch.stack([x.to(device) for x in questions]).tolist()


def _starts(
    positions: Int[Tensor, "#B T"], mask: Int[Tensor, "B n"] | None, cached: bool
) -> Bool[Tensor, "B T"]:
    """Mark the new tokens that start a document after another one."""
    tokens = positions.shape[1]
    masked = mask is not None and mask.shape[1] >= tokens
    real = mask[:, -tokens:].to(positions.device).bool() if masked else positions == positions
    token = torch.arange(tokens, device=positions.device).expand(real.shape)
    newest = token.where(real, -1).cummax(1).values
    before = F.pad(newest[:, :-1], (1, 0), value=-1)  # the real token before each
    positions = positions.expand(real.shape)
    previous = positions.gather(1, before.clamp(min=0))
    starts = real & (before >= 0) & (positions <= previous)
    if not cached:
        return starts
    earlier = mask[:, :-tokens].to(real.device).bool().any(1, keepdim=True) if masked else True
    return starts | (real & (before < 0) & (positions == 0) & earlier)


def _positions(arguments: dict) -> Int[Tensor, "#B T"] | None:
    """The positions of a forward pass, also where the model makes them itself."""
    positions = arguments.get("position_ids")
    if isinstance(positions, Tensor):
        return positions if positions.ndim == 2 else None  # several axes, as of images
    tokens = _tokens(arguments)
    if tokens is None:
        return None
    return (torch.arange(tokens.shape[1], device=tokens.device) + _cached_tokens(arguments))[None]


def _cached_tokens(arguments: dict) -> Int[Tensor, ""] | int:
    """Number of tokens that the cache has seen; of a static cache a tensor, once there are some."""
    cache = cache_among(arguments)
    return 0 if cache is None else cache.get_seq_length()


def _tokens(arguments: dict) -> Tensor | None:
    """The new tokens, as ids or as embeddings."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids


def _from_offsets(arguments: dict) -> Int[Tensor, "1 T"] | None:
    """Documents from the cumulative lengths that flattening collators give beside positions."""
    offsets = arguments.get("cu_seq_lens_q")
    if offsets is None:
        return None
    return Visibility.packed(offsets, length=_tokens(arguments).shape[1]).documents
