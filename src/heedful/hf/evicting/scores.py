"""Scores of a policy that reads attention, also after calls of which tokens are taken back."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from heedful.eviction import CachedTokens, Eviction, selection
from heedful.eviction.selection import Moves, Padding
from heedful.hf.evicting.step import Step

MOST = 64  # tokens that can be taken back: of so many queries the weights are stored apart


class Received(NamedTuple):
    """Weights that the queries of a call which may be taken back give each token that it reads.

    rows: of each of the newest queries, mean of the heads.
    earlier: of all queries before them together; `None` where the policy does not read these.
    new: the call's number of tokens, and so of queries.
    """

    rows: Float[Tensor, "B r n"]
    earlier: Float[Tensor, "B n"] | None
    new: int

    @property
    def fresh(self) -> int:
        """Number of the newest tokens that can be taken back."""
        return self.new if self.rows.shape[1] == self.new else MOST

    def without(self, newest: int, observes: int | None) -> tuple[Float[Tensor, "B m"], int]:
        """The sum over the observed queries and their number, without the newest tokens."""
        last = self.rows.shape[1] - newest
        first = 0 if observes is None else max(0, last - observes)
        attention, queries = self.rows[:, first:last].sum(1), last - first
        if self.earlier is not None:
            attention, queries = attention + self.earlier, self.new - newest
        return attention[:, : attention.shape[1] - newest], queries


class Scores:
    """The newest scores of the tokens in the slots, and the calls that may be taken back.

    Attributes:
        last: the policy's own, `None` before the first call.
        calls: recorded calls, whose attention no score contains yet.
    """

    parts = ("last",)

    def __init__(self) -> None:
        self.last: Float[Tensor, "B n"] | None = None
        self.calls: list[Received] = []

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.last, *(y for x in self.calls for y in (x.rows, x.earlier))]

    @property
    def fresh(self) -> int:
        """Number of the newest tokens that can be taken back."""
        count = 0
        for call in reversed(self.calls):
            count += call.fresh
            if call.fresh < call.new:
                break
        return count

    def add(
        self,
        policy: Eviction,
        cached: CachedTokens,
        padding: Padding | None,
        attention: Float[Tensor, "B n"],
        queries: int,
    ) -> Float[Tensor, "B n"]:
        """The policy's scores of all tokens that a call reads.

        Arguments:
            policy: which scores.
            cached: these tokens.
            padding: as for `selection.scores`.
            attention: what the call's newest queries give each of them.
            queries: how many of them.
        """
        last = self.last
        if last is not None:
            last = pad(last, (0, attention.shape[1] - last.shape[1]))
        cached = cached._replace(attention=attention, queries=queries, score=last)
        self.last = selection.scores(policy, cached, padding)
        return self.last

    def take_back(self, count: int, policy: Eviction | None) -> Iterator[tuple[Tensor, int]]:
        """Attention of the recorded calls in order, without the newest tokens; then none is left.

        Arguments:
            count: how many tokens are taken back.
            policy: which reads them.
        """
        calls, self.calls = self.calls, []
        while calls and count >= calls[-1].new:
            count -= calls.pop().new
        for call in calls[:-1]:
            yield call.without(0, policy.observes)
        if calls:
            yield calls[-1].without(count, policy.observes)

    def forget(self, step: Step) -> None:
        """Drop the scores of tokens that have left; that of a new one in a slot of theirs is 0."""
        if step.moves is not None:
            self.move(step.moves)
        elif step.hole is not None and self.last is not None:
            self.last = self.last.scatter(1, step.hole, 0)

    def move(self, moves: Moves) -> None:
        """Let the scores follow their tokens."""
        if self.last is not None:
            self.last = self.last.gather(1, moves.keep)

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Choose sequences."""
        if self.last is not None:
            self.last = change(self.last)
        self.calls = [
            Received(change(x.rows), None if x.earlier is None else change(x.earlier), x.new)
            for x in self.calls
        ]
