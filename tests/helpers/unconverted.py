"""Models as they are beside the same ones converted, under policies that read keys or values."""

from dataclasses import dataclass

import torch

import heedful
from heedful.eviction import CachedTokens, Eviction
from heedful.hf import conversion_of
from heedful.hf.convert import replace_attention
from heedful.nn import Selective
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


@dataclass(frozen=True)
class Watched(Eviction):
    """Evicts what the newest five queries have mostly left out, and small values, with a memory."""

    needs = (("attention", 5), "values")

    def score(self, cached: CachedTokens) -> torch.Tensor:
        own = cached.attention / cached.queries + 0.1 * cached.values.norm(dim=-1).mean(1)
        return own if cached.score is None else own + 0.5 * cached.score


RANKED = Selective("extra", dim=6, masks=False)


def pair(family="llama", attention="sdpa", ranked=False, **options):
    """A model as it is, and the same one converted; with selectors that rank, if `ranked`."""
    model, converted = (tiny(family, **options) for _ in range(2))
    converted.load_state_dict(model.state_dict())
    model.set_attn_implementation(attention)
    if not ranked:
        heedful.convert(converted, "standard", verify=False)
        return model, converted
    return beside(model), give_selectors(converted)


def beside(model):
    """The model with selectors beside its attention."""
    return give_selectors(model, attends=False)


def give_selectors(model, attends=True):
    replace_attention(model, RANKED, verify=False, attends=attends)
    draws = torch.Generator().manual_seed(5)
    for _, p in sorted(conversion_of(model).parameters().items()):
        p.data = torch.randn(p.shape, generator=draws).to(model.dtype) / 3
    return model


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
