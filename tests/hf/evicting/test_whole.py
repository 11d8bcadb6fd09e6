"""Whole sequences of a model as it is are its steps with an evicting cache."""

import pytest
import torch

import heedful
from heedful.eviction import H2O, TOVA, KeyDiff, MostHidden, SnapKV, StreamingLLM
from heedful.hf.cache.rows_under_budget import evicting
from helpers.cached import in_steps
from helpers.families import logits, ragged_mask, tiny, tokens
from helpers.unconverted import pair

POLICIES = (StreamingLLM, KeyDiff, TOVA, H2O, SnapKV, MostHidden)


def under(model, eviction, ids, whole=1, step=1, dtype=None, **options):
    with evicting(model, eviction, whole, step, dtype=dtype) as peaks:
        return logits(model, ids, **options), peaks


def model_for(policy, family="llama", attention="sdpa", **options):
    return pair(family, attention, ranked=policy is MostHidden, **options)[0]


@pytest.mark.crossed
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("first", "step"), [(1, 1), (15, 1), (6, 4)])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_is_its_steps(policy, first, step, padded, attention):
    model, ids = model_for(policy, attention=attention), tokens(3, 26)
    mask = ragged_mask(3, 26) if padded else torch.ones_like(ids)
    given = {"attention_mask": mask} if padded else {}
    eviction = policy(tokens=(11, 13, 12), sinks=2, recent=3)
    sizes, cache = [first, *[step] * ((26 - first) // step)], heedful.new_cache(model, eviction)
    expected = in_steps(model, ids, sizes, cache, **given)
    actual, peaks = under(model, eviction, ids, first, step, **given)
    real = mask.bool()
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-11)
    assert (actual - logits(model, ids, **given)).abs().max() > 1e-3  # something is evicted
    assert 0 < peaks.nbytes < cache.peak_nbytes


@pytest.mark.crossed
@pytest.mark.parametrize("policy", [StreamingLLM, TOVA, MostHidden])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_windows_and_eight_bits(policy, family, dtype):
    model = model_for(policy, family, sliding_window=9, layer_types=None)
    ids, eviction = tokens(2, 20), policy(tokens=(7, 8, 12), sinks=2, recent=3)
    cache = heedful.new_cache(model, eviction, dtype=dtype)
    expected = in_steps(model, ids, [1] * 20, cache)
    torch.testing.assert_close(
        under(model, eviction, ids, dtype=dtype)[0], expected, rtol=0, atol=1e-11
    )


def test_afterwards_the_model_is_as_it_was():
    model, ids = tiny("llama"), tokens(2, 20)
    eviction, before = StreamingLLM(tokens=9, sinks=2, recent=3), logits(model, ids)
    configs = [module.config for module in model.modules() if hasattr(module, "layer_idx")]
    with pytest.raises(RuntimeError, match="stop"), evicting(model, eviction):
        with pytest.raises(ValueError, match="evicting already"), evicting(model, eviction):
            pass
        with pytest.raises(ValueError, match="without a cache"):
            in_steps(model, ids, [10, 10])
        raise RuntimeError("stop")
    assert torch.equal(logits(model, ids), before)
    after = [module.config for module in model.modules() if hasattr(module, "layer_idx")]
    assert all(x is y for x, y in zip(configs, after, strict=True))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_attention_that_cannot_be_followed_is_refused():
    model = tiny("llama")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attention implementation 'flex_attention'"):
        under(model, StreamingLLM(tokens=9, sinks=2, recent=3), tokens(1, 20))


def test_a_module_that_calls_its_attention_otherwise_is_refused(monkeypatch):
    """Else it would be measured with all tokens, without a word."""
    model, ids = tiny("llama"), tokens(1, 20)
    layers = [x for x in model.modules() if hasattr(x, "layer_idx") and hasattr(x, "q_proj")]
    forward = layers[1].forward

    def own(*args, heedful_steps=None, **options):
        return forward(*args, **options)

    monkeypatch.setattr(layers[1], "forward", own)
    with pytest.raises(ValueError, match="does not call its attention through transformers"):
        under(model, StreamingLLM(tokens=9, sinks=2, recent=3), ids)
    assert logits(model, ids).isfinite().all()


def test_keys_that_layers_share_are_refused(monkeypatch):
    model = tiny("llama")
    shared = [x for x in model.modules() if hasattr(x, "layer_idx") and hasattr(x, "q_proj")][1]
    monkeypatch.setattr(shared, "layer_idx", 0)
    with pytest.raises(ValueError, match="which a cache of heedful cannot replace"):
        under(model, StreamingLLM(tokens=9, sinks=2, recent=3), tokens(1, 20))
