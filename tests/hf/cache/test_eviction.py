"""Budgets: what is evicted, what is never evicted, and what the rest costs."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import heedful
from heedful.eviction import (
    H2O,
    POLICIES,
    TOVA,
    MostHidden,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)
from heedful.eviction.policy import Budget
from heedful.hf.cache.layer import LayerCache
from heedful.hf.versions import cache_of
from heedful.nn import HeadShape, LayerInputs, Selective, Standard
from heedful.ops import Visibility, multi_token_attention
from helpers.cached import converted, greedy, in_steps, serves
from helpers.families import EAGER, chunked, fits, logits, ragged_mask, tiny, tokens

SERVED = [
    (name, policy)
    for name in ("standard", "selective", "talking-heads", "differential")
    for policy in POLICIES
    if serves(policy, name)
]

SERVED += [(name, policy) for name in ("gated",
                                          "forgetting")
           for policy in (StreamingLLM, H2O)]  # fmt: skip
SERVED += [("forgetting", MostHidden)]
FITTING = [(name, policy, family) for name, policy in SERVED
           for family in ("llama", "mistral", *EAGER) if fits(name, family)]  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize(("name", "policy", "family"), FITTING)
def test_a_full_budget_is_none_bit_for_bit(name, policy, family):
    model, ids = converted(name, family, dtype=torch.float32), tokens(2, 21)
    sizes = [9, 1, 1, 4, 1, 1, 1, 1, 1, 1]
    expected = in_steps(model, ids, sizes, heedful.new_cache(model))
    cache = heedful.new_cache(model, policy(tokens=21))
    assert torch.equal(in_steps(model, ids, sizes, cache), expected)


def test_forgetting_attention_orders_tokens_by_age():
    """F of an older token has all that F of a newer one has, and more."""
    model, ids = converted("forgetting"), tokens(2, 40)
    expected, actual = (
        in_steps(model, ids, [9, *[1] * 31], heedful.new_cache(model, policy(tokens=15)))
        for policy in (StreamingLLM, MostHidden)
    )
    assert torch.equal(actual, expected)
    assert not torch.allclose(actual, in_steps(model, ids, [40]))


def attended(q: Tensor, k: Tensor, window: int | None = None) -> Tensor:
    """What one query gives its keys, mean of the heads, by hand."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1).mean(1)[0, 0]


