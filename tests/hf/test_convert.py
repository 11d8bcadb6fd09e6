"""What convert and revert promise and refuse, on a tiny Llama."""

import copy
import json
import math
import pickle
import subprocess
import sys

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DogeConfig,
    FalconConfig,
    FalconForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    JetMoeConfig,
    LEDConfig,
    LEDForConditionalGeneration,
    LlamaForSequenceClassification,
    LlamaModel,
)

import heedful
from heedful.nn import (
    NAMES,
    Differential,
    Forgetting,
    Gated,
    LocalGlobal,
    MultiToken,
    Selective,
    TalkingHeads,
)
from helpers.families import (
    config_of,
    logits,
    ragged_mask,
    stir,
    tiny,
    tokens,
    twin,
    varied,
)

EVERYWHERE = {
    "standard": "standard",
    "mta": MultiToken(conv_every=1),
    "mta-published": MultiToken(conv_every=1, norm="plain", gate="scalar"),
    "mta-v1": MultiToken.v1(),
    "talking-heads": TalkingHeads(),
    "selective": Selective(),
    "selective-extra": Selective(selector="extra"),
    "differential": Differential(),
    "gated": Gated("head"),
    "forgetting": Forgetting(),
}
every = pytest.mark.parametrize("name", EVERYWHERE)


def state(model) -> dict:
    """All that a failed conversion must leave alone."""
    return {
        "modules": [(name, type(m), sorted(vars(m))) for name, m in model.named_modules()],
        "parameters": {name: id(p) for name, p in model.named_parameters()},
        "config": (id(model.config), model.config.to_dict(), model.config._attn_implementation),
        "generation": copy.copy(getattr(model, "generation_config", None).__dict__)
        if hasattr(model, "generation_config")
        else None,
    }


def refuse(model, message: str, mechanism="mta", **options) -> None:
    before = state(model)
    with pytest.raises(ValueError, match=message):
        heedful.convert(model, mechanism, **options)
    assert state(model) == before


@every
def test_gradients_reach_every_parameter_of_the_mechanism(name):
    model = tiny(num_hidden_layers=2)
    conversion = heedful.convert(model, EVERYWHERE[name])
    stir(model, 0.2, only=".heedful.")
    ids = tokens()
    model.train()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    own = conversion.parameters()
    assert bool(own) == (name not in ("standard", "selective"))
    for parameter, p in own.items():
        assert p.grad is not None and bool((p.grad != 0).any()), parameter


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_models_keep_fp32_parameters_of_the_mechanism(name):
    model = tiny(dtype=torch.bfloat16, num_hidden_layers=3)
    conversion = heedful.convert(model, name)
    assert all(p.dtype == torch.float32 for p in conversion.parameters().values())
    actual = logits(model, tokens())
    assert actual.dtype == torch.bfloat16 and bool(actual.isfinite().all())


def test_only_the_chosen_layers_change():
    model = tiny(num_hidden_layers=3)
    ids = tokens()
    before = logits(model, ids)
    conversion = heedful.convert(model, "differential", layers=[2, 2])
    assert conversion.layers == (2,) and conversion.model is model
    marked = {name.split(".")[2] for name in conversion.parameters()}
    assert marked == {"2"}
    assert not torch.equal(logits(model, ids), before)
    conversion.revert()
    assert torch.equal(logits(model, ids), before)
    heedful.convert(model, "standard", layers=range(2))
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mta", "selective", "differential"])
def test_another_model_of_the_same_configuration_is_untouched(name):
    config = config_of("llama")
    model, other = (
        type(tiny())(config).double().eval() for _ in range(2)
    )  # both hold this very configuration
    ids = tokens()
    before, others = logits(other, ids), state(other)
    heedful.convert(model, name)
    assert state(other) == others and config._attn_implementation == "sdpa"
    assert torch.equal(logits(other, ids), before)
    heedful.convert(other, name)
    heedful.revert(model)
    assert logits(other, ids).shape == before.shape, "still converted, and working"
    heedful.revert(other)
    assert torch.equal(logits(other, ids), before)


