"""`ClosedGate`: what a gate closes leaves the cache beyond the window, and nothing else does."""

import pytest
import torch

import heedful
from heedful.eviction import CachedTokens, ClosedGate
from heedful.hf.budgets import NAME, write_budgets
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.family.modules import attention_modules
from heedful.nn import RetentionGate
from helpers.cached import converted, greedy, in_steps
from helpers.families import logits, ragged_mask, tiny, tokens

WINDOW = 3


def gated(level: float = -0.3, **options):
    """Half of the gates of a layer are below the level, roughly."""
    torch.manual_seed(0)
    model = tiny(**options)
    heedful.convert(model, RetentionGate(WINDOW))
    for module in attention_modules(model):
        module.heedful.retention.weight.data.normal_()
        module.heedful.retention.bias.data.fill_(level)
    return model


@pytest.mark.parametrize("threshold", [0.2, 0.5])
def test_open_gates_and_the_window_stay(threshold):
    """Token by token, in every layer; the gates are what a whole sequence has."""
    model, ids, states = gated(), tokens(1, 40), []
    layers = [module.heedful for module in attention_modules(model)]
    hooks = [x.register_forward_hook(lambda _, args, out: states.append(out.state)) for x in layers]
    cache, level = heedful.new_cache(model, ClosedGate(threshold)), torch.tensor(threshold).logit()
    gates, cached = [[] for _ in layers], [[] for _ in layers]
    for t in range(40):
        states.clear()
        in_steps(model, ids[:, t : t + 1], [1], cache)
        for number, state in enumerate(states):
            gate = gates[number]
            gate.append(state[0, 0, -1])
            cached[number] = [j for j in (*cached[number], t) if gate[j] >= level or j > t - WINDOW]
            assert cache.positions()[number][0].tolist() == cached[number]
    for hook in hooks:
        hook.remove()
    assert len({len(x) for x in cached}) > 1 and all(WINDOW < len(x) < 40 for x in cached)


def test_what_is_evicted_had_little_weight():
    """A gate that is all but zero leaves a key next to nothing, evicted or not."""
    model, ids = gated(-30.0), tokens(2, 40)
    for module in attention_modules(model):
        module.heedful.retention.weight.data.mul_(20)
    expected = logits(model, ids)
    cache = heedful.new_cache(model, ClosedGate(1e-9))
    actual = in_steps(model, ids, [1] * 40, cache)
    assert max(cache.tokens) < 36
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_sequences_of_a_batch_evict_equally_many():
    model, ids = gated(), tokens(3, 40)
    both = heedful.new_cache(model, ClosedGate(0.5))
    in_steps(model, ids, [8] * 5, both)
    alone = []
    for row in ids:
        cache = heedful.new_cache(model, ClosedGate(0.5))
        in_steps(model, row[None], [8] * 5, cache)
        alone.append(cache.tokens)
    assert all(n >= max(x) for n, x in zip(both.tokens, zip(*alone, strict=True), strict=True))
    assert max(both.tokens) < 40


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_their_steps_and_rows_with_padding_are_generated(padded):
    model, ids, policy = gated(), tokens(2, 40), ClosedGate(0.5, sinks=2)
    mask = ragged_mask(2, 40) if padded else torch.ones_like(ids)
    given = {"attention_mask": mask} if padded else {}
    with evicting(model, policy, whole=12, step=4):
        rows = logits(model, ids, **given)
    cache = heedful.new_cache(model, policy)
    steps = in_steps(model, ids, [12, *[4] * 7], cache, **given)
    torch.testing.assert_close(rows[mask.bool()], steps[mask.bool()], rtol=0, atol=1e-11)
    assert max(cache.tokens) < 36
    out = greedy(model, ids, 6, attention_mask=mask, cache=heedful.new_cache(model, policy))
    assert out.shape == (2, 46)


def test_the_memory_is_freed():
    model, ids = gated(-2.0, dtype=torch.float32), tokens(1, 200)
    whole, small = heedful.new_cache(model), heedful.new_cache(model, ClosedGate(0.5))
    for cache in (whole, small):
        in_steps(model, ids, [20] * 10, cache)
    assert max(small.tokens) < 100
    assert small.nbytes < whole.nbytes * (max(small.tokens) + 40) / 200


def test_a_model_that_is_saved_with_it_keeps_to_it(tmp_path):
    model, policy = gated(dtype=torch.float32), ClosedGate(0.3, recent=4)
    model.save_pretrained(tmp_path)
    write_budgets(tmp_path / NAME, policy, model, {})
    loaded = heedful.load(tmp_path)
    assert loaded._heedful.eviction == policy
    assert {part.policy for part in heedful.new_cache(loaded).layers} == {policy}


def test_refused():
    for value in (0, 1, -0.5, 2, float("nan"), True, "open", None):
        with pytest.raises(ValueError, match="threshold must be a number between 0 and 1"):
            ClosedGate(value)
    for name in ("standard", "selective"):
        with pytest.raises(ValueError, match="ClosedGate needs a retention gate"):
            heedful.new_cache(converted(name), ClosedGate())
    with pytest.raises(ValueError, match="ClosedGate needs gates that have learned what open is"):
        heedful.new_cache(converted("retention-gate"), ClosedGate())
    cached = CachedTokens(torch.arange(3)[None], 3, gate=torch.tensor([[2.0, 0.0, -3.0]]))
    assert ClosedGate(0.5).score(cached).tolist() == [[2.0, 0.0, -3.0]]