def by_hand(policy, q, k, v, selective: bool, window: int | None) -> tuple[Tensor, list[list[int]]]:
    """One sequence, token by token: outputs, and which tokens are cached after each."""
    reach = math.inf if window is None else window
    cached: list[int] = []
    f: dict[int, float] = {}
    mass: dict[int, float] = {}
    outputs, history = [], []
    for t in range(q.shape[2]):
        cached.append(t)
        f[t], mass[t] = 0.0, mass.get(t, 0.0)
        reached = [j for j in cached if j > t - reach]
        keys, values, query = k[:, :, reached], v[:, :, reached], q[:, :, t : t + 1]
        weights = None
        if selective:
            group = torch.tensor([f[j] for j in reached], dtype=q.dtype)
            spread = keys.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            scores = query @ spread.mT * q.shape[-1] ** -0.5
            weights = (scores - group).softmax(-1)
            outputs.append(weights @ values.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
            weights = weights.mean(1)[0, 0]
            for j, s in zip(reached, scores[0, 0, 0].tolist(), strict=True):
                if j not in (0, t):
                    f[j] += max(0.0, s)
        else:
            outputs.append(multi_token_attention(query, keys, values, impl="reference"))
            weights = attended(query, keys)
        for j, w in zip(reached, weights.tolist(), strict=True):
            match policy:
                case H2O():
                    mass[j] += w
                case TOVA():
                    mass[j] = w
                case SnapKV():
                    mass[j] = mass[j] * (1 - 1 / 32) + w
                case MostHidden():
                    mass[j] = -f[j]
                case _:
                    mass[j] = j
        if len(cached) >= policy.tokens:
            sinks = max(policy.sinks, 1 if selective else 0)
            free = [j for j in cached if j >= sinks and j <= t - policy.recent]
            past = [j for j in cached if j <= t + 1 - reach and not (selective and j == 0)]
            cached.remove(past[0] if past else min(free, key=mass.__getitem__))
        history.append(sorted(cached))
    return torch.cat(outputs, 2), history


@pytest.mark.parametrize(
    ("policy", "selective"),
    [(MostHidden, True)]
    + [(x, hides) for x in (StreamingLLM, Window, H2O, TOVA, SnapKV) for hides in (False, True)],
)
@pytest.mark.parametrize("window", [None, 14])
def test_every_policy_is_its_rule_by_hand(policy, selective, window):
    """With a window wider than the budget as well: what it has left behind goes first."""
    eviction = policy(tokens=9, recent=3, sinks=0 if policy is Window else 2)
    q, k, v = (torch.randn(1, h, 40, 8, dtype=torch.float64) for h in (4, 2, 2))
    layer = (Selective() if selective else Standard()).build(HeadShape(4, 2, 8, 32, 0))
    cached = LayerCache(layer, window, Budget(eviction, 9))
    expected, history = by_hand(eviction, q, k, v, selective, window)
    for t in range(40):
        keys, values = cached.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert keys.shape[2] <= 9
        actual = cached.attend(
            layer, q[:, :, t : t + 1], keys, values, visibility=Visibility(window=window),
            scale=None, inputs=LayerInputs(),
        )  # fmt: skip
        torch.testing.assert_close(actual, expected[:, :, t : t + 1], rtol=0, atol=1e-12)
        assert cached.positions()[0].tolist() == history[t]
    if window is None:
        newest = list(range(32, 40))
        assert (history[-1] == newest) == (policy is Window and not selective)


def test_snapkv_keeps_what_the_end_of_the_prompt_looks_at():
    """One token far back is what all newest queries look at; neighbours come along by pooling."""
    q, k, v = (torch.randn(1, 2, 200, 16, dtype=torch.float64) for _ in range(3))
    layer = Standard().build(HeadShape(2, 2, 16, 32, 0))
    q[:, :, -32:] = 0.1 * q[:, :, -32:] + 2 * k[:, :, 57:58]
    cached = LayerCache(layer, budget=Budget(SnapKV(tokens=24, recent=4, sinks=1), 24))
    cached.attend(
        layer, q, *cached.update(k, v), visibility=Visibility(), scale=None, inputs=LayerInputs()
    )
    assert set(range(54, 61)) <= set(cached.positions()[0].tolist())


def test_random_keeps_a_uniform_sample():
    counts = torch.zeros(400)
    layer = Standard().build(HeadShape(1, 1, 2, 2, 0))
    x = torch.randn(1, 1, 400, 2)
    for seed in range(200):
        policy = Random(tokens=101, sinks=0, recent=0, seed=seed)
        cached = LayerCache(layer, budget=Budget(policy, 101))
        for piece in x.split(50, dim=2):
            cached.attend(
                layer, piece, *cached.update(piece, piece), visibility=Visibility(), scale=None,
                inputs=LayerInputs(),
            )  # fmt: skip
        counts[cached.positions()[0]] += 1
    parts = counts.view(8, 50).mean(1)
    assert (parts - 50).abs().max() < 3.5  # 200 draws of a quarter; 50 places each: sd 0.87
    assert counts.min() > 30 and counts.max() < 72


@pytest.mark.parametrize(("name", "policy"), SERVED)
def test_no_more_is_cached_than_the_budget_and_the_chunk(name, policy):
    model = converted(name, max_position_embeddings=512, dtype=torch.float32)
    budget, chunk, row = 40, 16, 2 * 2 * 8 * 4  # key heads of K and V, dim, bytes
    cache = heedful.new_cache(model, policy(tokens=budget))
    for sizes in ([chunk] * 6, [1] * 24):
        in_steps(model, tokens(1, sum(sizes)), sizes, cache)
        assert cache.tokens == [budget - 1] * 3
    whole = 3 * budget * row
    # Positions, F (of every head, in forgetting attention), scores.
    small = 3 * budget * (8 + 4 * (4 if name == "forgetting" else 1) + 4)
    assert cache.nbytes <= whole + small
    most = 3 * (budget + chunk) * (row + 16) + (budget + chunk) * row
    assert cache.peak_nbytes <= most  # a layer's keys are there twice while they move


@pytest.mark.parametrize("policy", [StreamingLLM, MostHidden, H2O])
def test_slots_are_used_again(policy):
    """Under a full budget no step makes a tensor of the cache anew."""
    model = converted("selective", max_position_embeddings=512)
    cache = heedful.new_cache(model, policy(tokens=30))
    in_steps(model, tokens(1, 64), [64], cache)
    places = set()
    for _ in range(40):
        in_steps(model, tokens(1, 1), [1], cache)
        places.add(cache.layers[1].keys.untyped_storage().data_ptr())
    assert len(places) == 1


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("name", "policy"), [x for x in SERVED if x[1] is not Random])
def test_a_ragged_batch_is_its_rows_under_a_budget(name, policy, family):
    """Padding leaves first, protected first tokens are those of the row.

    But chance draws by the place in the row, padding included.
    """
    model = converted(name, family, dtype=torch.float32)
    rows = [tokens(1, n) for n in (14, 8, 11)]
    ids = torch.cat([torch.nn.functional.pad(row, (14 - row.shape[1], 0)) for row in rows])
    eviction = policy(tokens=10, sinks=2, recent=3)
    cache = heedful.new_cache(model, eviction)
    together = greedy(model, ids, 6, attention_mask=(ids != 0).long(), cache=cache)
    for row, actual in zip(rows, together, strict=True):
        alone = greedy(model, row, 6, cache=heedful.new_cache(model, eviction))
        assert torch.equal(actual[14:], alone[0, row.shape[1] :])


