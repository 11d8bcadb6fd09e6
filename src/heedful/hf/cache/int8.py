"""Storage of a cache's tokens as int8: a quarter of float32, half of bfloat16.

Each token's numbers in each head are whole multiples of a scale of their own,

    x ~ s c,   s = max |x| / 127,   c = round(x / s) in -127..127,

with an error of half a scale at most and none for the largest: in keys that is the channel which
decides the logits, so that scales are float32. A token is quantized when it comes, so that
attention does not depend on how many tokens come in one call.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float32, Int, Int8
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction.selection import Moves
from heedful.hf.cache.slots import Slots

_LARGEST = 127


class Int8Slots:
    """As `Slots`, with int8 tokens; they are read as copies in the model's dtype."""

    parts = ("_codes", "_scales", "_dtype")

    def __init__(self) -> None:
        self._codes, self._scales = Slots(), Slots()
        self._dtype: torch.dtype | None = None

    @property
    def contents(self) -> Float[Tensor, "B H n D"] | None:
        """The tokens, dequantized."""
        if self._dtype is None:
            return None
        return dequantize(self._codes.contents, self._scales.contents, self._dtype)

    @property
    def length(self) -> int:
        return self._codes.length

    @property
    def batch(self) -> int | None:
        """Number of sequences; `None` before the first tokens."""
        return self._codes.batch

    @property
    def tensors(self) -> list[Tensor]:
        """The buffers, once there are tokens."""
        return [*self._codes.tensors, *self._scales.tensors]

    @property
    def buffer(self) -> Int8[Tensor, "B H room D"] | None:
        """The codes, with room for more."""
        return self._codes.buffer

    @property
    def replaced(self) -> int:
        """Bytes of the buffers that the newest `append` has replaced."""
        return self._codes.replaced + self._scales.replaced

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return self._codes.nbytes + self._scales.nbytes

    @property
    def contents_nbytes(self) -> int:
        """Bytes of the tokens, without room for later ones."""
        return self._codes.contents_nbytes + self._scales.contents_nbytes

    @property
    def token_numbers(self) -> int:
        """Number of elements that one token of every sequence has."""
        return self._codes.token_numbers

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token of every sequence, as the model gave it."""
        return 0 if self._dtype is None else self._codes.token_nbytes * self._dtype.itemsize

    @property
    def copy_nbytes(self) -> int:
        """Bytes of a copy that reading the contents makes."""
        return self.token_nbytes * self.length

    def append(self, new: Float[Tensor, "B H m D"], limit: int | None = None) -> bool:
        """Add tokens, as `Slots.append`."""
        self._dtype = new.dtype
        codes, scales = quantize(new)
        larger = self._codes.append(codes, limit)
        return self._scales.append(scales, limit) or larger

    def drop_first(self, count: int) -> None:
        """Drop the first tokens."""
        for slots in (self._codes, self._scales):
            slots.drop_first(count)

    def drop_last(self, count: int) -> None:
        """Drop the newest tokens."""
        for slots in (self._codes, self._scales):
            slots.drop_last(count)

    def move(self, moves: Moves, limit: int | None = None) -> int:
        """Move tokens and drop the last slots; returns the bytes of a new buffer."""
        return max(slots.move(moves, limit) for slots in (self._codes, self._scales))

    def put(self, slots: Int[Tensor, "#B 1"], new: Float[Tensor, "B H 1 D"]) -> None:
        """Replace the token in one slot of each sequence."""
        for part, x in zip((self._codes, self._scales), quantize(new), strict=True):
            part.put(slots, x)

    def extended(self, new: Float[Tensor, "B H m D"]) -> "Int8Slots":
        """The tokens followed by new ones, in tensors of their own; nothing changes here."""
        joined, self._dtype = Int8Slots(), new.dtype
        codes, scales = quantize(new)
        joined._codes, joined._scales = self._codes.extended(codes), self._scales.extended(scales)
        joined._dtype = new.dtype
        return joined

    def take(
        self, tokens: "Int8Slots", keep: Int[Tensor, "#B m"], limit: int | None = None
    ) -> None:
        """Replace all tokens by some of others, with room for `limit` tokens."""
        self._codes.take(tokens._codes, keep, limit)
        self._scales.take(tokens._scales, keep, limit)

    def fill(self, room: int) -> None:
        """Use all slots of buffers of `room` tokens, as `Slots.fill`."""
        for slots in (self._codes, self._scales):
            slots.fill(room)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffers by a function of them, such as a choice of sequences."""
        for slots in (self._codes, self._scales):
            slots.map_batch(change)


def is_int8(dtype: torch.dtype | None) -> bool:
    """Test whether a cache of that dtype quantizes; raises for unsupported ones."""
    if dtype not in (None, torch.int8):
        raise UserError(
            f"dtype must be torch.int8, or None for what the model computes in, got {dtype!r}"
        )
    return dtype is not None


def quantize(
    x: Float[Tensor, "B H m D"],
) -> tuple[Int8[Tensor, "B H m D"], Float32[Tensor, "B H m 1"]]:
    """The whole numbers and the scales that stand for `x`."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True) / _LARGEST
    codes = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()  # also of zeros
    return codes.clamp(-_LARGEST, _LARGEST).to(torch.int8), scales


def dequantize(
    codes: Int8[Tensor, "B H m D"], scales: Float32[Tensor, "B H m 1"], dtype: torch.dtype
) -> Float[Tensor, "B H m D"]:
    """Dequantize int8 codes with their scales."""
    out = torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)
    return torch.mul(codes, scales, out=out)  # in float32, whatever the dtype
