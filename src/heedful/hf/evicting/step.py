"""A call of the model, as the slots of a cache see it."""

from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction.selection import Moves


class Step(NamedTuple):
    """The changes that a call makes to the slots of every layer of a map.

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
        """True if attention reads all tokens so far, which are in order then."""
        return self.read == self.before + self.new


class Reader(Protocol):
    """The layer whose keys and values a policy reads."""

    index: int
    keys: Float[Tensor, "B Hk n D"] | None
    values: Float[Tensor, "B Hk n Dv"] | None


def in_order(
    window: int | None, length: int, new: int, before: int, device: torch.device
) -> tuple[Step, int]:
    """The step of layers that cache the newest tokens in order.

    Arguments:
        window: how far back queries see; `None` where nothing leaves.
        length: how many tokens are cached.
        new: how many tokens come.
        before: how many have come before them.
        device: of the keys.

    Returns:
        The step, and how many slots are in use after it.
    """
    keeps = window is not None
    drop = max(0, length - (window - 1)) if keeps else 0
    read = length - drop + new
    joined = keeps and new > 1 and read > window - 1
    left = window - 1 if joined else read
    keep = torch.arange(read - left, read, device=device)[None] if joined else None
    return Step(new, before, read, drop=drop, joined=joined, keep=keep), left


def interrupted() -> UserError:
    """The error of layers that were not all called."""
    return UserError(
        "the cache was left in the middle of a call that was interrupted, and its layers do not "
        "agree; call its reset(), or make one with heedful.new_cache(model)"
    )
