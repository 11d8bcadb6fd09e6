"""Whole rows under a budget are what steps with a real cache give."""

import pytest
import torch

import heedful
from heedful.eviction import POLICIES, MostHidden, Random, StreamingLLM
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.intercept import interceptors
from heedful.nn import Differential, MultiToken, Selective, Standard, TalkingHeads
from helpers.cached import in_steps, serves
from helpers.families import logits, ragged_mask, tiny, tokens, varied

MECHANISMS = {
    "standard": Standard(),
    "local": Standard(window=14),
    "selective": Selective(),
    "selective-extra": Selective(selector="extra"),
    "selective-per-head": Selective(selector="per-head"),
    "talking-heads": TalkingHeads(),
    "differential": Differential(),
}
SERVED = [(name, policy) for name in MECHANISMS for policy in POLICIES
          if serves(policy, name)]  # fmt: skip


def converted(name: str, family: str = "llama", **changes):
    return varied(tiny(family, num_hidden_layers=2, **changes), MECHANISMS[name])


def under(model, policy, ids, whole=1, step=1, **options):
    with evicting(model, policy, whole, step):
        return logits(model, ids, **options)


def same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "policy"), SERVED)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("first", "step"), [(1, 1), (15, 1), (6, 4)])
def test_a_row_is_its_steps(name, policy, padded, first, step):
    """Token by token, after a prompt at once, and in pieces."""
    model, ids = converted(name), tokens(3, 26)
    mask = ragged_mask(3, 26) if padded else torch.ones_like(ids)
    given, real = {"attention_mask": mask} if padded else {}, mask.bool()
    eviction = policy(tokens=(11, 13), sinks=0 if name == "local" else 2, recent=3)
    sizes, cache = [first, *[step] * ((26 - first) // step)], heedful.new_cache(model, eviction)
    expected = in_steps(model, ids, sizes, cache, **given)
    actual = under(model, eviction, ids, first, step, **given)
    same(actual[real], expected[real])
    assert not torch.allclose(actual, logits(model, ids, **given), atol=1e-4)  # some are let go


def test_what_a_row_lets_go_depends_on_its_pieces():
    model, ids = converted("selective"), tokens(2, 26)
    eviction = StreamingLLM(tokens=(11, 13), sinks=2, recent=3)
    results = [under(model, eviction, ids, whole, 1) for whole in (1, 15)]
    assert not torch.equal(*results)


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "policy"), SERVED)
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
@pytest.mark.parametrize("budgets", [(7, 8), (12, 7)], ids=str)
def test_sliding_windows_are_their_steps(name, policy, family, budgets):
    """Budgets below the window, and above it, where the window alone decides."""
    model, ids = converted(name, family, sliding_window=9, layer_types=None), tokens(2, 17)
    eviction = policy(tokens=budgets, sinks=2, recent=3)
    expected = in_steps(model, ids, [1] * 17, heedful.new_cache(model, eviction))
    same(under(model, eviction, ids), expected)


def test_layers_that_keep_everything_are_left_alone():
    model, ids = tiny(), tokens(2, 24)
    varied(model, {MultiToken(conv=(3, 3), conv_every=1): [1], Selective(): [0, 2]})
    eviction = MostHidden(tokens=(14, None, 16))
    expected = in_steps(model, ids, [1] * 24, heedful.new_cache(model, eviction))
    same(under(model, eviction, ids), expected)
    with evicting(model, None):
        assert torch.equal(logits(model, ids), logits(model, ids))


def test_a_budget_for_the_whole_row_changes_nothing():
    for name in MECHANISMS:
        model, ids = converted(name), tokens(2, 20)
        same(under(model, Random(tokens=20), ids, whole=7), logits(model, ids))


def test_the_model_is_as_it_was_also_after_an_error():
    model, ids = converted("selective"), tokens(2, 20)
    expected, policy = logits(model, ids), StreamingLLM(tokens=14)

    def untouched():
        assert not interceptors()
        assert torch.is_grad_enabled()
        assert torch.equal(logits(model, ids), expected)

    assert not torch.equal(under(model, policy, ids), expected)
    untouched()
    with pytest.raises(KeyboardInterrupt), evicting(model, policy):
        raise KeyboardInterrupt
    untouched()
    with pytest.raises(ValueError, match="evicting already"), evicting(model, policy):
        under(model, policy, ids)
    untouched()
    with pytest.raises(ValueError, match="one for each of the model's 2 attention layers, got 3"):
        under(model, StreamingLLM(tokens=(14, 14, 14)), ids)
    heedful.revert(model)
    heedful.convert(model, {"selective": [0], "standard": [1]})
    with pytest.raises(ValueError, match="MostHidden needs a mechanism that masks tokens"):
        under(model, MostHidden(tokens=14), ids)
    assert not interceptors()


def test_wrong_calls_are_refused():
    model, ids, policy = converted("standard"), tokens(1, 16), StreamingLLM(tokens=14)
    for name in ("whole", "step"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got 0"):
            under(model, policy, ids, **{name: 0})
    with (
        pytest.raises(ValueError, match="evicting computes whole sequences"),
        evicting(model, policy),
    ):
        in_steps(model, ids, [8, 8])


@pytest.mark.parametrize("policy", [StreamingLLM, MostHidden, Random])
def test_the_prompt_is_what_comes_at_first(policy):
    """Where it is protected, it matters what came in one call."""
    model, ids = converted("selective"), tokens(2, 26)
    eviction = policy(tokens=13, sinks=1, recent=3, keep_prompt=True)
    for whole in (1, 7):
        sizes = [whole, *[1] * (26 - whole)]
        expected = in_steps(model, ids, sizes, heedful.new_cache(model, eviction))
        same(under(model, eviction, ids, whole), expected)
