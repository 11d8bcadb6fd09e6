"""Which families an evicting cache serves, as proven by a few tokens."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import heedful
from heedful.eviction import TOVA, StreamingLLM
from heedful.hf.evicting import hook
from heedful.hf.evicting.hook import hook_of
from heedful.hf.versions import cache_among
from helpers.cached import in_steps
from helpers.families import GROUPED, stir, tiny, tokens

SERVED = {
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "cohere2": {"sliding_window": 4},
    "olmo3": {"sliding_window": 8},
    "phi": {},
    "stablelm": {},
    "exaone4": {"sliding_window": 4},
    "gemma4_text": {"head_dim": 16},
}
REFUSED = {
    "jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 4},
        "has layers that keep their tokens in LinearAttentionLayer",
    ),
    "gemma3n_text": (
        {"num_kv_shared_layers": 1, "head_dim": 16}, "Gemma3nTextAttention 2 keeps its tokens in",
    ),
    "deepseek_v3": (
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
         "moe_intermediate_size": 16},
        "cannot have a cache that evicts: .* it compresses keys and values",
    ),
    "bloom": ({}, "does not go through transformers' attention interface"),
}  # fmt: skip


def model_of(family: str, options: dict):
    config = CONFIG_MAPPING[family](**(GROUPED | options))
    model = AutoModelForCausalLM.from_config(config).eval()
    stir(model, 0.1)
    return model


@pytest.mark.parametrize("family", SERVED)
def test_other_families_pass(family):
    model = model_of(family, SERVED[family])
    heedful.new_cache(model, StreamingLLM(tokens=16))
    hooks = [own for x in model.modules() if (own := hook_of(x)) is not None]
    assert len(hooks) == 3 and all(own.proven == "sdpa" for own in hooks)
    heedful.new_cache(model, TOVA(tokens=16))
    assert all(own.proven_observed == "sdpa" for own in hooks)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_keep_their_tokens_otherwise_are_refused(family):
    options, message = REFUSED[family]
    with pytest.raises(ValueError, match=message):
        heedful.new_cache(model_of(family, options), StreamingLLM(tokens=16))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_proof_fails_where_columns_are_wrong(family, monkeypatch):
    heedful.new_cache(tiny(family, sliding_window=20), StreamingLLM(tokens=16))
    monkeypatch.setattr(hook, "_chosen", lambda mask, at, step: mask[..., : at.shape[1]])
    with pytest.raises(ValueError, match="under a budget its outputs differ from the definition"):
        heedful.new_cache(tiny(family, sliding_window=20), StreamingLLM(tokens=16))


def test_half_precision_is_compared_by_its_own_rounding():
    """Where calls of other sizes round otherwise, as in every larger model."""
    torch.manual_seed(0)
    model = tiny(dtype=torch.float16, num_hidden_layers=8)
    cache = heedful.new_cache(model, StreamingLLM(tokens=20))
    in_steps(model, tokens(1, 40), [20, 20], cache)
    assert cache.tokens == [19] * 8


def test_the_proof_is_made_anew_for_another_implementation():
    model, calls = tiny(dtype=torch.float32), []
    model.register_forward_hook(lambda *_: calls.append(1))
    for implementation, more in (("sdpa", True), ("sdpa", False), ("eager", True)):
        before = len(calls)
        model.set_attn_implementation(implementation)
        heedful.new_cache(model, StreamingLLM(tokens=16))
        assert (len(calls) > before) is more


def test_a_family_that_fails_the_proof_is_refused():
    """Attention that adds what a layer's cache has cannot be served."""
    model = tiny()
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def adding(hidden_states, **options):
        out, weights = forward(hidden_states=hidden_states, **options)
        cache = cache_among(options)
        keys = None if cache is None else cache.layers[1].keys
        return out if keys is None else out + 0.1 * keys.mean(), weights

    attention.forward = adding
    with pytest.raises(ValueError, match="is not proven to be supported by a cache that evicts"):
        heedful.new_cache(model, StreamingLLM(tokens=16))
    assert not any(getattr(hook_of(x), "proven", None) for x in model.modules())
    heedful.new_cache(model, StreamingLLM(tokens=16), verify=False)


def test_attention_whose_weights_cannot_be_read_is_refused():
    """A cap that is told and not applied: the weights that follow do not give the output."""
    model = tiny(dtype=torch.float32)
    attention = model.model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda **options: forward(**options | {"softcap": 1.0})
    model.set_attn_implementation("eager")
    heedful.new_cache(model, StreamingLLM(tokens=16))
    for _ in range(2):
        with pytest.raises(ValueError, match="its attention weights cannot be read"):
            heedful.new_cache(model, TOVA(tokens=16))