def test_a_copy_is_independent():
    model = varied(tiny(), MultiToken(conv_every=1))
    ids = tokens()
    before = logits(model, ids)
    other = twin(model)
    assert torch.equal(logits(other, ids), before)
    stir(other, 0.2, only=".heedful.")
    assert not torch.equal(logits(other, ids), before)
    heedful.revert(other)
    assert torch.equal(logits(model, ids), before)
    assert model._heedful.model is model
    heedful.revert(model)


def test_modes_and_labels_of_the_family_stay():
    model = tiny(num_hidden_layers=2).train()
    heedful.convert(model, "mta-published")
    assert all(m.training for m in model.modules())
    ids = tokens()
    out = model(input_ids=ids, labels=ids, use_cache=False)
    expected = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    assert out.loss.item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("kind", [LlamaModel, LlamaForSequenceClassification])
def test_models_without_a_language_head(kind, tmp_path):
    model = kind(config_of("llama")).double().eval()
    ids = tokens()
    before = model(input_ids=ids)[0]
    heedful.convert(model, MultiToken(conv_every=1))
    torch.testing.assert_close(model(input_ids=ids)[0], before, rtol=0, atol=1e-12)
    stir(model, 0.2, only=".heedful.")
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert torch.equal(again(input_ids=ids)[0], model(input_ids=ids)[0])


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
UNFIT = {
    "BloomForCausalLM cannot be converted: .* not go through transformers' attention": lambda: (
        BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=40))
    ),
    "FalconForCausalLM cannot be converted: .* not go through": lambda: FalconForCausalLM(
        FalconConfig(**SMALL)
    ),
    "LEDForConditionalGeneration cannot be converted: .* not go through": lambda: (
        LEDForConditionalGeneration(
            LEDConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=40)
        )
    ),
    "Gemma3ForCausalLM cannot be converted: .* does not tell its attention function; set": lambda: (
        Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SMALL, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=30.0
            )
        )
    ),
    r"DogeForCausalLM cannot be converted: .* makes its own attention mask \(attn_mask\)": lambda: (
        AutoModelForCausalLM.from_config(DogeConfig(**SMALL, intermediate_size=32))
    ),
    "Inkling2ForCausalLM cannot be converted: .* passes sinks": lambda: (
        AutoModelForCausalLM.from_config(CONFIG_MAPPING["inkling2_text"](**SMALL))
    ),
}


@pytest.mark.parametrize("message", UNFIT)
def test_families_that_cannot_be_converted(message):
    if "Inkling2" in message and "inkling2_text" not in CONFIG_MAPPING:
        pytest.skip("this transformers has no Inkling 2")
    refuse(UNFIT[message](), message)


REFUSED = {
    "mechanism must be one of .* got 'selectve'; did you mean 'selective'": {
        "mechanism": "selectve"
    },
    "mechanism must be a name or a configuration .* got 3": {"mechanism": 3},
    "mechanism must be a name or a configuration": {"mechanism": MultiToken},
    r"layers must be among 0 to 2, got \[3, 7\]": {"layers": [0, 3, 7]},
    r"layers must be among 0 to 2, got \[-1\]": {"layers": [-1]},
    "layers must be layer indices such as .* got 2": {"layers": 2},
    r"layers must be layer indices such as .* got \[1.0\]": {"layers": [1.0]},
    "layers must be layer indices such as .* got '1'": {"layers": "1"},
    "layers must name at least one layer, got none; None converts all": {"layers": []},
    "mix groups of 3 heads do not divide the model's 4 heads": {"mechanism": TalkingHeads(3)},
    "head must be below the model's 4 heads, got 9": {"mechanism": Selective(head=9)},
    "impl must be one of auto, reference, tiled, composed, fused, got 'flash'": {"impl": "flash"},
}


