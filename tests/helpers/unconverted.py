"""Models as they are beside the same ones converted, under policies that read keys or values."""

from dataclasses import dataclass

import torch

import heedful
from heedful.eviction import CachedTokens, Eviction
from helpers.cached import in_steps
from helpers.families import tiny


@dataclass(frozen=True)
class Knorm(Eviction):
    """Evicts keys of large norm."""

    needs = ("keys",)

    def score(self, cached: CachedTokens) -> torch.Tensor:
        return -cached.keys.norm(dim=-1).mean(1)


@dataclass(frozen=True)
class Strongest(Eviction):
    """Evicts small values under large keys."""

    needs = ("keys", "values")

    def score(self, cached: CachedTokens) -> torch.Tensor:
        return cached.values.norm(dim=-1).mean(1) - 0.1 * cached.keys.norm(dim=-1).mean(1)


def pair(family="llama", attention="sdpa", **options):
    """A model as it is, and the same one converted."""
    model, converted = (tiny(family, **options) for _ in range(2))
    converted.load_state_dict(model.state_dict())
    model.set_attn_implementation(attention)
    heedful.convert(converted, "standard", verify=False)
    return model, converted


def agree(model, converted, policy, ids, sizes, **options):
    caches = [heedful.new_cache(x, policy) for x in (model, converted)]
    actual, expected = (
        in_steps(x, ids, sizes, cache, **dict(options))
        for x, cache in zip((model, converted), caches, strict=True)
    )
    real = options.get("attention_mask", torch.ones_like(ids)).bool()
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-11)
    for own, other in zip(*(cache.positions() for cache in caches), strict=True):
        assert torch.equal(own, other)
    assert caches[0].tokens == caches[1].tokens
    return caches
