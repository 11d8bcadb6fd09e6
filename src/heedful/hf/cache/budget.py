"""One layer's budget of tokens, and the step that evicts what it has no room for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from heedful.checks import UserError
from heedful.eviction import CachedTokens, Eviction, gather
from heedful.eviction.gather import Moves, Protection
from heedful.hf.family.modules import logit_bound
from heedful.hf.fingerprints import is_of


@dataclass(frozen=True)
class Budget:
    """The policy of one layer, and its number of tokens.

    Arguments:
        policy: chooses what is evicted.
        tokens: less than so many are cached between two calls; of each key head, where these have
            budgets of their own; `None` where the policy decides how many are evicted too.
        logits: what no logit of the layer exceeds in size, as far as its family makes sure of it.
    """

    policy: Eviction
    tokens: int | tuple[int, ...] | None
    logits: float | None = None

    @property
    def by_head(self) -> bool:
        """Whether key heads have budgets of their own."""
        return isinstance(self.tokens, tuple)

    def __deepcopy__(self, memo: dict) -> "Budget":
        return self  # nothing in it changes


def layer_budgets(
    policy: Eviction | None, modules: Sequence[nn.Module], model: nn.Module
) -> list[Budget | None]:
    """The budget of every attention module of a converted model; `None` keeps everything.

    Raises:
        ValueError: the policy is calibrated for another model, or for another number of layers.
    """
    if policy is None:
        return [None] * len(modules)
    calibration = getattr(policy, "calibration", None)
    if calibration is not None and not is_of(calibration.model, model):
        raise UserError(
            f"eviction: {type(policy).__name__} has the calibration of another model, or of this "
            "one before it was converted or trained on; calibrate this one with heedful calibrate"
        )
    if policy.evicts_below is None:
        tokens = policy.budgets(len(modules))
        return [None if count is None else Budget(policy, count) for count in tokens]
    reads = policy.reads_logits
    return [Budget(policy, None, logit_bound(x) if reads else None) for x in modules]


class EvictionStep:
    """Scores a layer's tokens after each call, and says which slots are filled by which others.

    Arguments:
        budget: of the layer.

    Attributes:
        score: the policy's last scores, of policies that add them up, `[B, 1, n]`.
        norms: the largest of a query's and of a key's norm so far, of policies that read how large
            logits are, `[B, 2]`.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.score: Float[Tensor, "B 1 n"] | None = None
        self.norms: Float[Tensor, "B 2"] | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        return [self.score, self.norms]

    def due(self, length: int) -> bool:
        """Whether a call is followed by a step, with so many tokens cached."""
        if self.budget.tokens is None:
            return True
        return self.budget.policy.observes != 0 or length >= self.budget.tokens

    @torch.no_grad()
    def note(self, q: Float[Tensor, "B H T D"], k: Float[Tensor, "B Hk T D"]) -> None:
        """Take into account how large new tokens' queries and keys are."""
        wide = torch.promote_types(q.dtype, torch.float32)
        norms = torch.stack([x.to(wide).norm(dim=-1).amax((1, 2)) for x in (q, k)], dim=1)
        self.norms = norms if self.norms is None else torch.maximum(self.norms, norms)

    def logits(
        self, dim: int, scale: float | None, softcap: float | None
    ) -> Float[Tensor, " B"] | None:
        """What no logit so far exceeds in size, and none to come as far as the family sees to it.

        Arguments:
            dim: of a head.
            scale, softcap: of the layer's logits.
        """
        if self.norms is None:
            return None
        bound = self.norms.prod(1) * (dim**-0.5 if scale is None else abs(scale))
        if self.budget.logits is not None:
            bound = bound.clamp(min=self.budget.logits)
        return bound if softcap is None else torch.full_like(bound, softcap)

    def queries(self, new: int) -> int:
        """How many of the newest queries the policy observes, of a call with so many."""
        observes = self.budget.policy.observes
        return new if observes is None else min(observes, new)

    def moves(self, cached: CachedTokens, protection: Protection) -> Moves | None:
        """Score all tokens; what fills the slots of the evicted ones, `None` if all fit."""
        policy, count = self.budget.policy, cached.positions.shape[1]
        if self.score is not None:
            last = self.score[:, 0]
            cached = cached._replace(score=pad(last, (0, count - last.shape[1])))
        score = gather.scores(policy, cached, protection.padding)
        if policy.observes != 0:
            self.score = score[:, None]
        if self.budget.tokens is not None and count < self.budget.tokens:
            return None
        slots = gather.slots_to_evict(
            score, cached.positions, policy, self.budget.tokens, protection
        )
        if not slots.shape[1]:
            return None
        moves = gather.moves(slots, count)
        if self.score is not None:
            self.score = moves.of(self.score)
        return moves

    def map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the scores by a function of them, such as a choice of sequences."""
        if self.score is not None:
            self.score = change(self.score)
        if self.norms is not None:
            self.norms = change(self.norms)
