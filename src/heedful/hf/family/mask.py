"""Conversion of a family's mask function into a `Visibility`, checked against it.

transformers asks a registered function once per forward pass for the mask of each kind of layer,
and hands the answer to every attention layer. `attention_context` is that function. A mask function
made of code and numbers alone shows the same in every pass, so that it is sampled once, on the CPU.
One that holds tensors (of images, of packed documents) is sampled in every pass: which token sees
the one before it gives documents and chunks, which sees the one after it gives images, and a few
whole rows are compared with the `Visibility` that goes on in its place. What a `Visibility` cannot
express is not supported.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn import functional as F
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
)
from transformers.utils import is_tracing

from heedful.checks import UserError
from heedful.hf.family.call import forward_pass, require
from heedful.hf.intercept import Interceptor, interceptors
from heedful.nn.layer import Shared
from heedful.ops import Visibility

_ROWS = 8  # whole rows of the family's mask that are compared
_TENSOR = "a tensor"  # stands for one in what a mask function is made of


class AttentionContext(NamedTuple):
    """Context that the attention layers of one kind get in place of a mask.

    It goes the way of the mask, through the family's own code, so that a layer that is computed
    again in the backward pass gets the same.

    visibility: which keys each query sees; `None` where the family passes no mask.
    token_ids, positions: of the tokens of this call.
    keys: how many keys the visibility is about.
    target: which tokens so far of a decoder's sequence are not padding.
    shared: where the layers of one forward pass keep things for each other.
    interceptors: what stands around the layers' calls.
    """

    visibility: Visibility | None = None
    token_ids: Int[Tensor, "B T"] | None = None
    positions: Int[Tensor, "#B T"] | None = None
    keys: int = 0
    target: Bool[Tensor, "B n"] | None = None
    shared: Shared | None = None
    interceptors: tuple[Interceptor, ...] = ()


def attention_context(*args: object, **kwargs: object) -> AttentionContext:
    """The mask function that transformers calls: `visibility_for`, with ids and positions.

    A decoder asks for the mask of its own sequence first, then for that of the source's, which says
    nothing of the target's padding: it is noted in between.
    """
    visibility, now = visibility_for(*args, **kwargs), forward_pass()
    if visibility.causal:
        now.target = visibility.padding
    keys = kwargs["kv_length"] if "kv_length" in kwargs else args[2]
    return AttentionContext(
        visibility, now.token_ids, now.positions, keys, now.target, now.shared, interceptors()
    )


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
    """Visibility among `kv_length` keys from `kv_offset` on.

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
        padding = _padding(attention_mask, kv_offset, kv_length, both_ways)
    packed = forward_pass().documents
    if mask_function is causal_mask_function:
        return Visibility(documents=packed, padding=padding)
    if mask_function is bidirectional_mask_function:
        return Visibility(causal=False, documents=packed, padding=padding)

    constant = None if is_tracing() else _Constant.of(mask_function, use_vmap)
    if constant is not None and (form := _window_of(constant, causal=not both_ways)) is not None:
        return Visibility(not both_ways, form.window, documents=packed, padding=padding)
    if constant is None and packed is None and not is_tracing():
        padding_length = _left_padding(mask_function, local_size)
        if padding_length is not None:
            chunks = _chunks(padding_length, local_size, kv_offset, kv_length)
            return Visibility(window=local_size, documents=chunks, padding=padding)
    probe = MaskProbe(mask_function, use_vmap, batch_size, kv_offset, kv_length, device)
    if both_ways:
        window = None if local_size is None else local_size + 1  # it does not count the token
        probe.compare(q_offset, q_length, Visibility(causal=False, window=window))
        return Visibility(causal=False, window=window, documents=packed, padding=padding)
    alone, mutual = probe.alone(), probe.mutual()
    documents, window = _numbered(alone), local_size
    if window is None and alone is None:
        window = probe.window(q_offset + q_length - 1)
    probe.compare(q_offset, q_length, Visibility(window=window, documents=documents, mutual=mutual))
    if packed is not None and alone is None:
        documents = packed
    elif packed is not None:
        documents = _numbered(_alone_when_packed(probe, alone, packed, padding))
    return Visibility(window=window, documents=documents, padding=padding, mutual=mutual)


