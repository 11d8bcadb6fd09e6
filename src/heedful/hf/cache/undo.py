"""What a cache keeps of the newest tokens beside their keys: to go on, and to take them back."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.nn import Given
from heedful.ops import Visibility


class Recorded(NamedTuple):
    """What undoing the newest calls takes.

    state: the layer's state before them.
    rows: how many of their newest query rows are kept.
    visibility, scale, given: of the last of these calls; `given` of all kept rows.
    """

    state: Tensor | None
    rows: int
    visibility: Visibility
    scale: float | None
    given: Given


class Newest:
    """The newest tokens' rows as they enter and leave a layer's projections, by part."""

    def __init__(self) -> None:
        self._rows: dict[str, Float[Tensor, "B r ..."]] = {}

    def add(self, part: str, rows: Float[Tensor, "B T ..."], count: int, *, all_of_them: bool):
        """Add new tokens' rows; returns the newest `count` before these, `None` if there are none.

        `count` of all are kept, or all where some may be taken back.
        """
        held = self._rows.get(part)
        joined = rows if held is None else torch.cat([held, rows.to(held.dtype)], dim=1)
        # A copy, since a part would hold the whole.
        self._rows[part] = joined if all_of_them else joined[:, -count:].clone()
        return None if held is None else held[:, -count:]

    def drop_last(self, count: int) -> None:
        """Take the newest tokens' rows back."""
        for part, rows in self._rows.items():
            self._rows[part] = rows[:, : rows.shape[1] - count]

    def keep(self, count: int) -> None:
        """Only so many rows, from now on."""
        for part, rows in self._rows.items():
            self._rows[part] = rows[:, max(0, rows.shape[1] - count) :].clone()

    def on_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """The rows of the batch changed by a function of tensors."""
        self._rows = {part: change(rows) for part, rows in self._rows.items()}

    @property
    def tensors(self) -> list[Tensor]:
        return list(self._rows.values())
