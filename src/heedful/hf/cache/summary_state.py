"""State of a cache of summaries between calls: near tokens, groups, inputs of open ones."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from heedful.hf.cache.ledger import Ledger
from heedful.nn import LayerInputs
from heedful.ops import Visibility


class GroupTokens(NamedTuple):
    """Tokens with what their groups and summaries are made of; `None` for what takes nothing.

    keys, values, queries: rotated, `[B, H, n, D]`; queries where groups have them.
    grouping, pooling: features, `[B, n, F]`.
    positions: of the model, `[B, n]`.
    """

    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n D"]
    queries: Float[Tensor, "B H n D"] | None
    grouping: Float[Tensor, "B n F"] | None
    pooling: Float[Tensor, "B n P"] | None
    positions: Int[Tensor, "B n"] | None

    @property
    def count(self) -> int:
        return self.keys.shape[2]

    def part(self, start: int, stop: int | None = None) -> "GroupTokens":
        """Some of the tokens."""
        length = (self.count if stop is None else stop) - start
        parts = self._asdict().items()
        return GroupTokens(
            *(None if x is None else x.narrow(_dim(name), start, length) for name, x in parts)
        )

    def followed_by(self, more: "GroupTokens") -> "GroupTokens":
        """These tokens and later ones."""
        pairs = zip(self._asdict().items(), more, strict=True)
        return GroupTokens(
            *(None if x is None else torch.cat([x, y], dim=_dim(name)) for (name, x), y in pairs)
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> "GroupTokens":
        """The same with every tensor replaced by a function of it."""
        return GroupTokens(*(None if x is None else change(x) for x in self))


class SummaryState(NamedTuple):
    """State between calls; every tensor is of all sequences.

    ledger: which groups there are, and who is in which.
    keys, values: of the near tokens, those from `ledger.first` on.
    open: the tokens from `ledger.opened` on, whose keys and values are views of the near ones'.
    group_keys, group_values: summaries, with room for more.
    newest_query: of the newest complete group of each sequence, `[B, H, 1, D]`, where groups have
        queries.
    """

    ledger: Ledger
    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n D"]
    open: GroupTokens
    group_keys: Float[Tensor, "B Hk room D"]
    group_values: Float[Tensor, "B Hk room D"]
    newest_query: Float[Tensor, "B H 1 D"] | None

    @classmethod
    def before(cls, new: GroupTokens) -> "SummaryState":
        """Before the first token."""
        query = None if new.queries is None else torch.zeros_like(new.queries[:, :, :1])
        none = new.part(0, 0)
        ledger = Ledger.empty(len(new.keys), new.keys.device)
        return cls(ledger, none.keys, none.values, none, none.keys, none.values, query)

    def tensors(self) -> list[Tensor]:
        """All of them; several may look at one storage."""
        parts = (*self, *self.ledger, *self.open)
        return [x for x in parts if isinstance(x, Tensor)]

    def map(self, change: Callable[[Tensor], Tensor]) -> "SummaryState":
        """The same with every tensor replaced by a function of it."""
        mapped = SummaryState(*(change(x) if isinstance(x, Tensor) else x for x in self))
        ledger = Ledger(*(change(x) if isinstance(x, Tensor) else x for x in self.ledger))
        return mapped._replace(ledger=ledger, open=self.open.map(change)).with_views()

    def on(self, device: torch.device) -> "SummaryState":
        """With keys and values, of groups and of tokens, on another device."""
        names = ("keys", "values", "group_keys", "group_values")
        there = {x: getattr(self, x).to(device, non_blocking=True) for x in names}
        return self._replace(**there).with_views()

    def without_far(self, first: int) -> "SummaryState":
        """Without the tokens, `first` and on, that the next query sees in summaries alone."""
        drop = self.ledger.first - first
        keys, values = (x if not drop else _compact(x[:, :, drop:]) for x in self[1:3])
        features = {
            name: _compact(x)
            for name in ("queries", "grouping", "pooling", "positions")
            if (x := getattr(self.open, name)) is not None
        }
        near = self.open._replace(**features)
        return self._replace(keys=keys, values=values, open=near).with_views()

    def with_views(self) -> "SummaryState":
        """The open tokens' keys and values as views of the near ones'."""
        start = self.ledger.opened - self.ledger.first
        near = {x: getattr(self, x)[:, :, start:] for x in ("keys", "values")}
        return self._replace(open=self.open._replace(**near))


class SummaryUndo(NamedTuple):
    """Data needed to take back the newest calls.

    state: before these calls; `None` before the first token.
    tokens: of these calls.
    visibility, inputs: of the last call.
    """

    state: SummaryState | None
    tokens: GroupTokens
    visibility: Visibility
    inputs: LayerInputs

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> "SummaryUndo":
        """The same with every tensor of the state and the tokens replaced by a function of it."""
        state = None if self.state is None else self.state.map(change)
        return self._replace(state=state, tokens=self.tokens.map(change))

    def tensors(self) -> list[Tensor | None]:
        """All of the state and the tokens."""
        return [*([] if self.state is None else self.state.tensors()), *self.tokens]


def _dim(name: str) -> int:
    """Along which dimension the tokens are."""
    return 2 if name in ("keys", "values", "queries") else 1


def _compact(x: Tensor) -> Tensor:
    """A view without what lies around it, where that is much."""
    whole = x.untyped_storage().nbytes()
    return x.clone() if whole > 2 * x.numel() * x.element_size() else x
