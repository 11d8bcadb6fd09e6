"""Heavy hitters: what has been attended to most, ever since."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held


@dataclass(frozen=True)
class H2O(Eviction):
    """Evicts the token that all queries together have given the least attention.

    The heads of a layer share their tokens here; the published form lets them differ. Reading all
    queries' weights costs a second pass over the prompt.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle", arXiv 2306.14048, section 4.
    """

    observes = None

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """The attention received so far."""
        return held.attention if held.score is None else held.score + held.attention
