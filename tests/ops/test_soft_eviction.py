"""Soft eviction: its formula by loops, what it leaves of the map, and what can be learned by it."""

import math

import pytest
import torch

from heedful.ops.selective.soft_eviction import AGE, SHARPNESS, soft_eviction

CAUSAL = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]


def hidden(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.rand(2, 1, 20, 20, dtype=torch.float64).cumsum(2)


@pytest.mark.parametrize("tokens", [1, 4, 12, 19])
def test_it_is_the_formula(tokens):
    f = hidden()
    bias = soft_eviction(f, CAUSAL, tokens, sinks=1, recent=2)
    for b in range(2):
        for i in range(20):
            protected = {0, i - 1, i}
            level = [
                -1.0 if j in protected else f[b, 0, i, j].item() + AGE * (19 - j)
                for j in range(i + 1)
            ]
            order = sorted(level)
            if i + 1 < tokens:
                assert not bias[b, 0, i, : i + 1].any()
                continue
            threshold = order[tokens - 1]
            width = max(order[min(2 * tokens, len(order)) - 1] - threshold, 1e-9)
            assert not any(bias[b, 0, i, j] for j in protected if j >= 0)
            for j in set(range(i + 1)) - protected:
                x = SHARPNESS * (level[j] - threshold) / width
                softplus = x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
                assert bias[b, 0, i, j].item() == pytest.approx(-softplus, rel=1e-9, abs=1e-12)


def test_a_cache_that_holds_everything_evicts_nothing():
    f = hidden().requires_grad_()
    assert not soft_eviction(f, CAUSAL, 20).any() and not soft_eviction(f, CAUSAL, 90).any()


def test_the_scale_of_f_changes_nothing():
    """Else a model could learn to make all F alike, and evict nothing."""
    f = hidden()
    large, small = (
        soft_eviction(x * f, CAUSAL, 4, 0.0, 0, 0).masked_fill(~CAUSAL, 0) for x in (100, 7)
    )
    torch.testing.assert_close(large, small)


def test_of_tokens_that_nothing_has_hidden_the_oldest_go():
    """As under `MostHidden`: a layer that hides nothing keeps the newest tokens."""
    bias = soft_eviction(torch.zeros(1, 1, 20, 20), CAUSAL, 5, sinks=1, recent=2)
    weights = bias.masked_fill(~CAUSAL, -torch.inf).softmax(-1)[0, 0, -1]
    assert weights[0] == weights[-1] and weights[[0, *range(15, 20)]].sum() > 0.95
    assert bool((weights[1:].diff() >= 0).all()) and weights[1:12].sum() < 1e-3


def test_what_is_beyond_twice_the_cache_weighs_little():
    f = hidden()
    logits = soft_eviction(f, CAUSAL, 5, sinks=0, recent=0).masked_fill(~CAUSAL, -torch.inf)
    rank = f.masked_fill(~CAUSAL, torch.inf).argsort(-1).argsort(-1)
    weights = logits.softmax(-1)[:, :, 10:]
    rest = (weights * (rank[:, :, 10:] >= 10)).sum(-1)
    assert rest.max() < 10 * math.exp(-SHARPNESS) / 2


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_are_finite_and_of_f_alone(tied):
    f = torch.zeros(1, 1, 20, 20, dtype=torch.float64) if tied else hidden()
    f.requires_grad_()
    bias = soft_eviction(f, CAUSAL, 4, sinks=1, recent=2)
    (gradient,) = torch.autograd.grad(bias.masked_select(CAUSAL).sum(), f)
    assert gradient.isfinite().all() and gradient.max() <= 0 and gradient[0, 0, -1].any()
    assert gradient.min() >= -10 * SHARPNESS
    assert not gradient[:, :, :3].any()  # these see no more than the cache has room for
