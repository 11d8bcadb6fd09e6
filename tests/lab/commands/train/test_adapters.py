"""`heedful train` beside a frozen base: what is trained, what is written, what it opens on."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import heedful
from heedful.hf.stock import stock_model
from heedful.training.run import Stopped
from heedful.training.sequences import IGNORE, MixedSequences, TokenFile
from heedful_lab.commands.train.options import Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.commands.train.start import starting_point
from helpers.small_models import save_base_of_bytes

TEXT = "".join(f"line {i}: {'the quick brown fox '[: i % 21]}jumps\n" for i in range(400))
FILES = ["adapter.json", "adapter.safetensors", "log.jsonl", "training.json"]


@pytest.fixture
def options(tmp_path, monkeypatch) -> Training:
    monkeypatch.chdir(tmp_path)
    save_base_of_bytes(Path("base"), 512)
    Path("text.txt").write_text(TEXT)
    return Training(
        "base", ("text.txt",), "run", recipe="hide", steps=6, batch=2, length=96, evaluations=2,
        device="cpu",
    )  # fmt: skip


def quietly(options: Training, stop=lambda: False):
    return train_text(options, stop, show=False)


def test_a_recipe_trains_selectors_alone_and_writes_an_adapter(options):
    result = quietly(options)
    assert sorted(os.listdir("run")) == FILES
    trained = load_file("run/adapter.safetensors")
    assert len(trained) == 4 and {x.dtype for x in trained.values()} == {torch.bfloat16}
    assert result.parameters == sum(x.numel() for x in trained.values()) == 2 * 2 * 32 * 16
    base, model = stock_model("base"), heedful.load("run")
    for name, parameter in base.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))
    assert str(heedful.load("base", adapter="run")._heedful.mechanism).startswith("Selective")
    keys = [x for name, x in trained.items() if "key" in name]
    assert all(x.any() for x in keys)  # zero before training


def test_evaluation_scores_the_model_that_is_written(options):
    """F has its scale by then: far too large masks, at this rate, hardly cost anything."""
    options = replace(options, learning_rate=3.0)
    result = quietly(options)
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    half, end = (x["eval_loss"] for x in log if "eval_loss" in x)
    untrained = quietly(replace(options, learning_rate=1e-9, out="untrained")).loss
    assert untrained == pytest.approx(end, abs=0.02) and end == result.loss
    assert untrained == pytest.approx(half, abs=0.02)


def test_a_killed_adapter_run_goes_on_to_the_same_bits(options):
    quietly(options)
    answers = iter([False, False])
    with pytest.raises(Stopped):
        quietly(replace(options, out="killed"), lambda: next(answers, True))
    files = sorted(os.listdir("killed/unfinished/state/checkpoint-3"))
    assert "trained.safetensors" in files and "model.safetensors" not in files
    quietly(replace(options, out="killed"))
    whole, resumed = (load_file(f"{x}/adapter.safetensors") for x in ("run", "killed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_the_base_predicts_is_learned_and_not_the_text(options):
    """At the start nothing is hidden and nothing diverges, also of several documents in a row."""
    lines = "".join(json.dumps({"text": f"number {i}"}) + "\n" for i in range(400))
    Path("lines.jsonl").write_text(lines)
    options = replace(
        options, data=("lines.jsonl",), recipe="adapt", train="mechanism", targets="base",
        mechanism=("selective:selector=extra",),
    )  # fmt: skip
    quietly(replace(options, steps=1, evaluations=1))
    log = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert [x["loss"] for x in log if "loss" in x] == [pytest.approx(0, abs=1e-6)]
    quietly(replace(options, out="text", targets="text", steps=1, evaluations=1))
    log = [json.loads(line) for line in Path("text/log.jsonl").read_text().splitlines()]
    assert next(x["loss"] for x in log if "loss" in x) > 5


@pytest.mark.parametrize("mechanism", ["mta", "standard"])
def test_low_rank_matrices_are_trained_beside_the_mechanism(options, mechanism):
    """With standard attention there are the matrices alone: a control."""
    lora = replace(
        options, recipe="adapt", mechanism=(mechanism,), train="lora", rank=2, learning_rate=1e-2
    )
    quietly(lora)
    assert "adapter_config.json" in os.listdir("run") and "README.md" not in os.listdir("run")
    saved = load_file("run/adapter_model.safetensors")
    assert {x.dtype for x in saved.values()} == {torch.bfloat16}
    assert any(".heedful." in name for name in saved) == (mechanism == "mta")
    base, model = stock_model("base"), heedful.load("run")
    weight = "model.layers.0.self_attn.q_proj.weight"
    change = model.get_parameter(weight) - base.get_parameter(weight)
    assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2
    assert model.model.layers[0].self_attn.heedful is not None
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_a_frozen_base_is_in_half_precision(options):
    recipe = options.filled()._replace(targets="base")  # with a teacher
    start = starting_point(options.origin(), recipe, Path("none"), half=True)
    kinds = {".heedful." in name: p.dtype for name, p in start.model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    assert {p.dtype for p in start.teacher.parameters()} == {torch.bfloat16}
    result = quietly(replace(options, dtype="bfloat16"))
    assert result.loss < 8 and heedful.load("base", adapter="run") is not None


def test_training_resumes_from_an_adapter(options):
    quietly(options)
    quietly(replace(options, model="run", out="further", seed=1))
    first, further = (load_file(f"{x}/adapter.safetensors") for x in ("run", "further"))
    assert first.keys() == further.keys() and any(
        not torch.equal(first[x], further[x]) for x in first
    )
    assert json.loads(Path("further/adapter.json").read_text())["base"]["name"] == "base"


def test_an_adapter_is_not_trained_with_its_base(options):
    quietly(options)
    with pytest.raises(ValueError, match="add --train mechanism"):
        quietly(replace(options, model="run", out="further", recipe="adapt"))
    assert not Path("further").exists()


def test_a_mixture_takes_its_parts_by_their_weights(options):
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    Path("chat.jsonl").write_text(200 * (json.dumps({"messages": turns}) + "\n"))
    tokenizer = Path("base/tokenizer_config.json")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    fields = json.loads(tokenizer.read_text()) | {"chat_template": template}
    tokenizer.write_text(json.dumps(fields))
    mixed = replace(
        options, data=("text.txt:2", "chat.jsonl:1", "recall:1"), length=512, batch=1, steps=4
    )
    with pytest.raises(Stopped):
        quietly(mixed, lambda: True)
    files = []
    for part in range(3):
        folder = Path(f"run/unfinished/text/{part}")
        about = json.loads((folder / "tokens.json").read_text())["train"]
        files.append(TokenFile(folder / "train.tokens", **about))
    rows = MixedSequences(files, (2, 1, 1), 512, 8, seed=0)
    kinds = [kind_of(row) for row in rows]
    assert [sorted(kinds[i : i + 4]) for i in (0, 4)] == 2 * [["chat", "recall", "text", "text"]]


def kind_of(row: dict[str, torch.Tensor]) -> str:
    """Only of generated facts is most of a sequence not learned."""
    if (row["labels"] == IGNORE).float().mean() > 0.4:
        return "recall"
    text = bytes(i for i in row["input_ids"].tolist() if i < 256)
    return "chat" if b"<user>a?<assistant>b." in text else "text"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "all", "targets": "base"}, "needs a frozen base"),
        ({"model": "30m"}, "has none; name a trained model"),
        (
            {"mechanism": ("standard",), "recipe": "adapt", "train": "mechanism"},
            "train='mechanism' needs a mechanism with parameters",
        ),
        ({"data": ("recall:1",)}, "must name a text beside recall"),
        ({"data": ("text.txt:1", "other.txt")}, "'other.txt' has no weight"),
        ({"data": ("text.txt:0",)}, "has the weight 0"),
        ({"fsdp": True}, "leave it out"),
        ({"rank": 0}, "rank must be"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_leaves_nothing(options, changes, message):
    with pytest.raises(ValueError, match=message):
        quietly(replace(options, **changes, out="runs/refused"))
    assert not Path("runs").exists()
