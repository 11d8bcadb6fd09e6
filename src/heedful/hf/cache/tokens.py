"""The tokens of one layer's cache: keys, values and what the mechanism caches beside them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.eviction.selection import Moves
from heedful.hf.cache.int8 import Int8Slots
from heedful.hf.cache.slots import Slots


class StoredTokens:
    """Three streams of the same tokens, and their positions where some can be evicted.

    Arguments:
        int8: whether the streams are stored as int8.

    Attributes:
        keys, values: as the model gave them.
        extra: what `Layer.extra_cache` gave, such as an own selector's keys; most mechanisms have
            none.
        of_heads: these two.
    """

    parts = ("keys", "values", "extra", "_places")

    def __init__(self, int8: bool = False) -> None:
        kind = Int8Slots if int8 else Slots
        self.keys, self.values, self.extra = kind(), kind(), kind()
        self.of_heads: tuple[Slots | Int8Slots, ...] = (self.keys, self.values)
        self._places = Slots()

    @property
    def streams(self) -> tuple[Slots | Int8Slots, ...]:
        """Those that have tokens."""
        return self.of_heads if self.extra.buffer is None else (*self.of_heads, self.extra)

    @property
    def positions(self) -> Int[Tensor, "B 1 n"] | None:
        """Of the tokens in all slots; `None` where no token can be evicted, so that they are the
        newest ones in order."""
        places = self._places.contents
        return None if places is None else places[..., 0]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.keys.length

    @property
    def batch(self) -> int | None:
        """Number of sequences; `None` before the first call."""
        buffer = self.keys.buffer
        return None if buffer is None else buffer.shape[0]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*(x for slots in self.streams for x in slots.tensors), self._places.buffer]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token of every sequence, as the model gave it."""
        return sum(slots.token_nbytes for slots in self.streams)

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of the room for later tokens."""
        return sum(x.nbytes - x.contents_nbytes for x in (*self.streams, self._places))

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the copies that attention reads, where the streams are quantized."""
        return sum(slots.copy_nbytes for slots in self.streams)

    @property
    def replaced(self) -> int:
        """Bytes that the newest `append` has copied for more room: old and new were there."""
        return max(slots.replaced for slots in self.of_heads)

    def append(
        self, keys: Float[Tensor, "B Hk m D"], values: Float[Tensor, "B Hk m Dv"], limit: int | None
    ) -> bool:
        """Add tokens; returns whether there are new buffers.

        Arguments:
            keys, values: of the new tokens.
            limit: for how many tokens room is made ahead of them.
        """
        grown = self.keys.append(keys, limit)
        return self.values.append(values, limit) or grown

    def append_extra(self, rows: Float[Tensor, "B S m Ds"], limit: int | None) -> bool:
        """Add what the layer keeps beside keys and values of the same tokens, as above."""
        return self.extra.append(rows, limit)

    def place(self, start: int, count: int, limit: int | None) -> bool:
        """Note the positions of the newest tokens, from `start` on, as above."""
        buffer = self.keys.buffer
        positions = torch.arange(start, start + count, device=buffer.device)
        return self._places.append(positions.expand(buffer.shape[0], 1, -1)[..., None], limit)

    def drop_first(self, count: int) -> None:
        """Drop the oldest tokens, where all are in order."""
        for slots in self.streams:
            slots.drop_first(count)

    def drop_last(self, count: int) -> None:
        """Drop the newest tokens."""
        for slots in self.streams:
            slots.drop_last(count)
        if self._places.buffer is not None:
            self._places.drop_last(count)

    def move(self, moves: Moves, limit: int | None) -> int:
        """Fill the slots of evicted tokens; returns the bytes that were copied for less room."""
        copied = max([slots.move(moves, limit) for slots in self.streams])
        return max(copied, self._places.move(moves, limit))

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it, such as a choice of sequences."""
        for slots in (*self.streams, self._places):
            slots.map_batch(change)
