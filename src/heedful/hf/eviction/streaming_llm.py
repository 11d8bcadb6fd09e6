"""Attention sinks and a window."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held


@dataclass(frozen=True)
class StreamingLLM(Eviction):
    """Keeps the first `sinks` tokens and the newest ones.

    Positions go on counting; the published form counts them anew inside the cache.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    arXiv 2309.17453, section 3.2.
    """

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """The position."""
        return held.positions.float()
