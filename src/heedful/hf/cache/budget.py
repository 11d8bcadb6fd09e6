"""One layer's budget of tokens, and the step that evicts what it has no room for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from heedful.checks import UserError
from heedful.eviction import CachedTokens, Eviction, selection
from heedful.eviction.selection import KeepRules, Moves


@dataclass(frozen=True)
class Budget:
    """The policy of one layer, and its number of tokens.

    Arguments:
        policy: chooses what is evicted.
        tokens: less than so many are cached between two calls.
    """

    policy: Eviction
    tokens: int

    def __deepcopy__(self, memo: dict) -> "Budget":
        return self  # nothing in it changes


def layer_budgets(policy: Eviction | None, modules: Sequence[nn.Module]) -> list[Budget | None]:
    """The budget of every attention module of a model; `None` keeps everything.

    Raises:
        ValueError: the policy has budgets for another number of layers.
    """
    if policy is None:
        return [None] * len(modules)
    tokens = policy.budgets(len(modules))
    return [None if count is None else Budget(policy, count) for count in tokens]


class EvictionStep:
    """Scores a layer's tokens after each call, and says which slots are filled by which others.

    Arguments:
        budget: of the layer.

    Attributes:
        score: the policy's last scores, of policies that add them up, `[B, 1, n]`.
    """

    parts = ("score",)

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.score: Float[Tensor, "B 1 n"] | None = None

    def due(self, length: int) -> bool:
        """Test whether a step follows a call, with so many tokens cached."""
        return self.budget.policy.observes != 0 or length >= self.budget.tokens

    def queries(self, new: int) -> int:
        """Number of newest queries that the policy observes, of a call with so many."""
        observes = self.budget.policy.observes
        return new if observes is None else min(observes, new)

    def moves(self, cached: CachedTokens, rules: KeepRules) -> Moves | None:
        """Score all tokens; what fills the slots of the evicted ones, `None` if all fit."""
        policy, count = self.budget.policy, cached.positions.shape[1]
        if self.score is not None:
            last = self.score[:, 0]
            cached = cached._replace(score=pad(last, (0, count - last.shape[1])))
        score = selection.scores(policy, cached, rules.padding)
        if policy.observes != 0:
            self.score = score[:, None]
        if count < self.budget.tokens:
            return None
        slots = selection.slots_to_evict(score, cached.positions, policy, self.budget.tokens, rules)
        if not slots.shape[1]:
            return None
        moves = selection.moves(slots, count, rules.newest)
        if self.score is not None:
            self.score = moves.of(self.score)
        return moves

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the scores by a function of them, such as a choice of sequences."""
        if self.score is not None:
            self.score = change(self.score)


def scores_add_up(policy: Eviction) -> UserError:
    """The error of asking a cache to record calls that may be taken back, under such a policy."""
    return UserError(
        f"{type(policy).__name__} cannot take tokens back, as assisted decoding asks: its scores "
        "add up over queries; decode without, or with another policy"
    )
