"""What a cache makes of its calls: chosen sequences, taken back tokens, prompts, changed keys."""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, JetMoeConfig

import heedful
from heedful.eviction import TOVA, Eviction, KeyDiff, Knorm, MostHidden, Random, StreamingLLM
from heedful.hf.cache.new import attention_layers
from helpers.cached import converted, greedy, in_steps
from helpers.families import tiny, tokens

CHOICES = {
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "chosen": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "repeated": lambda cache: cache.batch_repeat_interleave(2),
}
ROWS = {"reordered": [1, 0], "chosen": [1], "repeated": [0, 0, 1, 1]}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("name", ["selective-extra", "selective", "forgetting", "mta"])
@pytest.mark.parametrize("padded", [False, True])
def test_chosen_sequences_take_back_their_own_tokens(name, choice, padded):
    model, ids = converted(name), tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[1, :3] = 1 - padded

    def call(cache, ids, mask, start, stop):
        with torch.no_grad():
            return model(
                input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache
            ).logits

    def recorded(ids, mask, choose):
        cache = heedful.new_cache(model)
        call(cache, ids, mask, 0, 12)
        cache.activate_past_recording()
        for start in (12, 15):
            call(cache, ids, mask, start, start + 3)
        choose(cache)
        cache.crop(-4)
        return cache

    rows = ROWS[choice]
    cache = recorded(ids, mask, CHOICES[choice])
    assert cache.get_seq_length() == 14
    actual = call(cache, ids[rows], mask[rows], 14, 24)
    expected = call(
        recorded(ids[rows], mask[rows], lambda cache: None), ids[rows], mask[rows], 14, 24
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("policy", [StreamingLLM, MostHidden])
def test_steps_after_prompt_lookup_evict_again(policy):
    model, ids = converted("selective"), tokens(1, 20)
    cache = heedful.new_cache(model, policy(tokens=16))
    reply = greedy(model, ids, 8, cache=cache, prompt_lookup_num_tokens=3)
    assert max(cache.tokens) <= 15
    for token in reply[:, cache.get_seq_length() :].split(1, 1):
        in_steps(model, token, [1], cache)
    for token in tokens(1, 12).split(1, 1):
        in_steps(model, token, [1], cache)
        assert max(cache.tokens) <= 15
    assert not any(layer.record_past for layer in attention_layers(cache))


def test_recording_that_was_on_before_stays_on():
    model, ids = converted("selective"), tokens(1, 20)
    cache = heedful.new_cache(model, StreamingLLM(tokens=16))
    cache.activate_past_recording()
    greedy(model, ids, 4, cache=cache, prompt_lookup_num_tokens=3)
    assert all(layer.record_past for layer in attention_layers(cache))


@pytest.mark.parametrize("length", [17, 16, 15, 1])
def test_a_prompt_is_kept_to_its_last_token(length):
    """Also where the last of its chunks has one token."""
    model = converted("standard")
    cache = heedful.new_cache(model, StreamingLLM(30, sinks=0, recent=2, keep_prompt=True))
    greedy(model, tokens(1, length), 40, cache=cache, prefill_chunk_size=8)
    for positions in cache.positions():
        assert positions[0, :length].tolist() == list(range(length))
        assert len(positions[0]) == 29 and positions[0, length].item() > length


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_random_eviction_does_not_depend_on_padding(padding):
    model, ids = converted("standard"), tokens(1, 30)
    policy = Random(tokens=14, sinks=2, recent=3, seed=4)
    alone = heedful.new_cache(model, policy)
    in_steps(model, ids, [10, 10, *[1] * 10], alone)
    both = torch.cat([tokens(1, 30 + padding), torch.cat([ids.new_zeros(1, padding), ids], 1)])
    mask = torch.ones_like(both)
    mask[1, :padding] = 0
    cache, start = heedful.new_cache(model, policy), 0
    for size in (10 + padding, 10, *[1] * 10):
        with torch.no_grad():
            stop = start + size
            model(input_ids=both[:, start:stop], attention_mask=mask[:, :stop], cache=cache)
        start = stop
    for own, padded in zip(alone.positions(), cache.positions(), strict=True):
        assert (padded[1] - padding).tolist() == own[0].tolist()


@dataclass(frozen=True)
class Narrow(Eviction):
    """A user's: evicts the token whose values are shortest."""

    needs = ("values",)

    def score(self, cached):
        return cached.values.norm(dim=-1).mean(1)


def by_hand(policy, keys, values):
    """Scores from the definitions."""
    if policy is Knorm:
        return -keys.norm(dim=-1).mean(1)
    if policy is Narrow:
        return values.norm(dim=-1).mean(1)
    directions = keys / keys.norm(dim=-1, keepdim=True)
    anchors = directions.mean(2)
    cosines = [
        torch.stack([directions[:, h, j] @ anchors[0, h] / anchors[0, h].norm()
                     for j in range(keys.shape[2])], dim=1)
        for h in range(keys.shape[1])
    ]  # fmt: skip
    return -torch.stack(cosines).mean(0)


@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("policy", [Knorm, KeyDiff, Narrow])
def test_policies_that_read_keys_or_values(policy, dtype):
    model, ids = converted("standard", dtype=torch.float32), tokens(1, 30)
    whole = heedful.new_cache(model, dtype=dtype)
    cache = heedful.new_cache(model, policy(tokens=16), dtype=dtype)
    for each in (whole, cache):
        in_steps(model, ids, [30], each)
    for layer, positions in zip(whole.layers, cache.positions(), strict=True):
        score = by_hand(policy, layer.keys, layer.values)
        score[:, :4] = score[:, -8:] = torch.inf
        expected = score.topk(15, dim=1).indices.sort(1).values
        assert torch.equal(positions, expected)


def test_the_mean_direction_is_that_of_real_tokens():
    model, ids = converted("standard", dtype=torch.float32), tokens(1, 30)
    alone, padded = (heedful.new_cache(model, KeyDiff(tokens=16)) for _ in range(2))
    in_steps(model, ids, [30], alone)
    mask = torch.cat([torch.zeros(1, 6), torch.ones(1, 30)], 1).long()
    in_steps(model, torch.cat([ids[:, :6], ids], 1), [36], padded, attention_mask=mask)
    for own, other in zip(alone.positions(), padded.positions(), strict=True):
        assert torch.equal(own, other - 6)


@pytest.mark.parametrize(
    "needs", [(3,), "keys", (("attention", 0),), ("attention", 32), (("attention", True),)]
)
def test_unknown_needs_are_refused_where_the_class_is_made(needs):
    with pytest.raises(ValueError, match=r"needs of Wrong must be .*of 'keys', .*, got"):
        type("Wrong", (Eviction,), {"needs": needs})


def test_a_number_that_a_layer_does_not_keep_is_refused_by_its_name():
    misspelt = type("Wrong", (Eviction,), {"needs": ("key",)})
    with pytest.raises(ValueError, match=r"Wrong needs 'key', which StandardAttention does not"):
        heedful.new_cache(converted("standard"), misspelt(tokens=20))


def jetmoe(**options):
    """A family that repeats its keys after the cache has returned them."""
    torch.manual_seed(0)
    config = JetMoeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_key_value_heads=2, kv_channels=8, num_local_experts=3, num_experts_per_tok=2,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, **options).float().eval()


def test_observed_attention_is_that_of_the_family_s_keys():
    model, ids = jetmoe(attn_implementation="eager"), tokens(1, 30)
    with torch.no_grad():
        maps = model(input_ids=ids, output_attentions=True).attentions
    heedful.convert(model, "standard")
    cache = heedful.new_cache(model, TOVA(tokens=16))
    in_steps(model, ids, [30], cache)
    assert len(maps) == len(cache.tokens) == 2
    for weights, positions in zip(maps, cache.positions(), strict=True):
        score = weights[0, :, -1].mean(0)
        score[:4] = score[-8:] = torch.inf
        assert positions[0].tolist() == score.topk(15).indices.sort().values.tolist()


def test_changed_keys_are_refused_where_the_cache_reads_its_own():
    model, ids = jetmoe(), tokens(1, 30)
    heedful.convert(model, "standard")
    with pytest.raises(ValueError, match="which Knorm does not see; take a policy that reads no"):
        in_steps(model, ids, [30], heedful.new_cache(model, Knorm(tokens=16)))
    assert in_steps(tiny(), ids, [30]).isfinite().all()
