"""The recipe for transformers' `custom_generate`: a small cache by one argument of `generate`."""

import pytest
import torch

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from helpers import ROOT
from helpers.cached import converted, greedy
from helpers.families import ragged_mask, tiny, tokens

FOLDER = str(ROOT / "integrations" / "hub")


def small(model, ids, new: int = 12, **options):
    return greedy(
        model, ids, new, custom_generate=FOLDER, trust_remote_code=True, **options
    )  # fmt: skip


@pytest.fixture(autouse=True)
def modules_of_their_own(tmp_path, monkeypatch):
    """transformers copies the recipe into a folder of its own and imports it from there."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_it_is_generation_with_the_cache(options):
    model, ids = tiny("llama"), tokens(2, 40)
    actual = small(model, ids, budget=20, attention_mask=ragged_mask(2, 40), **options)
    cache = heedful.new_cache(model, StreamingLLM(tokens=20))
    expected = greedy(
        model, ids, 12, cache=cache, prefill_chunk_size=5, attention_mask=ragged_mask(2, 40),
        **options,
    )  # fmt: skip
    assert torch.equal(actual, expected)
    assert set(cache.tokens) == {19}


def test_a_model_s_own_budgets_and_eight_bits():
    model, ids = converted("selective"), tokens(1, 30)
    with pytest.raises(ValueError, match="budget must be a number of tokens per layer"):
        small(model, ids)
    heedful.hf.conversion_of(model).eviction = MostHidden(tokens=16)
    actual = small(model, ids, cache_dtype="int8")
    cache = heedful.new_cache(model, dtype=torch.int8)
    assert torch.equal(actual, greedy(model, ids, 12, cache=cache, prefill_chunk_size=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 20, "policy": "Best"}, "policy must be one of .*TOVA.*, got 'Best'"),
        ({"budget": 20, "cache_dtype": "int4"}, "cache_dtype must be 'int8' or None"),
        ({"budget": 3}, "tokens must be whole numbers of at least"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(tiny("llama"), tokens(1, 30), **options)
