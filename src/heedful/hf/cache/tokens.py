"""The tokens of one layer's cache: keys, values and what the mechanism caches beside them."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.eviction.gather import Moves
from heedful.hf.cache.int8 import Int8Slots
from heedful.hf.cache.slots import Slots


class StoredTokens:
    """Three streams of the same tokens, and their positions once these are no longer plain.

    keys, values: as the model gave them.
    beside: what `Layer.beside` gave, such as an own selector's keys; empty for most mechanisms.
    positions: of the tokens in all slots, `[B, 1, n]`; `None` where no token can be evicted, so
        that they are the newest ones in order.

    Arguments:
        int8: whether the streams have eight bits per number.
    """

    def __init__(self, int8: bool = False) -> None:
        kind = Int8Slots if int8 else Slots
        self.keys, self.values, self.beside = kind(), kind(), kind()
        self.positions: Int[Tensor, "B 1 n"] | None = None

    @property
    def of_heads(self) -> list[Slots | Int8Slots]:
        """Keys and values."""
        return [self.keys, self.values]

    @property
    def streams(self) -> list[Slots | Int8Slots]:
        """Those that have tokens."""
        return [slots for slots in (*self.of_heads, self.beside) if slots.tensors]

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return self.keys.length

    @property
    def batch(self) -> int | None:
        """How many sequences there are; `None` before the first call."""
        return len(self.keys.tensors[0]) if self.keys.tensors else None

    @property
    def tensors(self) -> list[Tensor | None]:
        return [*(x for slots in self.streams for x in slots.tensors), self.positions]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token of every sequence, as the model gave it."""
        return sum(slots.token_nbytes for slots in self.streams)

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of the room for later tokens."""
        return sum(slots.nbytes - slots.contents_nbytes for slots in self.streams)

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the copies that attention reads, where the streams are quantized."""
        return sum(slots.copy_nbytes for slots in self.streams)

    def append(
        self, keys: Float[Tensor, "B Hk m D"], values: Float[Tensor, "B Hk m D"], limit: int | None
    ) -> int:
        """Add tokens; returns the bytes that were copied for more room.

        Arguments:
            keys, values: of the new tokens.
            limit: for how many tokens room is made ahead of them.
        """
        before = self.keys.nbytes, self.values.nbytes
        self.keys.append(keys, limit)
        self.values.append(values, limit)
        after = self.keys.nbytes, self.values.nbytes
        moved = [old for old, new in zip(before, after, strict=True) if old != new]
        return max(moved, default=0)  # old and new were there at once

    def place(self, start: int, count: int) -> None:
        """Note the positions of the newest tokens, from `start` on."""
        positions = torch.arange(start, start + count, device=self.keys.tensors[0].device)
        positions = positions.expand(self.batch, 1, -1)
        if self.positions is not None:
            positions = torch.cat([self.positions, positions], dim=2)
        self.positions = positions

    def drop_first(self, count: int) -> None:
        """Drop the oldest tokens, where all are in order."""
        for slots in self.streams:
            slots.drop_first(count)

    def drop_last(self, count: int) -> None:
        """Drop the newest tokens."""
        for slots in self.streams:
            slots.drop_last(count)
        if self.positions is not None:
            self.positions = self.positions[..., : self.keys.length]

    def move(self, moves: Moves, limit: int | None) -> int:
        """Fill the slots of evicted tokens; returns the bytes that were copied for less room."""
        copied = max(slots.move(moves, limit) for slots in self.streams)
        self.positions = moves.of(self.positions)
        return copied

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it, such as a choice of sequences."""
        for slots in self.streams:
            slots.map_batch(change)
        if self.positions is not None:
            self.positions = change(self.positions)
