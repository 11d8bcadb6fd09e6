"""What the newest query attends to least."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held


@dataclass(frozen=True)
class TOVA(Eviction):
    """Evicts the token that the newest query gives the least attention, mean over the heads.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104, section 3.
    """

    observes = 1

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """The newest query's weight."""
        return held.attention