class MaskProbe(NamedTuple):
    """Samples a model's mask function at chosen (query, key) positions."""

    mask_function: Callable
    one_by_one: bool  # it takes single numbers, not tensors of indices
    batch: int
    first: int  # key
    keys: int
    device: torch.device

    def at(self, i: Tensor, j: Tensor) -> Bool[Tensor, "B ..."]:
        """Test whether token i sees token j; both broadcast to `[B or 1, n, m]`."""
        rows = torch.arange(self.batch, device=self.device)[:, None, None]
        rows, i, j = torch.broadcast_tensors(rows, i, j)
        if not self.one_by_one:
            return self.mask_function(rows, 0, i, j).expand(rows.shape)
        with TransformGetItemToIndex():
            each = torch.vmap(self.mask_function, in_dims=(0, None, 0, 0))
            return each(rows.flatten(), 0, i.flatten(), j.flatten()).view(rows.shape)

    def alone(self) -> Bool[Tensor, "B {self.keys-1}"] | None:
        """Mark tokens, from the second on, that do not see the one before; `None` where all do."""
        if self.keys < 2:
            return None
        token = self._tokens()[1:]
        alone = ~self.at(token, token - 1)[:, 0]
        return alone if is_tracing(alone) or bool(alone.any()) else None

    def mutual(self) -> Int[Tensor, "B {self.keys}"] | None:
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
        """Window of the newest token, where a family adds one without declaring it."""
        token = self._tokens()
        visible = self.at(token[-1:, None], token)
        if is_tracing(visible) or bool(visible.all()):
            return None
        return newest - self.first + 1 - int(visible[0, 0].int().argmax())

    def compare(self, first: int, queries: int, ours: Visibility) -> None:
        """Raise unless a few rows, of `queries` tokens from `first` on, are those of `ours`."""
        require(
            self.agrees(first, queries, ours),
            "the attention mask of this model hides or shows other tokens than a converted one can "
            "(causal order, a window, documents, padding, images); call heedful.revert(model) for "
            "this input",
        )

    def agrees(self, first: int, queries: int, ours: Visibility) -> Bool[Tensor, ""]:
        """Test whether a few rows, of `queries` tokens from `first` on, are those of `ours`."""
        evenly = torch.arange(_ROWS, device=self.device)
        i, j = first + evenly * (queries - 1) // (_ROWS - 1), self._tokens()
        expected = ours.at(i - self.first, j - self.first)
        return (self.at(i[:, None], j) == expected).all()

    def _tokens(self) -> Int[Tensor, " {self.keys}"]:
        return torch.arange(self.first, self.first + self.keys, device=self.device)


@dataclass(frozen=True)
class _Constant:
    """A mask function of code and numbers alone; equal to another one of the same.

    It is held weakly, as the answers about it are kept: its caller has it while it is sampled.
    """

    made_of: tuple
    one_by_one: bool
    function: ReferenceType[Callable] = field(compare=False)

    @classmethod
    def of(cls, function: Callable, one_by_one: bool) -> "_Constant | None":
        """The same function; `None` where it holds anything else, whose value may change."""
        made_of, tensors = _made_of(function)
        return None if made_of is None or tensors else cls(made_of, one_by_one, ref(function))

    def probe(self) -> MaskProbe:
        """Samples twice as many tokens as its largest number, in several rows, on the CPU."""
        largest = max(16, *(x for x in _leaves(self.made_of) if isinstance(x, int)))
        keys, device = 2 * largest + 2, torch.device("cpu")
        return MaskProbe(self.function(), self.one_by_one, _ROWS, 0, keys, device)


class _Form(NamedTuple):
    """Form of a mask: all earlier tokens, or those in a window."""

    window: int | None


@functools.lru_cache(maxsize=64)
def _window_of(constant: _Constant, causal: bool) -> _Form | None:
    """Form of a constant mask function; `None` where it is more than order and a window."""
    probe = constant.probe()
    window = probe.window(probe.keys - 1)
    visibility = Visibility(causal, window)
    return _Form(window) if bool(probe.agrees(0, probe.keys, visibility)) else None


def _left_padding(function: Callable, chunk: int | None) -> Int[Tensor, " B"] | None:
    """Number of tokens before each sequence's chunks, if the mask shows chunks alone."""
    made_of, tensors = _made_of(function)
    if made_of is None or len(tensors) != 1 or not isinstance(chunk, int):
        return None
    return tensors[0] if made_of == _chunked(chunk) else None


