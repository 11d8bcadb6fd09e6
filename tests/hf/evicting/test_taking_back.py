"""Policies that read attention after calls whose newest tokens are taken back, as verified guesses.

What is expected is always the same: the cache of a model that has read the other tokens alone.
"""

import pytest
import torch
import transformers

import heedful
from heedful.compatibility import release
from heedful.eviction import H2O, TOVA, SnapKV
from heedful.hf.evicting.scores import MOST
from heedful.hf.versions import cache_argument
from helpers.cached import greedy
from helpers.families import ragged_mask, tiny, tokens
from helpers.unconverted import Watched

POLICIES = [TOVA, H2O, SnapKV, Watched]


def read(model, ids, sizes, cache, mask):
    """Logits of the tokens after those that the cache has read, in calls of so many."""
    start, parts = cache.get_seq_length(), []
    for size in sizes:
        stop = start + size
        with torch.no_grad():
            output = model(
                ids[:, start:stop], attention_mask=mask[:, :stop], **cache_argument(model, cache)
            )
        parts.append(output.logits)
        start = stop
    return torch.cat(parts, 1) if parts else None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("budget", [20, 40])
def test_crop_scores_what_stays(policy, family, budget):
    """Calls that lose none, some or all of their tokens, and plain ones after them."""
    model, ids, mask = tiny(family), tokens(2, 70), ragged_mask(2, 70)
    recorded, plain = (heedful.new_cache(model, policy(tokens=budget)) for _ in range(2))
    # What is read, how much of it is taken back, and what stays of the calls.
    for sizes, taken, left in (
        ([25], 0, [25]), ([1], 0, [1]), ([4, 1, 1], 3, [3]), ([7], 3, [4]), ([3], 3, []),
        ([5], 2, [3]), ([6], 0, [6]),
    ):  # fmt: skip
        recorded.activate_past_recording()
        actual = read(model, ids, sizes, recorded, mask)
        recorded.crop(-taken)
        expected = read(model, ids, left, plain, mask)
        if left:
            common = actual[:, : expected.shape[1]]
            torch.testing.assert_close(common, expected, rtol=0, atol=1e-12)
        for own, layer in zip(recorded.layers, plain.layers, strict=True):
            if own.budget is not None:  # a window shows what could be taken back
                assert torch.equal(own.positions(), layer.positions())
    for layer in recorded.layers:
        layer.end_past_recording()
    sizes = [1, 1, 3, *[1] * 15]
    actual, expected = (read(model, ids, sizes, x, mask) for x in (recorded, plain))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert all(map(torch.equal, recorded.positions(), plain.positions()))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_call_gives_back_its_newest_tokens(policy):
    """Of a long one the weights of the newest queries are stored apart, not all of them."""
    model = tiny(max_position_embeddings=512)
    ids, mask = tokens(1, 260), torch.ones(1, 260, dtype=torch.long)
    recorded, plain = (heedful.new_cache(model, policy(tokens=60)) for _ in range(2))
    recorded.activate_past_recording()
    read(model, ids, [200], recorded, mask)
    rows = recorded.layers[0].map.scores.calls[0].rows.shape[1]
    assert rows == MOST + (policy(tokens=60).observes or 0)
    with pytest.raises(ValueError, match=r"crop can take back 64 tokens here, asked for 65$"):
        recorded.crop(-65)
    recorded.crop(-MOST)
    read(model, ids, [136], plain, mask)
    assert all(map(torch.equal, recorded.positions(), plain.positions()))
    actual, expected = (read(model, ids, [1] * 20, x, mask) for x in (recorded, plain))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("policy", POLICIES)
def test_calls_that_nobody_takes_back_count(policy):
    """A second call without a crop is a plain one, and ends the recording."""
    model, ids, mask = tiny(), tokens(2, 60), torch.ones(2, 60, dtype=torch.long)
    recorded, plain = (heedful.new_cache(model, policy(tokens=24)) for _ in range(2))
    recorded.activate_past_recording()
    read(model, ids, [10], recorded, mask)
    recorded.crop(0)
    sizes = [5, 1, 1, 9, *[1] * 12]
    actual = read(model, ids, sizes, recorded, mask)
    expected = read(model, ids, [10, *sizes], plain, mask)[:, 10:]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert all(map(torch.equal, recorded.positions(), plain.positions()))


@pytest.mark.skipif(
    release(transformers.__version__) < (5, 24),
    reason="transformers before 5.24 takes tokens back from a cache of its own in another way",
)
@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_lookup_and_assisted_decoding(policy):
    model = tiny(max_position_embeddings=256)
    ids = tokens(1, 20).repeat(1, 2)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny()}):
        whole = greedy(model, ids, 30)
        cache = heedful.new_cache(model, policy(tokens=100))
        assert torch.equal(greedy(model, ids, 30, cache=cache, **options), whole)
        cache = heedful.new_cache(model, policy(tokens=24))
        output = greedy(model, ids, 30, cache=cache, **options)
        assert cache.tokens == [23] * 3
        # Plain calls go on from it, and evict again.
        greedy(model, output, 9, cache=cache)
        assert cache.tokens == [23] * 3