@pytest.mark.parametrize("name", ["standard", "mta", "selective-extra"])
def test_the_implementation_is_chosen_for_a_machine_and_not_saved(name, tmp_path):
    model, ids = tiny(), tokens()
    varied(model, EVERYWHERE[name], 0.1, impl="reference")
    model.save_pretrained(tmp_path)
    assert '"impl"' not in (tmp_path / "config.json").read_text()
    tiled = heedful.load(tmp_path, impl="tiled", dtype=torch.float64)
    torch.testing.assert_close(logits(tiled, ids), logits(model, ids), rtol=0, atol=1e-10)
    if name != "standard":  # torch's own attention, whatever `impl` says
        fused = heedful.load(tmp_path, impl="fused", dtype=torch.float64)
        with pytest.raises(ValueError, match="impl='fused' does not support this"):
            logits(fused, ids)


def test_wrong_arguments_are_named_and_leave_a_working_model():
    model, ids = tiny(), tokens()
    before = logits(model, ids)
    for message, options in REFUSED.items():
        refuse(model, message, **options)
    assert torch.equal(logits(model, ids), before)


def test_what_is_no_model_or_not_in_the_right_state():
    with pytest.raises(ValueError, match=r"model must be a transformers .* got Linear; load one"):
        heedful.convert(torch.nn.Linear(2, 2), "mta")
    model = tiny()
    with pytest.raises(ValueError, match=r"model is not converted: LlamaForCausalLM has nothing"):
        heedful.revert(model)
    heedful.convert(model, "mta")
    refuse(model, r"model is converted already \(MultiToken.*call heedful.revert")
    heedful.revert(model)
    heedful.convert(model, "selective")


def test_the_mechanism_cannot_be_switched_off_by_another_implementation():
    model = tiny()
    heedful.convert(model, "mta")
    ids = tokens()
    before = logits(model, ids)
    with pytest.raises(ValueError, match="'sdpa' would switch the mechanism off silently"):
        model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, ids), before)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="changed to 'eager', which would switch"):
        logits(model, ids)


def test_convolutions_of_every_nth_layer_alone_must_have_one():
    """As above: what the third layer would convolve, a model of two layers leaves out."""
    convolutions = MultiToken(mix=None, post_mix=None)
    two = tiny(num_hidden_layers=2)
    refuse(two, r"changes none of the 2 layers of LlamaForCausalLM .* `conv_every`", convolutions)
    heedful.convert(tiny(num_hidden_layers=3), convolutions)
    heedful.convert(two, MultiToken(mix=None, post_mix=None, norm="plain"))
    scaled = MultiToken(mix=None, post_mix=None, input_scaling="depth")
    heedful.convert(tiny(num_hidden_layers=2), scaled)
    heedful.convert(tiny(num_hidden_layers=2), LocalGlobal(window=4, every=3))


def test_masks_of_four_dimensions_are_refused():
    model = tiny()
    heedful.convert(model, "mta")
    mask = torch.zeros(2, 1, 11, 11)
    with pytest.raises(ValueError, match=r"attention_mask must be 2-D .* shape \(2, 1, 11, 11\)"):
        logits(model, tokens(), attention_mask=mask)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_route_gets_no_square_mask(family, monkeypatch):
    """Padding arrives as one entry per key, whatever the family's layers."""
    visibilities = []
    model = tiny(family)
    heedful.convert(model, "standard")
    for module in model.modules():
        if isinstance(layer := getattr(module, "heedful", None), torch.nn.Module):
            layer.register_forward_pre_hook(
                lambda _, inputs, options: visibilities.append(options["visibility"]),
                with_kwargs=True,
            )
    logits(model, tokens(), attention_mask=ragged_mask())
    logits(model, tokens())
    assert [None if v.padding is None else tuple(v.padding.shape) for v in visibilities] == (
        [(2, 11)] * 3 + [None] * 3
    )
    windows = [v.window for v in visibilities]
    assert windows == ([4, None, 4] if family == "gemma3_text" else [None] * 3) * 2
    assert all(v.documents is None or v.documents.ndim == 2 for v in visibilities)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_scaled_inputs_are_scaled_norms(family, tmp_path):
    model = tiny(family, num_hidden_layers=3)
    scaled = twin(model)
    for index, layer in enumerate(scaled.model.layers):
        factor = 1 - (0.8 - 0.6 * math.exp(-0.3 * index))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data.mul_(factor)
    ids = tokens()
    plain, expected = logits(model, ids), logits(scaled, ids)
    conversion = heedful.convert(model, MultiToken(input_scaling="depth"))
    assert not torch.allclose(plain, expected, rtol=1e-3)
    for converted in (model, twin(model)):
        torch.testing.assert_close(logits(converted, ids), expected, rtol=1e-11, atol=1e-11)
        model.save_pretrained(tmp_path)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(logits(loaded, ids), expected, rtol=1e-11, atol=1e-11)
    for back in (twin(model), conversion.model):
        assert torch.equal(logits(heedful.revert(back), ids), plain)