def test_positions_go_on_counting_and_windows_stay_right():
    """A budget of 14 tokens under a window of 15 is a window of 14."""
    model, ids = converted("standard", "mistral", sliding_window=15), tokens(1, 60)
    for policy in (StreamingLLM, H2O):
        cache = heedful.new_cache(model, policy(tokens=14, sinks=0, recent=13))
        actual = in_steps(model, ids, [11, 1, 1, 6, *[1] * 41], cache)
        assert cache.tokens == [13] * 3
        torch.testing.assert_close(actual[:, :14], logits(model, ids)[:, :14], rtol=0, atol=1e-11)
        narrow = converted("standard", "mistral", sliding_window=14)
        narrow.load_state_dict(model.state_dict())
        steps = in_steps(model, ids, [1] * 60, heedful.new_cache(model, policy(14, 0, 13)))
        torch.testing.assert_close(steps, logits(narrow, ids), rtol=0, atol=1e-11)


def test_protected_tokens_stay():
    for policy in POLICIES:
        model = converted("selective", max_position_embeddings=512)
        cache = heedful.new_cache(model, policy(tokens=40, sinks=5, recent=6, keep_prompt=True))
        in_steps(model, tokens(2, 20), [20], cache)
        for total in range(21, 90):
            in_steps(model, tokens(2, 1), [1], cache)
            for at in cache.positions():
                for row in at.tolist():
                    assert row[:20] == list(range(20))
                    assert row[-6:] == list(range(total - 6, total))
    with pytest.raises(ValueError, match="keep_prompt=True needs room for the prompt of 50 tokens"):
        in_steps(model, tokens(1, 50), [50], heedful.new_cache(model, StreamingLLM(40, 4, 8, True)))


def test_the_first_token_of_selective_attention_stays_without_sinks():
    model = converted("selective")
    cache = heedful.new_cache(model, Window(tokens=12))
    in_steps(model, tokens(2, 40), [16, *[1] * 24], cache)
    assert cache.positions()[0].tolist() == [[0, *range(30, 40)]] * 2
    with pytest.raises(ValueError, match="tokens must be at least 10 here: the mechanism's first"):
        heedful.new_cache(model, Window(tokens=9))


