"""Attention dropout whose mask is a function of a seed and of an entry's place in the map.

Every entry (row b, head h, query i, key j) has a number of its own, a hash of the seed and of these
four: it is dropped if the number is below p. So a row block makes its part of the mask without the
rest, the backward pass makes it again, and it is the same whatever the blocks.

The hash is an integer mixer of 32 bits (Wellons, "Hash Prospector", its best two-round constants of
which both factors are below 2^31, so that no product overflows 64 bits).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.ops.common.checks import check_dropout, check_seed

_MASK = 2**32 - 1


class Dropout(NamedTuple):
    """Dropout of an attention matrix: its share, and a number per head made of the seed."""

    p: float
    heads: Int[Tensor, " H"]

    def factor(
        self, batch: int, rows: range, columns: range, dtype: torch.dtype
    ) -> Float[Tensor, "B H R C"]:
        """Factor of a tile: 0 where it is dropped, elsewhere 1 / (1 - p).

        `rows` and `columns` are tokens: query i of Tq is token i + Tk - Tq.
        """
        device = self.heads.device
        of_row = torch.arange(batch, device=device)[:, None] + self.heads
        of_row = _mixed(_mixed(of_row)[..., None] + _range(rows, device))
        number = of_row[..., None] ^ _mixed(_range(columns, device))
        mask = _mixed(number) >= round(self.p * 2**32)
        return mask.to(dtype).mul_(1 / (1 - self.p))

    def applied(self, whole: Float[Tensor, "B H Tq Tk"]) -> Float[Tensor, "B H Tq Tk"]:
        """A whole map without what is dropped, the rest divided by 1 - p."""
        queries, keys = whole.shape[2:]
        wide = torch.promote_types(whole.dtype, torch.float32)
        factor = self.factor(len(whole), range(keys - queries, keys), range(keys), wide)
        return (whole.to(wide) * factor).to(whole.dtype)

    def of_block(
        self,
        like: Float[Tensor, "B H Tq D"],
        keys: int,
        rows: slice | range,
        columns: slice | range,
    ) -> Float[Tensor, "B H R C"]:
        """The factor of some rows and columns of the map of `like`'s queries and so many keys."""
        first = keys - like.shape[2]  # whatever a block calls its tokens
        owned = range(first + rows.start, first + rows.stop)
        wide = torch.promote_types(like.dtype, torch.float32)
        return self.factor(len(like), owned, range(columns.start, columns.stop), wide)


def dropout_of(
    p: float, seed: int | Int[Tensor, ""] | None, q: Float[Tensor, "B H Tq D"]
) -> Dropout | None:
    """The dropout of a call, checked; `None` for p = 0. Without a seed one is drawn.

    Raises:
        ValueError: p is not in [0, 1), or the seed is not a whole number.
    """
    p = check_dropout(p)
    check_seed(seed, q)
    if p == 0:
        return None
    if seed is None:
        seed = torch.randint(2**62, (), device=q.device)
    elif not isinstance(seed, Tensor):
        seed = torch.tensor(int(seed), device=q.device)
    seed = seed.to(torch.int64)
    head = torch.arange(q.shape[1], device=q.device)
    return Dropout(p, _mixed(_mixed(_mixed(seed & _MASK) + (seed >> 32)) + head))


def _range(tokens: range, device: torch.device) -> Int[Tensor, " n"]:
    return torch.arange(tokens.start, tokens.stop, device=device)


def _mixed(x: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The lower 32 bits of every number, mixed."""
    x = x & _MASK
    shifted = torch.empty_like(x)  # one for all steps: a tile's new pages cost more than its sums
    for bits, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_(torch.bitwise_right_shift(x, bits, out=shifted))
        x.mul_(factor).bitwise_and_(_MASK)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=shifted))