def test_scaled_inputs_need_an_mlp():
    model = tiny()
    for layer in model.model.layers:
        layer.perceptron = layer._modules.pop("mlp")
    refuse(model, "no MLP .* use input_scaling='none'", MultiToken(input_scaling="depth"))


@every
def test_training_under_autocast(name):
    model = tiny(dtype=torch.float32)
    heedful.convert(model, EVERYWHERE[name])
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward()
    for parameter, p in model.named_parameters():
        assert p.grad is not None and bool(p.grad.isfinite().all()), parameter


@pytest.mark.parametrize("name", ["mta", "selective-extra", "differential"])
def test_pickling_keeps_the_mechanism(name, tmp_path):
    model, ids = tiny(), tokens()
    varied(model, EVERYWHERE[name], 0.1)
    expected, plain = logits(model, ids), logits(heedful.revert(twin(model)), ids)
    torch.save(model, tmp_path / "model.pt")
    for again in (
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert type(again) is type(model)
        assert torch.equal(logits(again, ids), expected)
        assert torch.equal(logits(heedful.revert(again), ids), plain)


@pytest.mark.slow
def test_a_pickled_model_opens_in_another_process(tmp_path):
    model, ids = tiny(num_hidden_layers=2), tokens()
    heedful.convert(model, "mta")
    torch.save((model, ids, logits(model, ids)), tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        "model, ids, before = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True)


def test_heads_that_are_not_those_of_the_configuration_are_refused():
    """JetMoE attends once per expert, with other heads than its attention module names."""
    model = AutoModelForCausalLM.from_config(
        JetMoeConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1, kv_channels=8)
    ).eval()
    heedful.convert(model, "mta")
    with pytest.raises(ValueError, match=r"attends with .* and its configuration says HeadShape"):
        logits(model, tokens())


def test_classes_that_were_put_in_front_are_seen_through(tmp_path):
    """As `fully_shard` does to a model and to its layers."""
    model, ids = tiny(dtype=torch.float32, num_hidden_layers=2), tokens()
    heedful.convert(model, "mta")
    expected = logits(model, ids)
    for module in (model, model.model.layers[0].self_attn):
        module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), {})
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["heedful"]["base"]["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(logits(heedful.load(tmp_path), ids), expected)
    with pytest.raises(ValueError, match="has been given another class since it was converted"):
        heedful.revert(model)
    assert torch.equal(logits(model, ids), expected)


def test_selective_attention_on_pretrained_weights_warns_once(tmp_path):
    """A head masks at once; unchanged outputs, fresh weights and restored models are silent."""
    tiny().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(model, ids := tokens())
    message = r"head 0 masks tokens from now on.*selector=\"extra\".*adapter="
    with pytest.warns(UserWarning, match=message) as caught:
        heedful.convert(model, "selective")
    assert len(caught) == 1 and not torch.equal(logits(model, ids), before)
    model.save_pretrained(tmp_path / "own")
    heedful.load(tmp_path / "own")
    for mechanism in (Selective(selector="extra"), "mta", "standard"):
        heedful.revert(model)
        heedful.convert(model, mechanism)
    heedful.convert(tiny(), "selective")
    with pytest.warns(UserWarning, match="its selector masks"):
        heedful.convert(heedful.revert(model), Selective(selector="mean"))
