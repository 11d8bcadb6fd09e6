"""One layer's budget of tokens, and the step that evicts what it has no room for."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.functional import pad

from heedful.eviction import CachedTokens, Eviction, selection
from heedful.eviction.selection import KeepRules, Moves
from heedful.hf.cache.streams import Numbers


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


def moves_of(
    budget: Budget, cached: CachedTokens, rules: KeepRules, score: Numbers | None
) -> Moves | None:
    """Score all tokens of a layer after a call.

    Arguments:
        budget: of the layer.
        cached: its tokens.
        rules: what decides beside the policy's scores.
        score: the policy's last scores, of one that reads attention; replaced by the new ones.

    Returns:
        What fills the slots of the evicted tokens; `None` if all fit.
    """
    policy, count = budget.policy, cached.positions.shape[1]
    if score is not None and (last := score.contents) is not None:
        cached = cached._replace(score=pad(last[:, 0], (0, count - last.shape[2])))
    scores = selection.scores(policy, cached, rules.padding)
    if score is not None:
        score.contents = scores[:, None]
    if count < budget.tokens:
        return None
    slots = selection.slots_to_evict(scores, cached.positions, policy, budget.tokens, rules)
    return selection.moves(slots, count, rules.newest) if slots.shape[1] else None
