"""A call of the model, as the slots of a cache see it."""

from typing import NamedTuple, Protocol

from jaxtyping import Float, Int
from torch import Tensor

from heedful.eviction.selection import Moves


class Step(NamedTuple):
    """What a call does to the slots of every layer of a map.

    new: how many tokens come.
    before: how many have come before them.
    read: how many tokens attention reads, the new ones included.
    moves: fills the slots of tokens evicted before, first of all; `None` for nothing.
    drop: how many of the oldest tokens leave before that, where they are in order.
    hole: the slot that the only new token takes, `[B or 1, 1]`; `None` adds new tokens at the end.
    joined: whether the new tokens are read beside the cached ones, and what stays is taken then.
    evicts: whether tokens are evicted once this call is read.
    keep: which of the joined tokens stay, `[B or 1, m]`; `None` where the layer's keys, values or
        attention decide.
    """

    new: int
    before: int
    read: int
    moves: Moves | None = None
    drop: int = 0
    hole: Int[Tensor, "#B 1"] | None = None
    joined: bool = False
    evicts: bool = False
    keep: Int[Tensor, "#B m"] | None = None

    @property
    def whole(self) -> bool:
        """Whether attention reads all tokens that have come, which are in order then."""
        return self.read == self.before + self.new


class Reader(Protocol):
    """The layer whose keys and values a policy reads."""

    index: int
    keys: Float[Tensor, "B Hk n D"] | None
    values: Float[Tensor, "B Hk n Dv"] | None
