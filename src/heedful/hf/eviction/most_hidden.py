"""The published rule of selective attention: what has been hidden most goes first."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held


@dataclass(frozen=True)
class MostHidden(Eviction):
    """Evicts the token with the highest F.

    F never falls, so a token that goes would have been at least as far hidden from every later
    query. It needs selective attention.

    Source: Leviathan et al., "Selective Attention Improves Transformer", arXiv 2410.02703,
    section 4.
    """

    reads_hidden = True

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """`-F`."""
        return -held.hidden
