"""Greedy generation is the repeated full forward pass, ragged batches are their rows."""

import pytest
import torch
from families import logits, stir, tiny, tokens
from torch import Tensor
from transformers import GenerationConfig

import heedful
from heedful.nn import NAMES, MultiToken, mechanism

CACHED = [name for name in NAMES if name in ("standard", "talking-heads", "differential")]


def converted(name: str, family: str = "llama"):
    model = tiny(family)
    heedful.convert(model, mechanism(name))
    stir(model, 0.2, only=".heedful.")
    return model


def repeated_forward(model, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_is_the_repeated_full_forward(name, family):
    """Longer than Mistral's window of 4, so that its cache drops keys."""
    changes = {"layer_types": None} if family == "gemma3_text" else {}
    model = tiny(family, **changes)
    heedful.convert(model, mechanism(name))
    stir(model, 0.2, only=".heedful.")
    ids = tokens(2, 7)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
    )
    assert torch.equal(found, repeated_forward(model, ids, 6))
    assert len(set(found[:, 7:].flatten().tolist())) > 1


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_is_its_rows(name, family):
    """Also where a sliding window has dropped keys, padded ones among them."""
    model = converted(name, family)
    rows = [tokens(1, n) for n in (3, 8, 5)]
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = (ids != 0).long()
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, found in zip(rows, together, strict=True):
        alone = model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=6, do_sample=False
        )
        assert torch.equal(found[width:], alone[0, row.shape[1] :])


@pytest.mark.parametrize("name", CACHED)
def test_cached_steps_are_the_full_forward(name):
    """Logits, not only tokens, for mechanisms that need nothing but keys and values."""
    model = converted(name)
    ids = tokens(2, 9)
    whole = logits(model, ids)
    cache, parts = None, []
    for piece in ids.split([4, 1, 3, 1], dim=1):
        with torch.no_grad():
            out = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mta", "mta-published", "selective"])
def test_asked_for_a_cache_generation_warns_and_goes_on_without(name):
    """As evaluation harnesses ask, whatever the model."""
    model = converted(name)
    ids = tokens(1, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    expected = model.generate(ids, **options)
    with pytest.warns(UserWarning, match="no cache yet, so generate goes on without one"):
        assert torch.equal(model.generate(ids, use_cache=True, **options), expected)
    config = GenerationConfig(use_cache=True, max_new_tokens=3, do_sample=False)
    with pytest.warns(UserWarning, match="no cache yet"):
        assert torch.equal(model.generate(ids, generation_config=config), expected)
    assert config.use_cache is True


@pytest.mark.parametrize("name", ["mta", "selective"])
def test_a_cache_of_keys_and_values_alone_is_refused(name):
    model = converted(name)
    ids = tokens(1, 5)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"use_cache=True keeps keys and values only"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    for option, value in (
        ("past_key_values", cache),
        ("assistant_model", model),
        ("prompt_lookup_num_tokens", 2),
    ):
        with pytest.raises(ValueError, match=f"{option} needs a cache, .* generate without"):
            model.generate(ids, max_new_tokens=2, **{option: value})


@pytest.mark.parametrize("name", ["mta", "selective"])
def test_a_draft_model_without_a_cache_is_refused(name):
    model, ids = tiny(), tokens(1, 9)
    with pytest.raises(ValueError, match="assistant_model must have a cache, and this mechanism"):
        model.generate(ids, assistant_model=converted(name), max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize("name", CACHED)
def test_assisted_decoding_is_greedy_decoding(name):
    model, ids = converted(name), tokens(1, 9)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, prompt_lookup_num_tokens=2, **options), expected)
    assistant = converted("standard")
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), expected)


def test_static_caches_are_refused():
    model = converted("standard")
    ids = tokens(1, 5)
    with pytest.raises(ValueError, match="static caches do; a converted model needs a dynamic"):
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=3,
            cache_implementation="static",
        )


@pytest.mark.parametrize(("name", "caches"), [("mta", False), ("standard", True)])
def test_the_default_of_use_cache_follows_the_mechanism_and_comes_back(name, caches):
    model = tiny()
    model.generation_config.use_cache = None  # as a loaded generation configuration may say
    heedful.convert(model, MultiToken(conv_every=1) if name == "mta" else name)
    assert model.config.use_cache is caches
    assert model.generation_config.use_cache is (None if caches else False)
    heedful.revert(model)
    assert model.config.use_cache is True and model.generation_config.use_cache is None
