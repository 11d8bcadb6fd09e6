"""`Bounded`: what it evicts never has more than epsilon of a later query's weight."""

import math

import pytest
import torch

import heedful
from heedful.eviction import Bounded
from heedful.hf.budgets import NAME, write_budgets
from heedful.hf.cache.budget import Budget
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.family.modules import logit_bound
from heedful.nn import Forgetting, LayerInputs, Selective
from heedful.ops import Visibility
from helpers.cached import converted, greedy, in_steps
from helpers.families import logits, ragged_mask, tokens
from helpers.layers import stirred
from helpers.oracle import draw

MECHANISMS = {
    "forgetting": Forgetting(),
    "forgetting-identity": Forgetting("identity"),
    "selective": Selective(),
    "selective-per-head": Selective("per-head"),
    "selective-extra": Selective("extra"),
}


def layer_of(name: str):
    return stirred(MECHANISMS[name], 0.5)


def random_inputs(tokens: int, largest: float, batch: int = 2):
    """Queries, keys and values, and the input; no logit is above `largest`."""
    q, k = draw(batch, 4, tokens, 6), draw(batch, 2, tokens, 6)
    length = math.sqrt(largest * 6**0.5)
    q, k = (length * x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    return q, k, draw(batch, 2, tokens, 6), draw(batch, tokens, 20)


def hostile_inputs(tokens: int, old: int, largest: float):
    """Old keys have the largest logit that there is, every other key the smallest."""
    q, k, v, x = random_inputs(tokens, largest, batch=1)
    length = math.sqrt(largest * 6**0.5)
    q, k = torch.zeros_like(q), torch.zeros_like(k)
    q[..., 0], k[..., 0] = length, -length
    k[:, :, :old, 0] = length
    return q, k, torch.where(v > 0, 1.0, -1.0).double(), torch.zeros_like(x)


def stepped(layer, inputs, policy, step: int = 1):
    """Outputs through a cache, and which tokens each query had."""
    q, k, v, x = inputs
    cache, outputs, cached = LayerCache(layer, None, Budget(policy, None)), [], []
    for start in range(0, q.shape[2], step):
        new = slice(start, start + step)
        keys, values = cache.update(k[:, :, new], v[:, :, new])
        cached.append(cache.positions())
        out = cache.attend(
            layer, q[:, :, new], keys, values, visibility=Visibility(), scale=None,
            inputs=LayerInputs(input=x[:, new]),
        )  # fmt: skip
        outputs.append(out)
    return torch.cat(outputs, 2), cached, cache


def evicted_weight(layer, inputs, cached, step: int = 1) -> torch.Tensor:
    """The weight of all evicted tokens together, by the whole maps, `[B, H, T]`."""
    q, k, _, x = inputs
    weights = layer.maps(q, k, inputs=LayerInputs(input=x)).weights.detach()
    absent = torch.ones_like(weights, dtype=torch.bool)
    for number, positions in enumerate(cached):
        for row, at in enumerate(positions):
            absent[row, :, number * step : (number + 1) * step, at] = False
    return (weights * absent).sum(-1)


@pytest.mark.parametrize("epsilon", [0.3, 1e-7])
@pytest.mark.parametrize("name", MECHANISMS)
def test_evicted_tokens_never_have_more_than_epsilon(name, epsilon):
    layer, inputs = layer_of(name), random_inputs(130, 2.0)
    whole = layer(*inputs[:3], inputs=LayerInputs(input=inputs[3])).output
    for step, policy in ((3, Bounded(epsilon, 2.0)), (7, Bounded(epsilon))):
        output, cached, cache = stepped(layer, inputs, policy, step)
        assert cache.length < 130, "it evicts"
        assert evicted_weight(layer, inputs, cached, step).max() <= epsilon
        error = (output - whole).abs().max()
        assert error <= 2 * epsilon * inputs[2].norm(dim=-1).max()
        assert len({tuple(at.shape) for at in cache.positions()}) == 1


@pytest.mark.parametrize("old", [1, 20])
@pytest.mark.parametrize("largest", [0.0, 1.0, 8.0])
def test_the_bound_holds_where_logits_are_the_worst_and_is_tight(largest, old):
    """One token lets all heads forget just enough of all that is old, and no other anything."""
    layer, inputs, epsilon = layer_of("forgetting"), hostile_inputs(60, old, largest), 1e-2
    with torch.no_grad():
        layer.forget.weight.zero_()
        layer.forget.weight[:, 0] = 1
        layer.forget.bias.fill_(60)  # gates of one
    decay = 2 * largest + math.log(old * (old + 1) / epsilon) + 1e-9
    inputs[3][:, old, 0] = -60 - math.log(math.expm1(decay))
    output, cached, cache = stepped(layer, inputs, Bounded(epsilon, largest))
    assert cache.positions()[0].tolist() == list(range(old, 60))
    share = evicted_weight(layer, inputs, cached)
    assert share.max() <= epsilon
    if old == 1:  # which has half of its share, and then a quarter beside two keys
        assert share.max() > 0.24 * epsilon
    whole = layer(*inputs[:3], inputs=LayerInputs(input=inputs[3])).output
    assert (output - whole).norm(dim=-1).max() <= 2 * epsilon * inputs[2].norm(dim=-1).max()
    inputs[3][:, old, 0] += 1e-6
    stays = stepped(layer, inputs, Bounded(epsilon, largest))[2].positions()[0]
    assert stays[0] == old - 1, "a little less would not do for the newest of them"


def test_every_token_at_its_threshold_loses_epsilon_in_all():
    """What all shares of an endless sequence add up to."""
    shares = [1 / ((t + 1) * (t + 2)) for t in range(100_000)]
    assert 0.9999 < sum(shares) < 1
    cached = heedful.eviction.CachedTokens(torch.arange(5)[None], 5, draw(1, 5), logits=None)
    expected = 6 + math.log(5 * 6 / 1e-3) - cached.hidden[0, 4]
    assert Bounded(1e-3, 3.0).score(cached)[0, 4].item() == pytest.approx(expected.item())


def test_the_largest_norms_so_far_bound_the_logits():
    layer, inputs = layer_of("forgetting"), list(random_inputs(30, 2.0))
    inputs[0][1, :, 20] *= 3
    cache = stepped(layer, inputs, Bounded())[2]
    largest = cache._step.logits(6, None, None)
    torch.testing.assert_close(largest, torch.tensor([2.0, 6.0]).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(cache._step.logits(6, 1.0, None), 6**0.5 * largest)
    assert cache._step.logits(6, None, 5.0).tolist() == [5, 5], "a soft cap is the bound"


def test_norms_per_head_bound_the_logits():
    for family in ("qwen3", "gemma3_text"):
        model = converted("selective", family)
        module = model.model.layers[0].self_attn
        shift = family.startswith("gemma")
        gains = [(x.weight + shift).abs().max().item() for x in (module.q_norm, module.k_norm)]
        bound = module.scaling * module.heedful.shape.dim * gains[0] * gains[1]
        assert logit_bound(module) == pytest.approx(bound, rel=1e-6)
        cache = heedful.new_cache(model, Bounded(0.1))
        in_steps(model, tokens(2, 20), [16, 1, 1, 1, 1], cache)
        for part in cache.layers:
            # The logits so far stay below it, so that the family's bound counts.
            assert part._step.norms.prod(1).max() * module.scaling <= part.budget.logits * 1.0001
            dim, scale = part.keys.shape[3], module.scaling
            assert part._step.logits(dim, scale, None).max() == pytest.approx(part.budget.logits)
    assert logit_bound(converted("selective").model.layers[0].self_attn) is None
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
            "original_max_position_embeddings": 32}  # fmt: skip
    scaled = converted("selective", "qwen3", rope_parameters=yarn)
    assert logit_bound(scaled.model.layers[0].self_attn) is None


@pytest.mark.parametrize("name", ["forgetting", "selective"])
def test_models_generate_with_a_smaller_cache(name):
    model, ids, policy = converted(name), tokens(2, 56), Bounded(0.3, 0.5)
    cache = heedful.new_cache(model, policy)
    in_steps(model, ids, [20, 20, *[1] * 16], cache)
    assert max(cache.tokens) < 56 and cache.whole_nbytes > 0
    with evicting(model, policy, whole=20, step=9):
        rows = logits(model, ids)
    steps = in_steps(model, ids, [20, *[9] * 4], heedful.new_cache(model, policy))
    torch.testing.assert_close(rows, steps, rtol=0, atol=1e-11)
    ragged = heedful.new_cache(model, policy)
    out = greedy(model, ids, 4, attention_mask=ragged_mask(2, 56), cache=ragged, num_beams=2)
    assert out.shape == (2, 60) and max(ragged.tokens) < 59


def test_protected_tokens_stay_and_others_are_freed():
    layer, inputs = layer_of("forgetting"), random_inputs(200, 0.1)
    policy = Bounded(0.1, 0.1, sinks=3, recent=5)
    cache = stepped(layer, inputs, policy)[2]
    assert set(cache.positions()[0].tolist()) >= {0, 1, 2, *range(195, 200)}
    assert cache.keys.untyped_storage().nbytes() < 130 * 2 * 2 * 6 * 8, "the memory is freed"
    slots = stepped(layer, inputs, Bounded(0.1, 0.1, keep_prompt=True), 100)[2]
    assert set(slots.positions()[0].tolist()) >= set(range(100))


def test_a_model_that_is_saved_with_it_keeps_to_it(tmp_path):
    model, policy = converted("forgetting", dtype=torch.float32), Bounded(0.01, 2.0, recent=4)
    model.save_pretrained(tmp_path)
    write_budgets(tmp_path / NAME, policy, model, {})
    loaded = heedful.load(tmp_path)
    assert loaded._heedful.eviction == policy
    assert {part.policy for part in heedful.new_cache(loaded).layers} == {policy}


def test_refused():
    for value in (0, 1, -1e-3, 2, float("nan"), True, "small", None):
        with pytest.raises(ValueError, match="epsilon must be a number between 0 and 1"):
            Bounded(value)
    for value in (-1.0, float("inf"), "large", True):
        with pytest.raises(ValueError, match="logits must be a number of at least 0"):
            Bounded(logits=value)
    with pytest.raises(ValueError, match="recent must be a whole number of tokens"):
        Bounded(recent=-1)
    for name in ("standard", "gated", "differential"):
        with pytest.raises(ValueError, match="Bounded needs a mechanism that hides tokens"):
            heedful.new_cache(converted(name), Bounded())
        with (
            pytest.raises(ValueError, match="Bounded needs a mechanism that hides tokens"),
            evicting(converted(name), Bounded()),
        ):
            pass
    with pytest.raises(ValueError, match="Bounded cannot serve Grouped"):
        heedful.new_cache(converted("grouped"), Bounded())
