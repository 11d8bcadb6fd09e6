"""The methods: which token a layer evicts when its budget is full.

| method | evicts first | reads |
|---|---|---|
| `MostHidden` | what selective attention has masked most | F |
| `StreamingLLM` | the oldest, but for the first tokens | positions |
| `H2O` | what all queries together attend to least | attention of every query |
| `TOVA` | what the newest query attends to least | attention of the newest query |
| `SnapKV` | what the last queries of the prompt attend to least | attention of 32 queries |
| `Window` | the oldest | positions |
| `Random` | random tokens | positions |
| `Knorm` | what has the longest key | keys |
| `KeyDiff` | what points nearest to where all keys point | keys |
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

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

    needs = ("F",)

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """`-F`, and so little of the position that it decides between equals."""
        return AGE * cached.positions - cached.number


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

    needs = (("attention", None),)

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """The attention received so far."""
        return cached.attention if cached.score is None else cached.score + cached.attention


@dataclass(frozen=True)
class TOVA(Eviction):
    """Evicts the token that the newest query gives the least attention, mean over the heads.

    Source: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104, section 3.
    """

    needs = (("attention", 1),)

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

    needs = (("attention", 32),)
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
class Knorm(Eviction):
    """Evicts the token with the longest key, mean over the heads: short keys draw attention.

    Source: Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache
    Compression", arXiv 2406.11430, section 3.
    """

    needs = ("keys",)

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """Minus the key's norm."""
        return -cached.keys.float().norm(dim=-1).mean(1)


@dataclass(frozen=True)
class KeyDiff(Eviction):
    r"""Evicts the token whose key points most nearly where all keys point, mean over the heads.

    $$ s_j = -\frac{1}{H} \sum_h \cos(k_{hj}, a_h), \qquad
       a_h = \frac{1}{n} \sum_i \frac{k_{hi}}{|k_{hi}|} $$

    Source: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM
    Inference in Resource-Constrained Environments", arXiv 2504.15364, section 3.
    """

    needs = ("keys",)

    def score(self, cached: CachedTokens) -> Float[Tensor, "B n"]:
        """Minus the cosine to the mean direction of the real tokens' keys."""
        keys = normalize(cached.keys.float(), dim=-1)
        real = keys if cached.real is None else keys * cached.real[:, None, :, None]
        anchor = normalize(real.sum(2, keepdim=True), dim=-1)
        return -(keys * anchor).sum(-1).mean(1)


POLICIES = (
    MostHidden, StreamingLLM, H2O, TOVA, SnapKV, Window, Random, Knorm, KeyDiff,
)  # fmt: skip
"""Those that need a budget of tokens and nothing else."""
