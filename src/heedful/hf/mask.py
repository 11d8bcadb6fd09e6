"""What transformers says of visibility, turned into a `Visibility` and held against it.

transformers asks a registered function once per forward pass for the mask of each kind of layer,
and hands the answer to every attention layer. `seen` is that function. What the family's own mask
function says is read at few places: which token sees the one before it gives documents and chunks,
which sees the one after it gives images, and a few whole rows are compared with the `Visibility`
that goes on in its place. What a `Visibility` cannot express is refused.

transformers looks for packed documents only where there is neither a mask nor a cache, and else
lets them see each other. So `ReadCall` reads the positions before the model does.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional as F
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import is_tracing

from heedful.nn.layer import Shared
from heedful.ops import Visibility

_ROWS = 8  # whole rows of the family's mask that are compared
_PACKED = "heedful_packed"  # marks a cache that holds packed documents

# Of the forward pass under way in this thread; a mask function is handed no positions.
_given = threading.local()


class Seen(NamedTuple):
    """What the attention layers of one kind are handed in place of a mask.

    It goes the way of the mask, through the family's own code, so that a layer that is computed
    again in the backward pass gets the same. In `shared` layers keep things for each other.
    """

    visibility: Visibility
    token_ids: Int[Tensor, "B T"] | None
    positions: Int[Tensor, "#B T"] | None
    keys: int  # that it is about
    target: Bool[Tensor, "B n"] | None = None  # real tokens of a decoder's row so far
    shared: Shared | None = None


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
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if isinstance(given.get("attention_mask"), dict):
            return  # the model around this one has read its call, and made the masks
        _given.token_ids, _given.positions = given.get("input_ids"), _positions(given)
        _given.shared = Shared()
        _given.target = None
        documents = _documents(given)
        if documents is not None and not self.apart:
            _require(
                (documents == documents[:, :1]).all(),
                "position_ids start again, and this model has layers beside attention (recurrent "
                "ones, convolutions) that would mix packed documents: give each a row of its own"
                if not self.crosses
                else "position_ids start again, and cross-attention would mix packed documents: "
                "give each a row of its own",
            )
            documents = None
        _given.documents = documents


class ForgetCall(NamedTuple):
    """The forward hook that ends what `ReadCall` began, also after an error."""

    def __call__(self, module: torch.nn.Module, args: tuple, output: object) -> None:
        packed, _given.documents = getattr(_given, "documents", None), None
        _given.token_ids = _given.positions = _given.target = _given.shared = None
        cache = getattr(output, "past_key_values", None)
        if packed is not None and cache is not None:
            setattr(cache, _PACKED, True)


def seen(*args: object, **kwargs: object) -> Seen:
    """The mask function that transformers calls: `visibility_for`, with ids and positions.

    A decoder asks for the mask of its own row first, then for that of the source's, which says
    nothing of the target's padding: it is noted in between.
    """
    ids, positions = getattr(_given, "token_ids", None), getattr(_given, "positions", None)
    visibility, target = visibility_for(*args, **kwargs), getattr(_given, "target", None)
    if visibility.causal:
        _given.target = visibility.padding
    keys = kwargs["kv_length"] if "kv_length" in kwargs else args[2]
    shared = getattr(_given, "shared", None)
    return Seen(visibility, ids, positions, keys, target, shared)


def visibility_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Bool[Tensor, "B n"] | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **others: object,
) -> Visibility:
    """Who sees whom among `kv_length` keys from `kv_offset` on.

    Arguments as transformers gives them: `attention_mask` is 1 for real tokens among all seen so
    far, `local_size` the width of a sliding window or of a chunk.

    Raises:
        ValueError: the family's mask is more than causal order, a window, documents and padding,
            or the lengths do not fit.
    """
    both_ways = "allow_is_bidirectional_skip" in others  # of an encoder, or of its row
    if not both_ways:
        _check_lengths(q_length, kv_length, q_offset, kv_offset, attention_mask)
    padding = None
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        padding = padding if is_tracing(padding) or not bool(padding.all()) else None
    packed = getattr(_given, "documents", None)
    if mask_function is causal_mask_function:
        return Visibility(documents=packed, padding=padding)
    if mask_function is bidirectional_mask_function:
        return Visibility(causal=False, documents=packed, padding=padding)

    said = _Said(mask_function, use_vmap, batch_size, kv_offset, kv_length, device)
    if both_ways:
        window = None if local_size is None else local_size + 1  # it does not count the token
        said.compare(q_offset, q_length, Visibility(causal=False, window=window))
        return Visibility(causal=False, window=window, documents=packed, padding=padding)
    alone, mutual = said.alone(), said.mutual()
    documents, window = _numbered(alone), local_size
    if window is None and alone is None:
        window = said.window(q_offset + q_length - 1)
    said.compare(q_offset, q_length, Visibility(window=window, documents=documents, mutual=mutual))
    if packed is not None and alone is None:
        documents = packed
    elif packed is not None:
        documents = _numbered(_alone_when_packed(said, alone, packed, padding))
    return Visibility(window=window, documents=documents, padding=padding, mutual=mutual)


class _Said(NamedTuple):
    """What a family's mask function says, asked at chosen places."""

    mask_function: Callable
    one_by_one: bool  # it takes single numbers, not tensors of indices
    batch: int
    first: int  # key
    keys: int
    device: torch.device

    def at(self, i: Tensor, j: Tensor) -> Bool[Tensor, "B ..."]:
        """Whether token i sees token j; both broadcast to `[B or 1, n, m]`."""
        rows = torch.arange(self.batch, device=self.device)[:, None, None]
        rows, i, j = torch.broadcast_tensors(rows, i, j)
        if not self.one_by_one:
            return self.mask_function(rows, 0, i, j).expand(rows.shape)
        with TransformGetItemToIndex():
            each = torch.vmap(self.mask_function, in_dims=(0, None, 0, 0))
            return each(rows.flatten(), 0, i.flatten(), j.flatten()).view(rows.shape)

    def alone(self) -> Bool[Tensor, "B keys-1"] | None:
        """Which tokens, from the second on, do not see the one before; `None` where all do."""
        if self.keys < 2:
            return None
        token = self._tokens()[1:]
        alone = ~self.at(token, token - 1)[:, 0]
        return alone if is_tracing(alone) or bool(alone.any()) else None

    def mutual(self) -> Int[Tensor, "B keys"] | None:
        """Runs of tokens that see each other later ones included; `None` where there are none.

        A compiled model takes none: `compare` refuses them when it runs.
        """
        if self.keys < 2:
            return None
        token = self._tokens()[:-1]
        ahead = self.at(token, token + 1)[:, 0]
        if is_tracing(ahead) or not bool(ahead.any()):
            return None
        inside = F.pad(ahead, (0, 1)) | F.pad(ahead, (1, 0))
        run = F.pad((~ahead).cumsum(1), (1, 0))
        return run.where(inside, -1)

    def window(self, newest: int) -> int | None:
        """How far back the newest token sees, where a family adds a window without a word of it."""
        token = self._tokens()
        seen = self.at(token[-1:, None], token)
        if is_tracing(seen) or bool(seen.all()):
            return None
        return newest - self.first + 1 - int(seen[0, 0].int().argmax())

    def compare(self, first: int, queries: int, ours: Visibility) -> None:
        """Raise unless a few rows, of `queries` tokens from `first` on, are those of `ours`."""
        evenly = torch.arange(_ROWS, device=self.device)
        i, j = first + evenly * (queries - 1) // (_ROWS - 1), self._tokens()
        expected = ours.at(i - self.first, j - self.first)
        same = (self.at(i[:, None], j) == expected).all()
        _require(
            same,
            "the attention mask of this model hides or shows other tokens than a converted one can "
            "(causal order, a window, documents, padding, images); call heedful.revert(model) for "
            "this input",
        )

    def _tokens(self) -> Int[Tensor, " keys"]:
        return torch.arange(self.first, self.first + self.keys, device=self.device)