def test_budgets_of_their_own_for_layers():
    model = converted("standard")
    cache = heedful.new_cache(model, StreamingLLM(tokens=(13, None, 20)))
    in_steps(model, tokens(1, 30), [30], cache)
    assert cache.tokens == [12, 30, 19]
    hybrid = tiny()
    heedful.convert(hybrid, {"mta": [2], "selective": [0, 1]})
    cache = heedful.new_cache(hybrid, MostHidden(tokens=(16, 13, None)))
    ids = tokens(2, 20)
    actual = in_steps(hybrid, ids, [10, 10], cache)
    assert cache.tokens == [15, 12, 20]
    assert torch.isfinite(actual).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_generate_and_beams_go_on_under_a_budget(policy):
    model = converted("selective", dtype=torch.float32)
    ids, mask = tokens(2, 12), ragged_mask(2, 12)
    for options in ({}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
        cache = heedful.new_cache(model, policy(tokens=20))
        actual = greedy(model, ids, 20, attention_mask=mask, cache=cache, **options)
        assert actual.shape[1] == 32
        assert cache.tokens == [19] * 3


def test_assisted_decoding_under_a_budget():
    model, ids = converted("selective"), tokens(1, 20)
    for policy in (MostHidden, StreamingLLM, Window, Random):
        cache = heedful.new_cache(model, policy(tokens=24))
        greedy(model, ids, 30, cache=cache, prompt_lookup_num_tokens=3)
        assert max(cache.tokens) <= 23
        whole = heedful.new_cache(model, policy(tokens=64))
        actual = greedy(model, ids, 30, cache=whole, prompt_lookup_num_tokens=3)
        assert torch.equal(actual, greedy(model, ids, 30))
    for policy in (TOVA, H2O, SnapKV):
        cache = heedful.new_cache(model, policy(tokens=24))
        with pytest.raises(ValueError, match="cannot take tokens back, as assisted decoding asks"):
            greedy(model, ids, 10, cache=cache, prompt_lookup_num_tokens=3)


def test_a_cache_of_assisted_decoding_keeps_to_its_budget_again():
    """What may be taken back is held until the next plain call, and no longer."""
    model, ids = converted("selective"), tokens(1, 20)
    for policy in (MostHidden, StreamingLLM):
        cache = heedful.new_cache(model, policy(tokens=16))
        ids = greedy(model, tokens(1, 20), 6, cache=cache, prompt_lookup_num_tokens=3)
        actual = greedy(model, ids, 12, cache=cache)
        assert actual.shape[1] == ids.shape[1] + 12
        assert cache.tokens == [15] * 3
        again = heedful.new_cache(model, policy(tokens=16))
        in_steps(model, ids[:, :-1], [ids.shape[1] - 1], again)
        again.activate_past_recording()
        again.layers[0].end_past_recording()
        assert not again.layers[0].record_past and again.layers[1].record_past


def test_a_window_cache_of_assisted_decoding_lets_go_again():
    model = converted("standard", "mistral")
    cache = heedful.new_cache(model)
    ids = greedy(model, tokens(1, 20), 6, cache=cache, prompt_lookup_num_tokens=3)
    actual = greedy(model, ids, 12, cache=cache)
    assert torch.equal(actual, greedy(model, ids, 12))
    assert cache.tokens == [3] * 3


@pytest.mark.parametrize("policy", [None, StreamingLLM])
def test_no_more_is_taken_back_than_is_cached(policy):
    model = converted("standard")
    cache = heedful.new_cache(model, policy and policy(tokens=16))
    cache.activate_past_recording()
    in_steps(model, tokens(1, 9), [9], cache)
    with pytest.raises(ValueError, match="crop can take back 9 tokens here, asked for 10"):
        cache.crop(-10)
    cache.crop(-9)
    assert cache.tokens == [0] * 3


def test_chunks_whose_first_token_is_protected_are_refused():
    """Llama 4 attends within chunks, and each begins with a token that nothing may hide."""
    model = chunked()
    heedful.convert(model, "selective")
    cache = heedful.new_cache(model, MostHidden(tokens=5, sinks=1, recent=2))
    with pytest.raises(ValueError, match="SelectiveAttention protects the first token of every"):
        in_steps(model, tokens(1, 20), [20], cache)
    whole = heedful.new_cache(model, eviction=False)
    actual = in_steps(model, tokens(1, 20), [20], whole)
    assert torch.isfinite(actual).all()


def test_a_models_own_budgets_are_used():
    model, ids = converted("selective"), tokens(1, 30)
    model._heedful.eviction = MostHidden(tokens=16)
    assert heedful.new_cache(model).layers[0].policy == MostHidden(tokens=16)
    assert heedful.new_cache(model, eviction=False).layers[0].policy is None
    out = greedy(model, ids, 10, return_dict_in_generate=True)
    assert cache_of(out).tokens == [15] * 3


WRONG = {
    "tokens must be whole numbers of at least sinks . recent . 1 = 13, got 12": {"tokens": 12},
    "at least sinks . recent . 1 = 13, got '64'": {"tokens": "64"},
    "at least sinks . recent . 1 = 13, got True": {"tokens": True},
    "= 13, got None; give": {"tokens": None},
    "sinks must be a whole number of tokens of at least 0, got -1": {"tokens": 64, "sinks": -1},
    "recent must be a whole number of tokens of at least 0, got 2.5": {"tokens": 64, "recent": 2.5},
    "keep_prompt must be True or False, got 1": {"tokens": 64, "keep_prompt": 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_policies_are_refused(message):
    with pytest.raises(ValueError, match=message):
        StreamingLLM(**WRONG[message])


def test_what_a_policy_cannot_serve_is_refused():
    with pytest.raises(ValueError, match="MostHidden needs a mechanism that masks tokens"):
        heedful.new_cache(converted("standard"), MostHidden(tokens=64))
    with pytest.raises(ValueError, match="does not support MultiTokenAttention with a convolution"):
        heedful.new_cache(converted("mta-everywhere"), StreamingLLM(tokens=64))
    with pytest.raises(ValueError, match="one for each of the model's 3 attention layers, got 2"):
        heedful.new_cache(converted("standard"), StreamingLLM(tokens=(64, 64)))
    model = converted("selective").train()
    cache = heedful.new_cache(model, StreamingLLM(tokens=13))
    with pytest.raises(ValueError, match="evicts tokens, which has no gradients"):
        model(input_ids=tokens(), cache=cache)


def test_policies_are_frozen_and_alike():
    for policy in POLICIES:
        names = [field.name for field in dataclasses.fields(policy)]
        assert names[:4] == ["tokens", "sinks", "recent", "keep_prompt"]
        assert policy(tokens=64) == policy(tokens=64)
        with pytest.raises(dataclasses.FrozenInstanceError):
            policy(tokens=64).tokens = 3
