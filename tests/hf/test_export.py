"""A converted model as a stock checkpoint: the same numbers, by transformers alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import heedful
from heedful.nn import (
    Canon,
    Dex,
    Exclusive,
    Forgetting,
    Gated,
    Grouped,
    KnockingHeads,
    LocalGlobal,
    MultiToken,
    Parallax,
    RetentionGate,
    Selective,
    Simplicial,
    Standard,
    TalkingHeads,
)
from helpers.families import FUSED, logits, ragged_mask, stir, tiny, tokens, varied

KNOCKING = ("llama", "qwen2", "qwen3", "starcoder2", "olmo2", *FUSED)
UNLEARNT = {
    "standard": "standard",
    "mta": MultiToken(conv_every=1),
    "mta with a gate": MultiToken(conv_every=1, gate="vector", gate_start="identity"),
    "talking-heads": TalkingHeads(2),
    "knocking-heads": KnockingHeads(),
    "knocking-heads mlp": KnockingHeads(form="mlp"),
    "canon": Canon(),
    "gated": Gated(start="identity"),
    "forgetting": Forgetting("identity"),
    "parallax": Parallax(),
    "dex": Dex(),
    "retention-gate": RetentionGate(),
    "self-pruned": RetentionGate(window=3),
}
LEARNT = {
    "mta": MultiToken(conv_every=1),
    "mta with a norm": MultiToken(conv=None, post_conv=None, mix=None, post_mix=None, norm="depth"),
    "mta with scaled input": MultiToken(input_scaling="depth"),
    "talking-heads": TalkingHeads(),
    "knocking-heads mlp": KnockingHeads(form="mlp"),
    "canon": Canon(),
    "gated": Gated(start="identity"),
    "forgetting": Forgetting("identity"),
    "exclusive": Exclusive(),
    "parallax": Parallax(),
    "dex": Dex((1,)),
    "simplicial": Simplicial(every=1),
    "self-pruned": RetentionGate(window=3),
    "selective": Selective(),
    "differential": "differential",
    "differential-v2": "differential-v2",
    "grouped": Grouped(),
}


def exported(model, folder: Path):
    """The folder opened by transformers, in the precision in which it was written."""
    heedful.export(model, folder)
    saved = json.loads((folder / "config.json").read_text())
    assert "heedful" not in json.dumps(saved).lower()
    opened = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    stock, report = opened
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(stock).__module__.startswith("transformers.models.")
    assert saved["architectures"] == [type(stock).__name__]
    return stock.eval()


def largest(x: torch.Tensor) -> float:
    return float(x.abs().max())


@pytest.mark.parametrize("family", KNOCKING)
def test_linear_knocking_heads_are_in_the_projections(family, tmp_path):
    """With grouped queries, biases, norms after the projections, and one projection for all."""
    model = tiny(family, **({"tie_word_embeddings": False} if family == "llama" else {}))
    heedful.convert(model, KnockingHeads(("q", "k", "v")), layers=[0, 2])
    ids, mask = tokens(), ragged_mask()
    unlearnt = logits(model, ids, attention_mask=mask)
    stir(model, 0.3, ".heedful.")
    expected = logits(model, ids, attention_mask=mask)
    assert largest(expected - unlearnt) > 1e-2
    before = {name: p.clone() for name, p in model.state_dict().items()}
    stock = exported(model, tmp_path / "out")
    actual = logits(stock, ids, attention_mask=mask)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert torch.equal(logits(model, ids, attention_mask=mask), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_folded_weights_are_rounded_once(dtype, tmp_path):
    """The nearest numbers of the model's precision to the product in fp64; the rest bit for bit."""
    model = tiny(dtype=dtype)
    varied(model, KnockingHeads(), 0.3)
    stock = exported(model, tmp_path / "out").state_dict()
    for name, weight in model.state_dict().items():
        if ".heedful." in name:
            continue
        if name.endswith("v_proj.weight"):
            matrix = model.state_dict()[name.replace("v_proj.weight", "heedful.shared.v")]
            heads = weight.double().unflatten(0, (2, 8)).mT  # [head, input, channel]
            weight = (heads @ matrix.double()).mT.flatten(0, 1).to(dtype)
        assert stock[name].dtype == dtype and torch.equal(stock[name], weight), name


@pytest.mark.parametrize("name", UNLEARNT)
def test_what_has_learnt_nothing_is_the_family_itself(name, tmp_path):
    model = tiny("qwen2", torch.float32)
    expected, weights = logits(model, tokens()), model.state_dict()
    ids = tokens()
    expected = logits(model, ids)
    heedful.convert(model, UNLEARNT[name])
    stock = exported(model, tmp_path / "out")
    assert torch.equal(logits(stock, ids), expected)
    assert stock.state_dict().keys() == weights.keys()
    assert all(torch.equal(x, weights[key]) for key, x in stock.state_dict().items())


