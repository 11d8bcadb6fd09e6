"""Adapters of PEFT on converted models: trained, saved, reloaded and merged, or warned about."""

import copy
import pickle
import warnings

import peft
import pytest
import torch

import heedful
from heedful.nn import (
    Differential,
    Forgetting,
    Gated,
    Grouped,
    MultiToken,
    Selective,
)
from helpers.families import logits, stir, tiny, tokens, varied

CONFIGS = {
    "mta-published": MultiToken.published(),
    "selective-bilinear": Selective(selector="bilinear"),
    "selective-extra": Selective(selector="extra"),
    "differential": Differential(),
    "grouped": Grouped("cif", size=3, window=2, share=2),
    "gated": Gated(start="identity"),
    "forgetting": Forgetting("identity"),
}
MERGED = 1e-12  # in fp64, which a merge rounds to
every = pytest.mark.parametrize("name", CONFIGS)


def converted(name: str, dtype=torch.float64):
    return varied(tiny(dtype=dtype), CONFIGS[name], 0.1)


def lora(**options):
    return peft.LoraConfig(target_modules="all-linear", init_lora_weights=False, **options)


@every
def test_one_call_trains_and_saves_the_mechanism(name, tmp_path):
    """LoRA on a model that comes from its folder: trained, saved, loaded, merged, as before."""
    converted(name).save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    model = heedful.get_peft_model(heedful.load(tmp_path / "base"), config)
    assert config.modules_to_save is None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    own = [n for n in trained if ".heedful." in n]
    assert len(own) == len(converted(name)._heedful.parameters())
    assert not any("lora" in n for n in own) and any("lora" in n for n in trained)
    assert all(trained[n].dtype == torch.float32 for n in own)
    before = {n: trained[n].detach().clone() for n in own}
    optimizer, ids = torch.optim.AdamW(trained.values(), lr=1e-2), tokens()
    for _ in range(2):
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(not torch.equal(trained[n], before[n]) for n in own)
    model.eval().save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(heedful.load(tmp_path / "base"), tmp_path / "adapter")
    expected = logits(model, ids)
    assert torch.equal(logits(again, ids), expected)
    again.merge_and_unload().save_pretrained(tmp_path / "merged")
    loaded = heedful.load(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=0, atol=MERGED)


def test_what_the_one_call_refuses():
    lost = r"TrainableTokensConfig, which would leave the mechanism behind; save the"
    model = converted("differential")
    with pytest.raises(ValueError, match=lost):
        heedful.get_peft_model(model, peft.TrainableTokensConfig(token_indices=[1]))
    with pytest.raises(ValueError, match="model is not converted: LlamaForCausalLM; call heedful"):
        heedful.get_peft_model(tiny(), lora())
    adapted = heedful.get_peft_model(model, lora(modules_to_save=["lm_head"]))
    assert set(adapted.peft_config["default"].modules_to_save) == {"lm_head", "heedful"}
    with pytest.raises(ValueError, match="holds an adapter of PEFT already; merge_and_unload"):
        heedful.get_peft_model(adapted, lora())


@every
def test_adapters_reach_the_linear_layers_of_a_mechanism(name):
    """What wraps a module is run, not read past; so its merge changes nothing."""
    # A mechanism's own weights are fp32 in any model, and the merge would round to that.
    model = peft.get_peft_model(converted(name).double(), lora())
    ids = tokens()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    own = [n for n in trained if ".heedful." in n]
    assert bool(own) == (name != "differential")
    for parameter, p in trained.items():
        assert p.grad is not None and bool((p.grad != 0).any()), parameter
    adapted = logits(model, ids)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), adapted, rtol=0, atol=MERGED)
    assert merged._heedful.mechanism == CONFIGS[name]


@every
def test_an_adapter_with_the_mechanism_trains_saves_and_reloads_it(name, tmp_path):
    base = converted(name)
    model = peft.get_peft_model(copy.deepcopy(base), lora(modules_to_save=["heedful"]))
    own = [n for n, p in model.named_parameters() if ".heedful." in n and p.requires_grad]
    assert len(own) == len(base._heedful.parameters())
    stir(model, 0.1, only="modules_to_save")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="this adapter")
        model.train().eval()
    model.save_pretrained(tmp_path)
    ids = tokens()
    again = peft.PeftModel.from_pretrained(base, tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    expected = logits(model, ids)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    loaded = heedful.load(tmp_path / "merged")
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=0, atol=MERGED)


@pytest.mark.parametrize("name", ["mta-published", "grouped"])
def test_a_mechanism_that_an_adapter_saves_writes_with_its_cache(name):
    model = peft.get_peft_model(converted(name), lora(modules_to_save=["heedful"])).eval()
    stir(model, 0.1, only="modules_to_save")
    ids, actual = tokens(2, 9), []
    for use_cache in (True, False):
        options = {"max_new_tokens": 9, "do_sample": False, "use_cache": use_cache}
        actual.append(model.generate(input_ids=ids, **options))
    assert torch.equal(*actual)


def test_a_cache_from_a_file_knows_its_mechanism_under_an_adapter():
    """PEFT's module around a layer hides its class; heads alone do not tell mechanisms."""
    models = [tiny(), tiny()]
    for model, config in zip(models, (heedful.Standard(), heedful.Selective()), strict=True):
        heedful.convert(model, config)
    options = lora(modules_to_save=["heedful"])
    standard, selective = (peft.get_peft_model(model, options).eval() for model in models)
    cache = heedful.new_cache(standard.get_base_model())
    with torch.no_grad():
        standard(input_ids=tokens(1, 5), cache=cache)
        with pytest.raises(ValueError, match=r"another model or mechanism \(StandardAttention"):
            selective(input_ids=tokens(1, 2), cache=pickle.loads(pickle.dumps(cache)))


def test_an_adapter_that_would_lose_the_mechanism_is_warned_about():
    model = peft.get_peft_model(converted("differential"), lora())
    with pytest.warns(UserWarning, match=r"neither trains nor saves .* modules_to_save=\['heedful"):
        model.train()


def test_adapters_come_after_the_mechanism():
    plain = tiny(dtype=torch.float32)
    adapted = peft.get_peft_model(plain, lora())
    with pytest.raises(ValueError, match=r"PeftModel.*; convert the model before get_peft_model"):
        heedful.convert(adapted, "mta")
    with pytest.raises(ValueError, match=r"model holds adapters of PEFT.* convert the model first"):
        heedful.convert(plain, "mta")


@every
def test_dynamic_quantization_leaves_the_mechanism_as_it_is(name):
    model, ids = converted(name, torch.float32), tokens()
    own = {n: p.clone() for n, p in model._heedful.parameters().items()}
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
    assert bool(logits(quantized, ids).isfinite().all())
    for layer in quantized.model.layers:  # what stands in its place is changed once
        assert len(layer.self_attn.v_proj._forward_hooks) == 0
    for n, p in quantized._heedful.parameters().items():
        assert torch.equal(p, own[n]), n
