"""F of a layer's cached tokens, from selectors that rank and mask nothing.

A call leaves the selector queries of its tokens here. An eviction adds to F what all of them hide,
later tokens the earlier ones, and drops them, so that none counts twice.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.hf.cache.slots import Slots

F, SELECTOR_KEYS = "F", "selector keys"  # streams of the tokens
_BLOCK = 64  # queries whose products are in memory at once


class SelectorRows(NamedTuple):
    """The selector's queries and keys of new tokens."""

    queries: Float[Tensor, "B m Ds"]
    keys: Float[Tensor, "B m Ds"]


class Hiding:
    """The selector queries that F does not have yet.

    Arguments:
        scale: factor on the selector's logits.
        keeps_first: whether the first token of a sequence is never evicted.
    """

    parts = ("_queries",)

    def __init__(self, scale: float, keeps_first: bool) -> None:
        self.scale, self.keeps_first = scale, keeps_first
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._queries = Slots()

    @property
    def tensors(self) -> list[Tensor]:
        return self._queries.tensors

    def add(self, queries: Float[Tensor, "B m Ds"], limit: int) -> bool:
        """Note the queries of the newest tokens; those of padding are zero.

        Arguments:
            queries: of the new tokens.
            limit: for how many there is to be room.

        Returns:
            Whether there is a new buffer.
        """
        return self._queries.append(queries[:, None], limit)

    def fold(
        self,
        f: Slots,
        keys: Float[Tensor, "B 1 n Ds"],
        at: Int[Tensor, "B n"],
        total: int,
    ) -> bool:
        r"""Add to F what the noted queries hide, and drop them.

        $F_j \mathrel{+}= \sum_{i > j} \max(0, q_i k_j / \sqrt{D})$

        Arguments:
            f: of the cached tokens, `[B, 1, n, 1]`.
            keys: the selector's, of the same tokens.
            at: their positions.
            total: how many tokens have come, of which the noted ones are the newest.

        Returns:
            Whether queries of earlier calls were dropped.
        """
        queries, count = self._queries, self._queries.length
        if not count:
            return False
        own, sums = torch.arange(total - count, total, device=at.device)[:, None], 0.0
        for first in range(0, count, _BLOCK):
            rows = slice(first, first + _BLOCK)
            dtype = f.buffer.dtype
            sums = sums + self.of(queries.contents[:, 0, rows], keys[:, 0], at, own[rows], dtype)
        f.replace(f.contents + sums[:, None, :, None])
        self.reset()
        return count > 1

    def of(
        self,
        queries: Float[Tensor, "B m Ds"],
        keys: Float[Tensor, "B n Ds"],
        at: Int[Tensor, "B n"],
        own: Int[Tensor, "m 1"] | Int[Tensor, ""],
        dtype: torch.dtype,
    ) -> Float[Tensor, "B n"]:
        """The sum over queries of what each hides of the tokens before it.

        Arguments:
            queries: at the positions `own`.
            keys: of the tokens at the positions `at`.
            at, own: see there.
            dtype: of the sum.
        """
        hiding = (queries @ keys.mT).to(dtype)
        hiding.mul_(self.scale).clamp_(min=0).masked_fill_(at[:, None] >= own, 0)
        return hiding.sum(1)

    def drop_last(self, count: int) -> None:
        """Drop the queries of the newest tokens."""
        self._queries.drop_last(count)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the queries by a function of them, such as a choice of sequences."""
        self._queries.map_batch(change)
