"""A sliding window and nothing else."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held


@dataclass(frozen=True)
class Window(Eviction):
    """Keeps the newest tokens; with the `sinks` of the others it would be `StreamingLLM`."""

    sinks: int = 0

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """The position."""
        return held.positions.float()
