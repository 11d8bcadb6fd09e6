"""`convert(verify=True)`: what it proves and refuses, and that a refused model is unchanged."""

import inspect

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from heedful.hf import attention, versions
from heedful.hf.cache import layer as cache
from heedful.hf.family import call, mask
from helpers.encoder_families import tiny as tiny_pair
from helpers.families import FAMILIES, logits, tiny

ENCODERS = ("bart", "t5", "t5gemma", "bert", "modernbert")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_proven(family):
    model = tiny(family, dtype=torch.float32)
    before = state_of(model)
    heedful.convert(model, "mta", verify=True).revert()
    assert state_of(model) == before


@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_and_encoder_decoders_are_proven(family):
    model = tiny_pair(family).float()
    assert heedful.convert(model, "standard", verify=True).model is model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_is_proven(dtype):
    heedful.convert(tiny("gemma2", dtype=dtype), "standard", verify=True)


def state_of(model) -> dict:
    """All that a conversion may touch, to be compared."""
    ids = torch.arange(3, 14)[None]
    return {
        "class": type(model),
        "classes": [type(module) for module in model.modules()],
        "implementation": versions.implementation_of(model.config),
        "training": [module.training for module in model.modules()],
        "hooks": [len(x._forward_hooks) + len(x._forward_pre_hooks) for x in model.modules()],
        "keys": list(model.state_dict()),
        "logits": logits(model, ids).tolist(),
    }


def wrong_scale(module, q, k, v, mask, *, scaling=None, **options):
    scaling = 1.01 * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    return attend(module, q, k, v, mask, scaling=scaling, **options)


def wide_window(*args, **options):
    actual = mask.attention_context(*args, **options)
    window = actual.visibility.window
    wider = heedful.Visibility(window=window and window + 1, padding=actual.visibility.padding)
    return actual._replace(visibility=wider)


def no_padding(*args, **options):
    actual = mask.attention_context(*args, **options)
    return actual._replace(visibility=heedful.Visibility(window=actual.visibility.window))


def forgetful(self, key_states, value_states, *args, **options):
    """A cache whose earlier keys are not those that came."""
    keys, values = update(self, key_states, value_states, *args, **options)
    return keys.roll(1, 2) if key_states.shape[2] == 1 else keys, values


attend, update = attention.attention, cache.LayerCache.update
CONTEXT = "attention_context"
BROKEN = {
    "scale": ("no mask", "llama", {}, (attention, "attention", wrong_scale)),
    "window": ("no mask", "mistral", {"sliding_window": 3}, (attention, CONTEXT, wide_window)),
    "padding": ("padding on the left", "llama", {}, (attention, CONTEXT, no_padding)),
    "cache": ("generate with a cache", "llama", {}, (cache.LayerCache, "update", forgetful)),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_conversion_that_changes_anything_is_refused(what, monkeypatch):
    """One thing on the way is broken, as a new version of transformers might break it."""
    way, family, options, (place, name, broken) = BROKEN[what]
    model = tiny(family, dtype=torch.float32, **options).train()
    before = state_of(model)
    monkeypatch.setattr(place, name, broken)
    message = rf"LlamaForCausalLM is not proven .* {way}: the outputs differ by .* verify=False"
    with pytest.raises(ValueError, match=message.replace("Llama", family.capitalize())):
        heedful.convert(model, "mta", verify=True)
    monkeypatch.undo()
    assert state_of(model) == before


def test_a_family_whose_attention_is_more_than_it_tells_is_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = tiny(dtype=torch.float32, attn_implementation="eager")
    eager = modeling_llama.eager_attention_forward
    monkeypatch.setattr(
        modeling_llama,
        "eager_attention_forward",
        lambda module, q, k, v, *rest, **options: eager(module, q, k.tanh(), v, *rest, **options),
    )
    with pytest.raises(ValueError, match=r"its own attention is more than a softmax"):
        heedful.convert(model, "standard", verify=True)


def test_without_weights_there_is_no_proof():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"its weights are on meta, .* verify=False"):
        heedful.convert(model, "mta", verify=True)
    assert heedful.convert(model, "mta").mechanism == heedful.MultiToken()


@pytest.mark.parametrize(
    ("version", "proven"), [("5.24.3", False), ("5.25.0", True), ("6.0", True)]
)
def test_a_newer_transformers_is_proven_by_default(version, proven, monkeypatch):
    monkeypatch.setattr(versions.transformers, "__version__", version)
    proofs = []
    prove = lambda model, convert: proofs.append(model)  # noqa: E731
    monkeypatch.setitem(inspect.unwrap(heedful.convert).__globals__, "prove", prove)
    model = tiny()
    heedful.convert(model, "standard").revert()
    assert proofs == [model] * proven
    heedful.convert(model, "standard", verify=False)
    assert proofs == [model] * proven


def test_a_model_that_cannot_be_run_on_ids_alone_is_refused(monkeypatch):
    model = tiny()
    monkeypatch.setattr(model.model, "forward", lambda **options: 1 / 0)
    with pytest.raises(ValueError, match=r"cannot be run on token ids alone \(division by zero\)"):
        heedful.convert(model, "standard", verify=True)


def test_between_passes_nothing_is_left():
    heedful.convert(tiny(dtype=torch.float32), "standard", verify=True)
    assert call.forward_pass() == call.ForwardPass()