@pytest.mark.parametrize("name", LEARNT)
def test_what_no_stock_checkpoint_computes_is_refused_by_name(name, tmp_path):
    model = tiny(num_key_value_heads=4)
    kind = type(next(iter(heedful.convert(model, LEARNT[name]).mechanisms))).__name__
    stir(model, 0.3, ".heedful.")
    with pytest.raises(ValueError, match=rf"{kind}\(.* of layer 0 is not standard .*revert"):
        heedful.export(model, tmp_path / "deep" / "out")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("learnt", ["conv", "post_conv", "mix", "post_mix", "gate.weight"])
def test_one_number_that_has_learnt_is_enough_to_refuse(learnt, tmp_path):
    model = tiny()
    heedful.convert(model, MultiToken(conv_every=1, gate="scalar", gate_start="identity"))
    with torch.no_grad():
        model.get_parameter(f"model.layers.2.self_attn.heedful.{learnt}").view(-1)[-1] += 1e-6
    with pytest.raises(ValueError, match="of layer 2 is not standard attention"):
        heedful.export(model, tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_windows_become_types_of_layers(family, tied, tmp_path):
    model = tiny(
        family,
        tie_word_embeddings=tied,
        **({"sliding_window": None} if family == "mistral" else {}),
    )
    whole = logits(model, ids := tokens(length=23))
    heedful.convert(model, LocalGlobal(window=5, every=2))
    mask = ragged_mask(length=23)
    expected, padded = logits(model, ids), logits(model, ids, attention_mask=mask)
    assert largest(expected - whole) > 1e-2
    stock = exported(model, tmp_path / "out")
    assert stock.config.model_type == (family if family.startswith("qwen") else "ministral")
    assert stock.config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert stock.config.sliding_window == 5
    torch.testing.assert_close(logits(stock, ids), expected, rtol=0, atol=1e-12)
    actual = logits(stock, ids, attention_mask=mask)
    real = mask.bool()
    torch.testing.assert_close(actual[real], padded[real], rtol=0, atol=1e-12)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(stock.generate(ids, **options), model.generate(ids, **options))


def test_windows_beside_knocking_heads(tmp_path):
    model = tiny(head_dim=16)
    varied(model, {KnockingHeads(): [0, 1], Standard(window=4): [2]}, 0.3)
    ids = tokens()
    stock = exported(model, tmp_path / "out")
    assert stock.config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    torch.testing.assert_close(logits(stock, ids), logits(model, ids), rtol=0, atol=1e-12)


def test_the_families_own_windows_stay(tmp_path):
    """Mistral's window is in every layer; a wider one of a mechanism's adds nothing to it."""
    model = tiny("mistral")  # with a window of 4
    heedful.convert(model, LocalGlobal(window=9, every=2))
    ids = tokens(length=23)
    stock = exported(model, tmp_path / "out")
    assert stock.config.layer_types == ["sliding_attention"] * 3
    assert stock.config.sliding_window == 4
    torch.testing.assert_close(logits(stock, ids), logits(model, ids), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("family", "changes", "mechanism", "message"),
    [
        ("gemma3_text", {}, LocalGlobal(4), "type 'gemma3_text' cannot give layers windows"),
        ("gpt_neox", {}, LocalGlobal(4), "type 'gpt_neox' cannot give layers windows"),
        ("llama", {"attention_bias": True}, LocalGlobal(4), "its projections .* a bias"),
        (
            "llama",
            {},
            {Standard(window=4): [0], Standard(window=6): [1]},
            "windows of 4, 6 tokens.* one for all",
        ),
    ],
)
def test_windows_that_no_checkpoint_can_say_are_refused(
    family, changes, mechanism, message, tmp_path
):
    model = tiny(family, **changes)
    heedful.convert(model, mechanism)
    with pytest.raises(ValueError, match=message):
        heedful.export(model, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_the_folder_and_the_model_are_checked(tmp_path):
    model = tiny()
    with pytest.raises(ValueError, match="not converted"):
        heedful.export(model, tmp_path / "out")
    heedful.convert(model, "standard")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.txt").write_text("mine")
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        heedful.export(model, tmp_path / "used")
    (tmp_path / "empty").mkdir()
    heedful.export(model, tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_nothing_is_left_of_what_could_not_be_written(tmp_path, monkeypatch):
    model = tiny()
    heedful.convert(model, "standard")
    settings = model.config.use_cache, model.config.architectures

    def full(self, folder, **options):
        (Path(folder).mkdir(), (Path(folder) / "model.safetensors").write_text("half"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.LlamaForCausalLM.save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        heedful.export(model, tmp_path / "out")
    assert not any(tmp_path.iterdir())
    assert (model.config.use_cache, model.config.architectures) == settings


def test_another_process_opens_it_without_heedful(tmp_path):
    model = tiny(dtype=torch.float32)
    varied(model, KnockingHeads(), 0.3)
    heedful.export(model, tmp_path / "out")
    ids = tokens(1)
    code = (
        "import sys, json; from transformers import AutoModelForCausalLM; import torch\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.tensor(json.loads(sys.argv[2]))\n"
        "out = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)\n"
        "assert not any(name.startswith('heedful') for name in sys.modules)\n"
        "print(json.dumps(out.tolist()))"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "out"), json.dumps(ids.tolist())]
    process = subprocess.run(words, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
    expected = model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0)
    assert json.loads(process.stdout.splitlines()[-1]) == expected.tolist()
