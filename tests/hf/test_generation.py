"""Greedy generation is the repeated full forward pass, ragged batches are their rows."""

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

import heedful
from heedful.nn import NAMES
from helpers.cached import converted, greedy
from helpers.crosses import usually
from helpers.families import EAGER, VOCABULARY, fits, logits, stir, tiny, tokens


def repeated_forward(model, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        ids = torch.cat([ids, logits(model, ids)[:, -1:].argmax(-1)], dim=1)
    return ids


CASES = [(x, y) for x in NAMES for y in ("llama", "mistral", "gpt2", *EAGER) if fits(x, y)]


@pytest.mark.parametrize(
    ("name", "family"), usually(CASES, ("mta", "selective", "forgetting"), ("llama",))
)
def test_generate_is_the_repeated_full_forward(name, family):
    """Longer than Mistral's window of 4, so that its cache drops keys."""
    model, ids = converted(name, family), tokens(3, 7)
    actual = greedy(model, ids, 6)
    assert torch.equal(actual, repeated_forward(model, ids, 6))
    assert len(set(actual[:, 7:].flatten().tolist())) > 1


@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_is_its_rows(name):
    """Also where a sliding window has dropped keys, padded ones among them."""
    model = converted(name, "mistral")
    rows = [tokens(1, n) for n in (3, 8, 5)]
    width = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (width - row.shape[1], 0)) for row in rows])
    mask = (ids != 0).long()
    together = greedy(model, ids, 6, attention_mask=mask)
    for row, actual in zip(rows, together, strict=True):
        assert torch.equal(actual[width:], greedy(model, row, 6)[0, row.shape[1] :])


def family_with_a_cache_of_its_own(name: str):
    """Attention and a recurrence in one layer, whose cache holds both."""
    config = CONFIG_MAPPING["falcon_h1"](
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4,
        mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).double().eval()
    stir(model, 0.2)
    heedful.convert(model, name)
    return model


def test_a_familys_own_cache_serves_what_needs_no_more():
    model, ids = family_with_a_cache_of_its_own("talking-heads"), tokens(1, 7)
    stir(model, 0.2, only=".heedful.")
    assert torch.equal(greedy(model, ids, 6), repeated_forward(model, ids, 6))
    with pytest.raises(ValueError, match="FalconH1Attention 0 keeps its tokens in LinearAttention"):
        heedful.new_cache(model)


def test_where_a_familys_cache_is_not_enough_generation_warns_and_goes_on_without():
    """Asked for a cache, as evaluation harnesses ask, whatever the model."""
    model, ids = family_with_a_cache_of_its_own("selective"), tokens(1, 5)
    assert model.config.use_cache is False
    expected = greedy(model, ids, 3)
    assert torch.equal(expected, repeated_forward(model, ids, 3))
    with pytest.warns(UserWarning, match="family's cache is not enough for this mechanism, so"):
        assert torch.equal(greedy(model, ids, 3, use_cache=True), expected)
    config = GenerationConfig(use_cache=True, max_new_tokens=3, do_sample=False)
    with pytest.warns(UserWarning, match="family's cache is not enough"):
        assert torch.equal(model.generate(ids, generation_config=config), expected)
    assert config.use_cache is True
    for option, value in (("assistant_model", tiny()), ("prompt_lookup_num_tokens", 2)):
        with pytest.raises(ValueError, match=f"{option} needs a cache, .* generate without"):
            model.generate(ids, max_new_tokens=2, **{option: value})
    with pytest.raises(ValueError, match="assistant_model must have a cache, and its family's own"):
        tiny().generate(ids, assistant_model=model, max_new_tokens=8, do_sample=False)
    heedful.revert(model)
    assert model.config.use_cache is True
