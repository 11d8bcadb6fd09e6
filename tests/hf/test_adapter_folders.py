"""Adapters: what was trained beside a base, opened on that base alone."""

import copy
import json
import os
import warnings

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import heedful
from heedful.eviction import MostHidden
from heedful.hf.budgets import write_budgets
from helpers.families import logits, stir, tiny, tokens

EXTRA = heedful.Selective(selector="extra")


@pytest.fixture
def base(tmp_path):
    model = tiny(dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    return model


def trained(base, mechanism=EXTRA):
    model = copy.deepcopy(base)
    heedful.convert(model, mechanism)
    stir(model, 0.5, ".heedful.")
    return model


@pytest.mark.parametrize("mechanism", [EXTRA, "mta", "talking-heads"], ids=str)
def test_a_base_with_an_adapter_is_the_trained_model(base, mechanism, tmp_path):
    model, ids = trained(base, mechanism), tokens()
    heedful.save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    assert sorted(os.listdir(tmp_path / "adapter")) == ["adapter.json", "adapter.safetensors"]
    expected = logits(model, ids)
    assert not torch.equal(expected, logits(base, ids))
    for opened in (
        heedful.load(tmp_path / "adapter"),
        heedful.load(tmp_path / "base", adapter=tmp_path / "adapter"),
        heedful.load(copy.deepcopy(base), adapter=tmp_path / "adapter"),
    ):
        assert torch.equal(logits(opened, ids), expected)
    assert torch.equal(logits(heedful.revert(opened), ids), logits(base, ids))


def test_half_precision_halves_the_file_and_rounds_only_the_mechanism(base, tmp_path):
    model = trained(base)
    heedful.save_adapter(model, tmp_path / "a", base="base", dtype=torch.bfloat16)
    opened = heedful.load(copy.deepcopy(base), adapter=tmp_path / "a")
    for name, parameter in model.named_parameters():
        own = opened.get_parameter(name)
        rounded = parameter.bfloat16().float() if ".heedful." in name else parameter
        assert own.dtype == torch.float32 and torch.equal(own, rounded)


def test_the_base_may_be_in_half_precision(base, tmp_path):
    heedful.save_adapter(trained(base), tmp_path / "a", base="base")
    half = copy.deepcopy(base).bfloat16()
    assert heedful.load(half, adapter=tmp_path / "a")._heedful.mechanism == EXTRA


def test_low_rank_matrices_are_merged_and_peft_opens_the_folder_too(base, tmp_path, monkeypatch):
    import peft

    model, ids = copy.deepcopy(base), tokens()
    heedful.convert(model, EXTRA)
    lora = heedful.get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT: the base has no name
        stir(lora, 0.3, "lora_")
        stir(lora, 0.3, ".modules_to_save.")
        heedful.save_adapter(lora, tmp_path / "a", base=str(tmp_path / "base"))
    expected = logits(lora, ids)
    opened = heedful.load(tmp_path / "a")
    torch.testing.assert_close(logits(opened, ids), expected, rtol=1e-4, atol=1e-4)
    assert not any("lora" in name for name, _ in opened.named_parameters())
    again = copy.deepcopy(base)
    heedful.convert(again, EXTRA)
    wrapped = peft.PeftModel.from_pretrained(again, tmp_path / "a")
    torch.testing.assert_close(logits(wrapped, ids), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr("heedful.hf.adapters.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'heedful\[lora\]'"):
        heedful.load(tmp_path / "a")


def test_budgets_go_with_an_adapter(base, tmp_path):
    heedful.save_adapter(trained(base), tmp_path / "a", base=str(tmp_path / "base"))
    model = heedful.load(tmp_path / "a")
    write_budgets(tmp_path / "a" / "budgets.json", MostHidden(tokens=16), model, {})
    model = heedful.load(tmp_path / "a")
    assert model._heedful.eviction == MostHidden(tokens=16)
    heedful.save_adapter(model, tmp_path / "b", base=str(tmp_path / "base"))
    assert heedful.load(tmp_path / "b")._heedful.eviction == MostHidden(tokens=16)
    assert heedful.load(tmp_path / "b", budgets=False)._heedful.eviction is None
    stir(model, 0.5, ".heedful.")  # they are budgets of other selectors now
    heedful.save_adapter(model, tmp_path / "b", base=str(tmp_path / "base"))
    assert "budgets.json" not in os.listdir(tmp_path / "b")


def test_another_base_is_refused_and_left_as_it_was(base, tmp_path):
    heedful.save_adapter(trained(base), tmp_path / "a", base="somewhere")
    other, changed = tiny(dtype=torch.float32), copy.deepcopy(base)
    stir(changed, 0.01)
    smaller = tiny(dtype=torch.float32, num_hidden_layers=1)
    for model in (other, changed, smaller):
        kind = type(model)
        with pytest.raises(ValueError, match="another base: it was trained on 'somewhere'"):
            heedful.load(model, adapter=tmp_path / "a")
        assert type(model) is kind
    with pytest.raises(ValueError, match="converted"):
        heedful.load(trained(base), adapter=tmp_path / "a")


def damage(folder, how: str) -> None:
    about, weights = folder / "adapter.json", folder / "adapter.safetensors"
    match how:
        case "no weights":
            weights.unlink()
        case "cut short":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no JSON":
            about.write_text("{")
        case "another format":
            about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99}))
        case "no mechanisms":
            about.write_text(json.dumps(json.loads(about.read_text()) | {"mechanisms": None}))
        case "not finite":
            tensors = load_file(weights)
            save_file({k: x * torch.nan for k, x in tensors.items()}, weights)
        case "a tensor less":
            tensors = load_file(weights)
            tensors.popitem()
            save_file(tensors, weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no weights", "cut short"),
        ("cut short", "is damaged"),
        ("no JSON", "not valid JSON"),
        ("another format", "of format 1"),
        ("no mechanisms", "lacks its base or its mechanisms"),
        ("not finite", "holds NaN or infinity"),
        ("a tensor less", "is missing"),
    ],
)
def test_a_damaged_adapter_is_refused_and_the_base_left_as_it_was(base, how, message, tmp_path):
    heedful.save_adapter(trained(base), tmp_path / "a", base="base")
    damage(tmp_path / "a", how)
    kind, ids = type(base), tokens()
    expected = logits(base, ids)
    with pytest.raises(ValueError, match=message):
        heedful.load(base, adapter=tmp_path / "a")
    assert type(base) is kind and torch.equal(logits(base, ids), expected)


def test_what_has_nothing_of_its_own_is_not_saved(base, tmp_path):
    with pytest.raises(ValueError, match="no parameters beside its base"):
        heedful.save_adapter(trained(base, "standard"), tmp_path / "a", base="base")
    with pytest.raises(ValueError, match="not converted"):
        heedful.save_adapter(base, tmp_path / "a", base="base")
    assert not (tmp_path / "a").exists()
