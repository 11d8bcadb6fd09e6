"""The methods: which token a layer evicts when its budget is full.

| method | evicts first | reads |
|---|---|---|
| `MostHidden` | what selective attention has masked most | F |
| `LowestGate` | what retention gates predict to be of least use | gates |
| `StreamingLLM` | the oldest, but for the first tokens | positions |
| `H2O` | what all queries together attend to least | attention of every query |
| `TOVA` | what the newest query attends to least | attention of the newest query |
| `SnapKV` | what the last queries of the prompt attend to least | attention of 32 queries |
| `Window` | the oldest | positions |
| `Random` | random tokens | positions |
| `TriAttention` | what later queries are expected to attend to least | keys, a calibration |

`Bounded` has no budget: it evicts what F proves to be negligible. `TriAttention` is in
`triattention.py`.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from heedful.checks import UserError
from heedful.eviction.policy import CachedTokens, Eviction
from heedful.ops.selective.soft_eviction import AGE

_PRIME = 2_147_483_647  # 2**31 - 1: products of two numbers below it fit an int64


@dataclass(frozen=True)
class MostHidden(Eviction):
    """Evicts the token with the highest F; of tokens that nothing has masked, the oldest.

    F never falls, so an evicted token would have been masked at least as strongly for every later
    query. It needs selective attention, or forgetting attention, where F is the higher the older a
    token is, so that this is `StreamingLLM`.

    Source: Leviathan et al., "Selective Attention Improves Transformer", arXiv 2410.02703,
    section 4.
    """

    reads_hidden = True

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """`-F`, and so little of the position that it decides between equals."""
        return AGE * cached.positions - cached.hidden


@dataclass(frozen=True)
class LowestGate(Eviction):
    """Evicts the token with the lowest retention gate; of equal ones the oldest.

    It needs `heedful.RetentionGate`. A gate is set when its token comes and never changes, so a
    token that is evicted under one budget would be under every smaller one.

    Source: see `heedful.RetentionGate`.
    """

    reads_gate = True

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The gate."""
        return cached.gate


@dataclass(frozen=True)
class StreamingLLM(Eviction):
    """Keeps the first `sinks` tokens and the newest ones.

    Positions continue to count; the published form renumbers them inside the cache.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    arXiv 2309.17453, section 3.2.
    """

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The position."""
        return cached.positions.float()


@dataclass(frozen=True)
class H2O(Eviction):
    """Evicts the token that all queries together have given the least attention.

    The heads of a layer share their tokens here; the published form lets them differ. Reading all
    queries' weights costs a second pass over the prompt.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle", arXiv 2306.14048, section 4.
    """

    observes = None

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The attention received so far."""
        return cached.attention if cached.score is None else cached.score + cached.attention


@dataclass(frozen=True)
class TOVA(Eviction):
    """Evicts the token that the newest query gives the least attention, mean over the heads.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104, section 3.
    """

    observes = 1

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The newest query's weight."""
        return cached.attention


@dataclass(frozen=True)
class SnapKV(Eviction):
    """Keeps what the newest 32 queries attend to, smoothed over neighbours at the prompt's end.

    It needs the whole prompt in one call, as it scores from the prompt's end; the memory of that
    call counts. Later steps keep scoring by the newest 32 queries; the published form evicts at the
    prompt's end only. The heads of a layer share their tokens here; the published form lets them
    differ.

    Source: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation",
    arXiv 2404.14469, section 4.
    """

    observes: ClassVar[int] = 32
    pool: ClassVar[int] = 7

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The attention of the observed queries."""
        if cached.queries < 2:
            past = (
                0 if cached.score is None else cached.score * (1 - cached.queries / self.observes)
            )
            return past + cached.attention
        order = cached.positions.argsort(1)
        votes = cached.attention.gather(1, order)[:, None]
        smooth = torch.nn.functional.max_pool1d(votes, self.pool, 1, self.pool // 2)[:, 0]
        return torch.empty_like(smooth).scatter_(1, order, smooth)


@dataclass(frozen=True)
class Window(Eviction):
    """Keeps the newest tokens; with the `sinks` of the others it would be `StreamingLLM`."""

    sinks: int = 0

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The position."""
        return cached.positions.float()


@dataclass(frozen=True)
class Random(Eviction):
    """Keeps random tokens; each draws its number once, so what is kept is a uniform sample.

    Arguments:
        seed: another seed draws other numbers.
    """

    seed: int = 0

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """A number from 0 to 1 that only the position and the seed decide."""
        x = (cached.positions * 48_271 + 1 + self.seed * 69_621) % _PRIME
        for _ in range(3):
            x = (x * 48_271 + (x >> 7) * 16_807) % _PRIME
        return x / _PRIME


@dataclass(frozen=True)
class Bounded(Eviction):
    r"""Evicts every token that F proves to be negligible for all later queries; no budget.

    Let no logit exceed $U$ in size before F is subtracted. A query sees its own token, which has
    F = 0, so its softmax's sum is at least $e^{-U}$, and a key's weight at most $e^{2U - F}$. F
    never falls, so this holds for all later queries too. The token at position t is evicted when

    $$ F \ge 2U + \log\frac{(t + 1)(t + 2)}{\epsilon}, \qquad
       \sum_t \frac{\epsilon}{(t + 1)(t + 2)} \le \epsilon $$

    in every head of the layer, so that all evicted tokens together have at most `epsilon` of any
    later query's weight, however long the sequence is. The layer's output changes by at most
    $2 \epsilon \max_j |v_j|$, beside rounding.

    In a batch every sequence evicts as many tokens as the one that can evict fewest.

    Arguments:
        epsilon: the share of a query's weight that may be lost, between 0 and 1.
        logits: U, for all layers. `None` takes what the layer's family makes sure of: its soft cap,
            or norms of queries and keys per head, as in Qwen 3. Elsewhere it takes the largest
            norms of the queries and keys so far, which proves nothing of those to come.
        sinks, recent, keep_prompt: as of every policy.

    Source: the threshold is that of "Adaptive Computation Pruning for the Forgetting Transformer",
        arXiv 2504.06949, with a share for every position in place of a length that is known.
    """

    tokens: None = field(default=None, init=False)
    epsilon: float = 1e-4
    logits: float | None = None
    sinks: int = field(default=0, kw_only=True)
    recent: int = field(default=0, kw_only=True)
    keep_prompt: bool = field(default=False, kw_only=True)

    reads_hidden = True
    reads_logits = True
    evicts_below = 0.0

    def __post_init__(self) -> None:
        if not _is_number(self.epsilon) or not 0 < self.epsilon < 1:
            raise UserError(
                f"epsilon must be a number between 0 and 1, the share of attention that may be "
                f"lost, such as 1e-4, got {self.epsilon!r}"
            )
        if self.logits is not None and not (_is_number(self.logits) and self.logits >= 0):
            raise UserError(
                f"logits must be a number of at least 0 that no logit exceeds, or None (what is "
                f"known of the family), got {self.logits!r}"
            )
        super().__post_init__()

    def budgets(self, layers: int) -> tuple[None, ...]:
        """No layer has one."""
        return (None,) * layers

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """How much F is short of what proves the token negligible, below 0 if nothing."""
        bound = cached.logits[:, None] if self.logits is None else self.logits
        at = cached.positions.to(cached.hidden.dtype)
        share = torch.log(at + 1) + torch.log(at + 2) - math.log(self.epsilon)
        return 2 * bound + share - cached.hidden


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


POLICIES = (MostHidden, StreamingLLM, H2O, TOVA, SnapKV, Window, Random, LowestGate)
"""Those that need a budget of tokens and nothing else."""
