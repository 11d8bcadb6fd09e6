"""What the last queries of the prompt vote for."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.hf.eviction.policy import Eviction, Held


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Keeps what the newest 32 queries attend to, smoothed over neighbours at the prompt's end.

    It wants the whole prompt at once: until its end nothing is known of these votes, so prefill it
    in one piece, whose memory counts. In later steps the votes go on with a memory of as many
    queries; the published form evicts at the prompt's end only. The heads of a layer share their
    tokens here; the published form lets them differ.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation",
    arXiv 2404.14469, section 4.
    """

    observes: ClassVar[int] = 32
    pool: ClassVar[int] = 7

    def score(self, held: Held) -> Float[Tensor, "B n"]:
        """Votes of the observed queries."""
        if held.queries < 2:
            past = 0 if held.score is None else held.score * (1 - held.queries / self.observes)
            return past + held.attention
        order = held.positions.argsort(1)
        votes = held.attention.gather(1, order)[:, None]
        smooth = torch.nn.functional.max_pool1d(votes, self.pool, 1, self.pool // 2)[:, 0]
        return torch.empty_like(smooth).scatter_(1, order, smooth)
