"""Checkpoints: what they hold, who may load them, and what damage does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3ForConditionalGeneration,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
)

import heedful
from heedful.hf import register
from heedful.nn import NAMES, Differential, MultiToken, Selective, ablations, mechanism
from helpers.families import config_of, logits, tiny, tokens, varied


def converted(config="mta-published", dtype=torch.float32):
    return varied(tiny(dtype=dtype, num_hidden_layers=3), config, 0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint's folder, to be copied."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("whole")
    converted().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


CONFIGS = {name: mechanism(name) for name in NAMES} | {
    "bilinear": Selective(selector="bilinear", protect_first=False),
    "vector gate": ablations()["pre conv, post mix, vector gate"],
    "identity gate": MultiToken(conv=(2, 3), mix=2, gate="scalar", gate_start="identity"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_mechanism_comes_back_bit_for_bit(name, tmp_path):
    model = converted(CONFIGS[name])
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    ids = tokens()
    assert again._heedful.mechanism == CONFIGS[name]
    assert torch.equal(logits(again, ids), logits(model, ids))
    heedful.revert(again), heedful.revert(model)
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_precisions_come_back_bit_for_bit(dtype, tmp_path):
    converted(MultiToken(conv_every=1, norm="depth", gate="scalar")).save_pretrained(tmp_path)
    model = heedful.load(tmp_path, dtype=dtype)
    for p in model._heedful.parameters().values():
        p.data = p.data.to(dtype)
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert {n: p.dtype for n, p in again.named_parameters()} == {
        n: p.dtype for n, p in model.named_parameters()
    }
    ids = tokens()
    assert torch.equal(logits(again, ids), logits(model, ids))


def test_a_requested_precision_is_for_the_model_alone(folder):
    model = heedful.load(folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in model._heedful.parameters().values())
    assert bool(logits(model, tokens()).isfinite().all())


def test_layers_and_settings_come_back(tmp_path):
    model = tiny(dtype=torch.float32)
    heedful.convert(model, "differential", layers=[1])
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert again._heedful.layers == (1,)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "heedful"
    about = config["heedful"]
    base = about.pop("base")
    part = {"mechanism": {"kind": "Differential"}, "layers": [1]}
    assert about == {"format": 2, "mechanisms": [part]}
    assert base["architectures"] == ["LlamaForCausalLM"] and base["use_cache"] is True
    assert again._heedful.mechanism == Differential()


def test_a_saved_model_goes_on_as_before(tmp_path):
    model = converted()
    ids = tokens()
    before, config = logits(model, ids), model.config.to_dict()
    model.save_pretrained(tmp_path)
    assert model.config.use_cache is True and model.generation_config.use_cache is True
    assert model.config.to_dict() == config | {"dtype": "float32"}
    assert torch.equal(logits(model, ids), before)


def test_transformers_alone_refuses_and_loads_after_registration(folder, monkeypatch):
    """The classes it has learned are taken back, so that this test can start without them."""
    from transformers.models.auto import configuration_auto, modeling_auto

    monkeypatch.setattr(configuration_auto.CONFIG_MAPPING, "_extra_content", {})
    monkeypatch.setattr(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, "_extra_content", {})
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoModelForCausalLM.from_pretrained(folder)
    register()
    register()
    actual = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokens()
    assert torch.equal(logits(actual, ids), logits(heedful.load(folder), ids))
    assert AutoConfig.from_pretrained(folder).model_type == "heedful"


STOCK = """
import sys
from transformers import LlamaForCausalLM
LlamaForCausalLM.from_pretrained(sys.argv[1])
"""
ADVICE = r"heedful: open this folder with heedful.load\(folder\)"


@pytest.mark.slow
def test_a_family_class_cannot_load_it_where_heedful_was_never_imported(folder):
    process = subprocess.run(
        [sys.executable, "-c", STOCK, str(folder)], capture_output=True, text=True
    )
    assert process.returncode == 1
    assert re.search(ADVICE, process.stderr)


@pytest.mark.parametrize(
    "family",
    [
        LlamaForCausalLM,
        LlamaModel,
        LlamaForSequenceClassification,
        LlamaConfig,
        GPT2LMHeadModel,
        Gemma3ForConditionalGeneration,
    ],
)
def test_no_class_of_a_family_takes_it_for_a_model_of_default_sizes(family, folder):
    """In a process that has converted and registered, whatever the loader is told."""
    register()
    heedful.convert(tiny(), "standard")
    for options in ({}, {"attn_implementation": "sdpa"}, {"dtype": torch.bfloat16}):
        with pytest.raises(Exception, match=ADVICE):
            family.from_pretrained(folder, **options)
    if family is LlamaForCausalLM:
        saved = json.loads((folder / "config.json").read_text())
        own = config_of("llama", num_hidden_layers=3)
        own._attn_implementation = saved["attn_implementation"]
        with pytest.raises(ValueError, match=ADVICE):
            family(own)


def test_saving_in_more_or_fewer_files_leaves_nothing_old(tmp_path):
    ids = tokens()
    for size in ("50GB", "20KB", "50GB"):
        model = converted()
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert torch.equal(logits(heedful.load(tmp_path), ids), logits(model, ids)), size
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


def test_other_files_in_the_folder_are_left_alone(folder):
    (folder / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "notes.txt").write_text("mine")
    converted().save_pretrained(folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("existing", [True, False])
def test_a_save_that_fails_midway_leaves_the_old_checkpoint(whole, tmp_path, existing, monkeypatch):
    import transformers.modeling_utils as modeling

    if existing:
        for path in whole.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = converted("talking-heads")
    config = model.config.to_dict()

    def half(tensors, path, **_):
        Path(path).write_bytes(b"half a file")
        raise OSError("no space left on device")

    monkeypatch.setattr(modeling, "safe_save_file", half)
    with pytest.raises(OSError, match="no space left"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert model.config.to_dict() == config | {"dtype": "float32"}
    assert model.generation_config.use_cache is True


def change_config(folder, **changes):
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            saved.pop(key)
        else:
            saved[key] = saved[key] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(saved))


def change_part(folder, **changes):
    saved = json.loads((folder / "config.json").read_text())
    (part,) = saved["heedful"]["mechanisms"]
    change_config(folder, heedful={"mechanisms": [part | changes]})


def change_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


MIX = "model.layers.1.self_attn.heedful.mix"
DAMAGE = {
    "format 3, this version of heedful reads 2; load it with the version that": lambda f: (
        change_config(f, heedful={"format": 3})
    ),
    "checkpoint format None": lambda f: change_config(f, heedful=None),
    r"checkpoint format None, ": lambda f: change_config(f, heedful=[]),
    "config.json has no valid 'base'; the checkpoint is damaged": lambda f: change_config(
        f, heedful={"base": None}
    ),
    "config.json has no valid 'mechanism'": lambda f: change_config(
        f, heedful={"mechanisms": [{"mechanism": "mta", "layers": [0]}]}
    ),
    "config.json has no valid 'layers'": lambda f: change_part(f, layers=3),
    "mechanism kind must be one of .* got 'Clustered': pass the class of its conf": lambda f: (
        change_part(f, mechanism={"kind": "Clustered"})
    ),
    "Selective has no field size; it was written by another": lambda f: change_part(
        f, mechanism={"kind": "Selective", "size": 3}
    ),
    r"layers must be among 0 to 2, got \[7\]": lambda f: change_part(f, layers=[0, 7]),
    "holds a plain 'llama' model without a mechanism: load it with AutoModel": lambda f: (
        change_config(f, model_type="llama")
    ),
    "config.json is not valid JSON .* the checkpoint is damaged": lambda f: (
        f / "config.json"
    ).write_text('{"model_type": "heed'),
    "config.json is not valid JSON .* is damaged": lambda f: (f / "config.json").write_bytes(
        b"\xff\xfe\x00"
    ),
    r"config.json must hold a JSON object": lambda f: (f / "config.json").write_text("[1]"),
    "folder must be a checkpoint with a config.json": lambda f: (f / "config.json").unlink(),
    rf"does not fit .*{MIX} is missing": lambda f: change_weights(f, lambda t: t.pop(MIX)),
    rf"does not fit .*{MIX}_2 is not expected": lambda f: change_weights(
        f, lambda t: t.update({f"{MIX}_2": t[MIX].clone()})
    ),
    rf"does not fit .*{MIX} has shape \(1, 4, 3\)": lambda f: change_weights(
        f, lambda t: t.update({MIX: t[MIX][..., :3].contiguous()})
    ),
    rf"does not fit .*{MIX} holds NaN or infinity": lambda f: change_weights(
        f, lambda t: t[MIX].view(-1)[:1].fill_(float("nan"))
    ),
    "lacks weights of the model: model.layers.2.mlp.up_proj.weight": lambda f: change_weights(
        f, lambda t: t.pop("model.layers.2.mlp.up_proj.weight")
    ),
    r"model.safetensors is damaged .*; copy or save it again": lambda f: (
        f / "model.safetensors"
    ).write_bytes((f / "model.safetensors").read_bytes()[:-1000]),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_named(message, folder):
    DAMAGE[message](folder)
    with pytest.raises(ValueError, match=message):
        heedful.load(folder)


def change_base(folder, **changes):
    saved = json.loads((folder / "config.json").read_text())
    change_config(folder, heedful={"base": saved["heedful"]["base"] | changes})


@pytest.mark.parametrize("kind", [None, 3, "llamma"])
def test_a_base_of_no_known_type(kind, folder):
    change_base(folder, model_type=kind)
    with pytest.raises(ValueError, match=f"holds a model of type {kind!r}, which this"):
        heedful.load(folder)


@pytest.mark.parametrize("named", [["AutoModel"], ["NoSuchClass"], [None], []], ids=str)
def test_the_model_class_comes_from_the_type_where_none_is_named(named, folder):
    expected = heedful.load(folder)
    change_base(folder, architectures=named)
    ids = tokens()
    assert torch.equal(logits(heedful.load(folder), ids), logits(expected, ids))


@pytest.mark.parametrize("option", ["attn_implementation", "output_loading_info", "config"])
def test_options_that_loading_refuses(option, folder):
    with pytest.raises(ValueError, match=f"{option} is not an option of heedful.load"):
        heedful.load(folder, **{option: "sdpa"})


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(OSError, match="no file named model"):
        heedful.load(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"push_to_hub": True}, "push_to_hub is not supported: save to a folder"),
        ({"variant": "fp16"}, "variant is not supported"),
    ],
    ids=["hub", "variant"],
)
def test_options_that_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        converted().save_pretrained(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_file_where_a_folder_belongs(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match="save_directory must be a folder, got the file"):
        converted().save_pretrained(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
