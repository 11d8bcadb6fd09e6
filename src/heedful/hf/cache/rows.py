"""The newest rows of queries or keys, which the outputs of later tokens depend on."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError
from heedful.hf.cache.owner import kind_of
from heedful.nn import Layer
from heedful.ops import Visibility


class PastRows:
    """The newest rows of one stream, `[B, H, n, D]`.

    Between calls it has the `count` newest, and more of them while calls can be taken back.

    Arguments:
        count: how many rows the next token's output depends on.
    """

    parts = ("count", "rows")

    def __init__(self, count: int) -> None:
        self.count = count
        self.rows: Float[Tensor, "B ..."] | None = None

    def add(self, new: Float[Tensor, "B ..."], *, keep_all: bool = False) -> Tensor:
        """Add new rows; returns the `count` newest ones before them, followed by these."""
        joined = new
        if self.rows is not None:
            joined = torch.cat([self.rows, new.to(self.rows.dtype)], dim=2)
        # A copy, since a part would keep the whole.
        self.rows = joined if keep_all else self._newest(joined, self.count).clone()
        return self._newest(joined, self.count + new.shape[2]) if self.count else new

    def check_seen(self, layer: Layer, visibility: Visibility) -> None:
        """Raise where these rows see tokens that the cache of a family has dropped."""
        if self.rows is not None and visibility.window is None and visibility.documents is None:
            raise UserError(
                f"{kind_of(layer)}: this family's cache drops tokens that its mask shows, so that "
                "earlier query rows cannot be computed again; call the model with use_cache=False"
            )

    def drop_last(self, count: int) -> None:
        """Drop the newest rows."""
        if self.rows is not None:
            self.rows = self.rows[:, :, : max(0, self.rows.shape[2] - count)]

    def trim(self) -> None:
        """Keep no more than the next token's output depends on."""
        if self.rows is not None:
            self.rows = self._newest(self.rows, self.count).clone() if self.count else None

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the rows by a function of them, such as a choice of sequences."""
        if self.rows is not None:
            self.rows = change(self.rows)

    def _newest(self, rows: Tensor, count: int) -> Tensor:
        spare = rows.shape[2] - count
        return rows if spare <= 0 else rows[:, :, spare:]