def _numbered(alone: Bool[Tensor, "B n"] | None) -> Int[Tensor, "B n+1"] | None:
    """Document numbers from which tokens, the first left out, start a document."""
    return None if alone is None else F.pad(alone.cumsum(1), (1, 0))


def _alone_when_packed(
    said: _Said,
    alone: Bool[Tensor, "B T-1"],
    packed: Int[Tensor, "#B T"],
    padding: Bool[Tensor, "B T"] | None,
) -> Bool[Tensor, "B T-1"]:
    """Where documents and chunks start, in a family whose chunks are counted from each start.

    A mask function that knows of the documents separates them already. Another one is asked about
    the places that its tokens would have if each document stood where the row's first one stands.
    """
    packed = packed.expand(len(alone), -1)
    borders = packed.diff(dim=1) != 0
    knows = (alone | ~borders).all()
    if not is_tracing(knows) and bool(knows):
        return alone
    token = torch.arange(packed.shape[1], device=packed.device)
    start = token.where(F.pad(borders, (1, 0)), 0).cummax(1).values
    left = 0 if padding is None else padding.int().argmax(1, keepdim=True)
    place = token - start + (start > 0) * left
    joined = said.at(place[:, None, 1:], place[:, None, :-1])[:, 0]
    return torch.where(knows, alone, borders | ~joined)


