"""Unconverted models under a budget: the tokens and logits of the model converted to `standard`."""

import copy

import pytest
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

import heedful
from heedful.eviction import H2O, TOVA, MostHidden, Random, SnapKV, StreamingLLM, Window
from heedful.hf.versions import cache_argument
from helpers.cached import greedy, in_steps
from helpers.families import EAGER, FAMILIES, chunked, logits, ragged_mask, tokens, windowed
from helpers.unconverted import Knorm, Strongest, Watched, agree, beside, pair

CASES = [(family, attention) for family in FAMILIES for attention in ("sdpa", "eager")
         if attention == "eager" or family not in EAGER]  # fmt: skip
OBSERVING = (TOVA, H2O, SnapKV)
WAYS = {"whole": [40], "chunks": [9, 1, 1, 7, 5, *[1] * 17], "steps": [1] * 40}


@pytest.mark.sampled(6)
@pytest.mark.crossed
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_kept_tokens_and_logits_are_those_of_the_converted_model(family, attention, way):
    models, ids = pair(family, attention), tokens(2, 40)
    for policy in (StreamingLLM, Random, Knorm, *OBSERVING):
        agree(*models, policy(tokens=14), ids, WAYS[way])
    agree(*pair(family, attention, ranked=True), MostHidden(tokens=14), ids, WAYS[way])


@pytest.mark.parametrize(
    "policy", [StreamingLLM, Window, Random, Knorm, Strongest, MostHidden, *OBSERVING, Watched]
)
def test_budgets_of_layers_sinks_recent_and_the_prompt(policy):
    models, ids = pair(ranked=policy is MostHidden), tokens(2, 40)
    sinks = 0 if policy is Window else 2
    for tokens_of in ((13, None, 20), 16):
        agree(*models, policy(tokens_of, sinks, 3), ids, WAYS["chunks"])
    kept = policy(tokens=20, sinks=sinks, recent=3, keep_prompt=True)
    caches = agree(*models, kept, ids, [7, 5, *[1] * 28])
    assert caches[0].positions()[1][0, :12].tolist() == list(range(12))
    with pytest.raises(ValueError, match="keep_prompt=True needs room for the prompt of 40 tokens"):
        in_steps(models[0], ids, [40], heedful.new_cache(models[0], kept))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_neox"])
def test_padding_on_either_side(family, attention, left):
    models, ids = pair(family, attention), tokens(3, 34)
    mask = ragged_mask(3, 34, left)
    mask[:, 14:] = 1  # what is decoded is real
    mask[:, :14] = ragged_mask(3, 14, left)
    ranked = pair(family, attention, ranked=True)
    for policy in (StreamingLLM, Window, Knorm, *OBSERVING, MostHidden):
        models = ranked if policy is MostHidden else models
        for sizes in ([14, *[1] * 20], [3, 11, 9, *[1] * 11]):
            budget = policy(tokens=11, sinks=2, recent=3)
            agree(*models, budget, ids, sizes, attention_mask=mask)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("policy", [StreamingLLM, Window, Knorm, MostHidden, *OBSERVING])
def test_a_ragged_batch_is_its_rows(family, attention, policy):
    model = pair(family, attention, ranked=policy is MostHidden, dtype=torch.float32)[0]
    rows = [tokens(1, n) for n in (14, 8, 11)]
    ids = torch.cat([pad(row, (14 - row.shape[1], 0)) for row in rows])
    budget = policy(tokens=10, sinks=2, recent=3)
    cache = heedful.new_cache(model, budget)
    together = greedy(model, ids, 8, attention_mask=(ids != 0).long(), cache=cache)
    for row, actual in zip(rows, together, strict=True):
        alone = greedy(model, row, 8, cache=heedful.new_cache(model, budget))
        assert torch.equal(actual[14:], alone[0, row.shape[1] :])


@pytest.mark.crossed
@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_full_budget_is_transformers_own_cache_bit_for_bit(family, attention):
    model, ids = pair(family, attention, dtype=torch.float32)[0], tokens(2, 21)
    ranked = beside(copy.deepcopy(model))
    for mask in (None, ragged_mask(2, 21)):
        options = {} if mask is None else {"attention_mask": mask}
        sizes = [9, 1, 1, 4, *[1] * 6]
        expected = in_steps(model, ids, sizes, DynamicCache(config=model.config), **dict(options))
        for policy in (None, *(x(tokens=22) for x in (StreamingLLM, Knorm, *OBSERVING))):
            cache = heedful.new_cache(model, policy)
            actual = in_steps(model, ids, sizes, cache, **dict(options))
            assert torch.equal(actual, expected)
        for policy in (False, MostHidden(tokens=22)):
            cache = heedful.new_cache(ranked, policy)
            assert torch.equal(in_steps(ranked, ids, sizes, cache, **dict(options)), expected)


def test_masks_of_chunks_and_windows():
    """Llama 4 attends within chunks, PhiMoE puts its window into the mask alone."""
    for model in (chunked(), windowed()):
        twin = type(model)(model.config).double().eval()
        twin.load_state_dict(model.state_dict())
        heedful.convert(twin, "standard", verify=False)
        for policy in (StreamingLLM, *OBSERVING):
            agree(model, twin, policy(tokens=14), tokens(2, 40), WAYS["chunks"])


def test_tokens_that_see_later_ones_of_their_call():
    """As an image's do: each call reads its own tokens whole, so that the mask's columns are all.

    The dense definition is one call with the mask of what each call has read.
    """
    model, ids = pair()[0], tokens(1, 40)
    budget = StreamingLLM(tokens=16, sinks=2, recent=3)
    cache, sizes = heedful.new_cache(model, budget), [12, 9, *[1] * 8, 11]
    visible = torch.ones(40, 40, dtype=torch.bool).tril()
    visible[14:19, 14:19] = True
    visible[32:36, 32:36] = True
    parts, position, kept = [], 0, []
    for size in sizes:
        end = position + size
        read = torch.zeros(40, dtype=torch.bool)
        read[kept] = read[position:end] = True
        visible[position:end] &= read
        mask = visible[None, None, position:end, :end]
        with torch.no_grad():
            named = cache_argument(model, cache)
            out = model(ids[:, position:end], attention_mask=mask, **named)
        parts.append(out.logits)
        position, kept = end, cache.positions()[0][0].tolist()
    assert cache.tokens == [15] * 3
    expected = logits(model, ids, attention_mask=visible[None, None])
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_windows_wider_than_the_budget(family, attention):
    """What no later query sees leaves first, sinks too, but for a first token that F leaves out."""
    models, ids = pair(family, attention, sliding_window=18), tokens(2, 40)
    mask = ragged_mask(2, 40)
    ranked = pair(family, attention, ranked=True, sliding_window=18)
    for policy in (StreamingLLM, Knorm, Random, *OBSERVING, MostHidden):
        models = ranked if policy is MostHidden else models
        for options in ({}, {"attention_mask": mask}):
            sizes = [9, 1, 1, 7, 5, *[1] * 17]
            caches = agree(*models, policy(tokens=14), ids, sizes, **options)
        kept = caches[0].positions()[0][:, policy is MostHidden :]
        assert kept.min() > 40 - 18
