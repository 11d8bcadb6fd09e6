"""Streams of a layer's tokens: what is cached of each, by name, under one set of operations."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.eviction.selection import Moves
from heedful.hf.cache.int8 import Int8Slots
from heedful.hf.cache.slots import Slots

KEYS, VALUES, POSITIONS, SCORE = "keys", "values", "positions", "score"
_BESIDE = frozenset({POSITIONS, SCORE})  # that only eviction needs


class Numbers:
    """One number per selector and token, `[B, S, n]`, which every call replaces as a whole."""

    parts = ("contents",)
    nbytes = contents_nbytes = copy_nbytes = token_numbers = 0  # no room for later tokens

    def __init__(self) -> None:
        self.contents: Float[Tensor, "B S n"] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The numbers, once there are any."""
        return [] if self.contents is None else [self.contents]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token of every sequence."""
        x = self.contents
        return 0 if x is None or not x.shape[2] else x[:, :, :1].numel() * x.element_size()

    def drop_first(self, count: int) -> None:
        """Drop those of the first tokens."""
        if self.contents is not None:
            self.contents = self.contents[..., count:]

    def drop_last(self, count: int) -> None:
        """Drop those of the newest tokens."""
        if self.contents is not None:
            self.contents = self.contents[..., : self.contents.shape[2] - count]

    def move(self, moves: Moves, limit: int | None = None) -> int:
        """Follow the tokens, as `Slots.move`."""
        if self.contents is not None:
            self.contents = moves.of(self.contents)
        return 0

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the numbers by a function of them, such as a choice of sequences."""
        if self.contents is not None:
            self.contents = change(self.contents)


class Streams(dict[str, "Slots | Int8Slots | Numbers"]):
    """Streams of the same tokens by name; what happens to a token happens in all of them."""

    @property
    def tensors(self) -> list[Tensor]:
        return [x for stream in self.values() for x in stream.tensors]

    @property
    def positions(self) -> Int[Tensor, "B n"] | None:
        """Of the tokens in all slots; `None` where they are the newest ones in order."""
        if POSITIONS not in self or (at := self[POSITIONS].contents) is None:
            return None
        return at[:, 0, :, 0]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token of every sequence, as the model gave it."""
        return sum(x.token_nbytes for name, x in self.items() if name not in _BESIDE)

    @property
    def token_numbers(self) -> int:
        """Number of elements of one token's key and value, in every sequence."""
        return self[KEYS].token_numbers + self[VALUES].token_numbers

    @property
    def reserve_nbytes(self) -> int:
        """Bytes of the room for later tokens."""
        return sum(x.nbytes - x.contents_nbytes for x in self.values())

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the copies that attention reads, of quantized streams."""
        return sum(x.copy_nbytes for x in self.values())

    def place(self, start: int, count: int, limit: int | None) -> bool:
        """Add the positions of the newest tokens, from `start` on; returns as `Slots.append`."""
        buffer = self[KEYS].buffer
        at = torch.arange(start, start + count, device=buffer.device)
        return self[POSITIONS].append(at.expand(buffer.shape[0], 1, -1)[..., None], limit)

    def drop_first(self, count: int) -> None:
        """Drop the oldest tokens, where all are in order."""
        for stream in self.values():
            stream.drop_first(count)

    def drop_last(self, count: int) -> None:
        """Drop the newest tokens."""
        for stream in self.values():
            stream.drop_last(count)

    def move(self, moves: Moves, limit: int | None = None) -> int:
        """Fill the slots of evicted tokens; returns the bytes that were copied for less room."""
        copied = 0
        for stream in self.values():
            own = stream.move(moves, limit)
            if own > copied:  # a call fewer than max, for every token
                copied = own
        return copied

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by a function of it, such as a choice of sequences."""
        for stream in self.values():
            stream.map_batch(change)