def _require(holds: Tensor, message: str) -> None:
    """Raise unless this holds; a compiled or exported model raises when it runs."""
    if is_tracing(holds):
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def _check_lengths(queries: int, keys: int, q_offset, kv_offset, mask: Tensor | None) -> None:
    if mask is not None and q_offset == 0 and kv_offset == 0 and mask.shape[1] == keys != queries:
        raise ValueError(
            f"attention_mask must have one entry per token ({queries}), got {mask.shape[1]}"
        )
    if kv_offset + keys != q_offset + queries:
        raise ValueError(
            "the cache holds keys after the newest token, as static caches do; a converted model "
            "needs a dynamic cache or use_cache=False"
        )
    if mask is not None and mask.shape[1] != kv_offset + keys:
        raise ValueError(
            f"attention_mask must have one entry per token seen so far, those in the cache "
            f"included ({kv_offset + keys}), got {mask.shape[1]}"
        )


def _positions(given: dict) -> Int[Tensor, "#B T"] | None:
    """The positions of a forward pass, also where the model makes them itself."""
    positions = given.get("position_ids")
    if isinstance(positions, Tensor):
        return positions if positions.ndim == 2 else None  # several axes, as of images
    tokens = _tokens(given)
    if tokens is None:
        return None
    return (torch.arange(tokens.shape[1], device=tokens.device) + _cached_tokens(given))[None]


def _cached_tokens(given: dict) -> int:
    """How many tokens the cache has seen."""
    cache = given.get("past_key_values")
    return 0 if cache is None else cache.get_seq_length()


def _tokens(given: dict) -> Tensor | None:
    """The new tokens, as ids or as embeddings."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _documents(given: dict) -> Int[Tensor, "B T"] | None:
    """The document of every token of a forward pass; `None` where all are of one.

    A document starts at each real token whose position is not after that of the real token before
    it. Positions of padding mean nothing: `generate` fills them with whatever number.
    """
    cache = given.get("past_key_values")
    if getattr(cache, _PACKED, False):
        raise ValueError(
            "past_key_values holds packed documents, and a new token would see all of them; "
            "generate from one document per row"
        )
    held = _cached_tokens(given)
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.ndim != 2:
        return None if held else _from_offsets(given)
    tokens = positions.shape[1]
    if held and tokens == 1 and not is_tracing(positions) and not bool((positions == 0).any()):
        return None  # a step of generation: nothing starts again
    masked = isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[1] >= tokens
    real = mask[:, -tokens:].to(positions.device).bool() if masked else positions == positions
    token = torch.arange(tokens, device=positions.device).expand(real.shape)
    newest = token.where(real, -1).cummax(1).values
    before = F.pad(newest[:, :-1], (1, 0), value=-1)  # the real token before each
    positions = positions.expand(real.shape)
    previous = positions.gather(1, before.clamp(min=0))
    starts = real & (before >= 0) & (positions <= previous)
    if held:
        earlier = mask[:, :-tokens].bool().any(1, keepdim=True) if masked else True
        first = real & (before < 0) & (positions == 0) & earlier
        _require(
            ~(starts | first).any(),
            "position_ids start again in a step that continues a filled cache: a new document "
            "would see the old ones; start it with a new cache",
        )
        return None
    if not is_tracing(starts) and not bool(starts.any()):
        return _from_offsets(given)
    return starts.cumsum(1)


def _from_offsets(given: dict) -> Int[Tensor, "1 T"] | None:
    """Documents from the cumulative lengths that flattening collators give beside positions."""
    offsets = given.get("cu_seq_lens_q")
    if offsets is None:
        return None
    return Visibility.packed(offsets, length=_tokens(given).shape[1]).documents