@functools.lru_cache(maxsize=64)
def _chunked(chunk: int) -> tuple | None:
    """Parts of transformers' function for chunks, if it shows what is expected of it."""
    left = torch.tensor([0, 1])
    function = chunked_causal_mask_function(chunk, left)
    probe = MaskProbe(function, False, 2, 0, 2 * chunk + 2, left.device)
    documents = _chunks(left, chunk, 0, probe.keys)
    same = probe.agrees(0, probe.keys, Visibility(documents=documents))
    return _made_of(function)[0] if bool(same) else None


def _chunks(
    left: Int[Tensor, " B"], chunk: int, first: int, keys: int
) -> Int[Tensor, "B keys"] | None:
    """The chunk of each token, counted from the first real one; `None` where all are in one."""
    if first + keys <= chunk:
        return None  # padding on the left, which nothing sees, would be another one
    token = torch.arange(first, first + keys, device=left.device)
    number = (token - left[:, None]).div(chunk, rounding_mode="floor")
    return number - number[:, :1]


def _made_of(function: Callable) -> tuple[tuple | None, list[Tensor]]:
    """The code and the numbers of a function and of those that it calls, and its tensors.

    A function that was met before, as one that calls itself, is the number of its place. `None` in
    place of the first where it holds anything else, or a list that holds itself.
    """
    tensors: list[Tensor] = []
    functions: dict[FunctionType, str] = {}

    def parts(x: object) -> object:
        if isinstance(x, Tensor):
            tensors.append(x)
            return _TENSOR
        if isinstance(x, int | float | str | None) or x is torch:
            return x
        if isinstance(x, tuple | list):
            return tuple(map(parts, x))
        if isinstance(x, FunctionType):
            if x in functions:
                return functions[x]
            functions[x] = f"function {len(functions)}"
            defaults = [x.__defaults__ or (), tuple((x.__kwdefaults__ or {}).items())]
            cells = [cell.cell_contents for cell in x.__closure__ or ()]
            names = [x.__globals__[n] for n in _names(x.__code__) if n in x.__globals__]
            return (x.__code__, *map(parts, (*defaults, *cells, *names)))
        raise TypeError

    try:
        return parts(function), tensors
    except (TypeError, ValueError, RecursionError):  # an empty cell has no contents
        return None, tensors


def _names(code: CodeType) -> list[str]:
    """Names that code takes from outside, with those of the functions made in it."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return [*code.co_names, *(name for x in inner for name in _names(x))]


def _leaves(parts: object) -> list[object]:
    """The numbers and texts in what a function is made of, those in its code included."""
    if isinstance(parts, CodeType):
        parts = parts.co_consts
    return [y for x in parts for y in _leaves(x)] if isinstance(parts, tuple) else [parts]


def _padding(
    mask: Bool[Tensor, "B n"], first: int, keys: int, both_ways: bool
) -> Bool[Tensor, "B keys"] | None:
    """Real tokens among the keys; `None` where all are."""
    padding = mask[:, first : first + keys].bool()
    now = forward_pass()
    if not both_ways and now.unpadded is not None and now.mask_shape == mask.shape:
        return None if now.unpadded else padding
    return padding if is_tracing(padding) or not bool(padding.all()) else None


def _numbered(alone: Bool[Tensor, "B n"] | None) -> Int[Tensor, "B n+1"] | None:
    """Document numbers from which tokens, the first left out, start a document."""
    return None if alone is None else F.pad(alone.cumsum(1), (1, 0))


def _alone_when_packed(
    probe: MaskProbe,
    alone: Bool[Tensor, "B n"],
    packed: Int[Tensor, "#B T"],
    padding: Bool[Tensor, "B T"] | None,
) -> Bool[Tensor, "B n"]:
    """Mark starts of documents and chunks, in a family that counts chunks from each start.

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
    joined = probe.at(place[:, None, 1:], place[:, None, :-1])[:, 0]
    return torch.where(knows, alone, borders | ~joined)


def _check_lengths(queries: int, keys: int, q_offset, kv_offset, mask: Tensor | None) -> None:
    if mask is not None and q_offset == 0 and kv_offset == 0 and mask.shape[1] == keys != queries:
        raise UserError(
            f"attention_mask must have one entry per token ({queries}), got {mask.shape[1]}"
        )
    if kv_offset + keys != q_offset + queries:
        raise UserError(
            "the cache holds keys after the newest token, as static caches do; a converted model "
            "needs a dynamic cache or use_cache=False"
        )
    if mask is not None and mask.shape[1] != kv_offset + keys:
        raise UserError(
            f"attention_mask must have one entry per token seen so far, those in the cache "
            f"included ({kv_offset + keys}), got {mask.shape[1]}"
        )
