"""Folders with code of their own (`auto_map`): refused by name, without a question, nothing run."""

import builtins
import json
import shutil
from pathlib import Path

import pytest

import heedful
from heedful.hf.stock import stock_config, stock_model, stock_tokenizer
from helpers.command_line import refusal
from helpers.small_models import files_of, small, tokenizer_of_words

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own-llama"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """own: a model with code of its own; words: a model whose tokenizer has such; and a
    text."""
    root = tmp_path_factory.mktemp("foreign")
    for name in ("own", "words"):
        small().save_pretrained(root / name)
        tokenizer_of_words().save_pretrained(root / name)
        (root / name / "own.py").write_text(CODE.format(marker=str(root / "ran")))
    change(root / "own" / "config.json", model_type="own-llama", auto_map=MODEL)
    own = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    file = root / "words" / "tokenizer_config.json"
    change(file, tokenizer_class="OwnTokenizer", auto_map=own)
    (root / "book.txt").write_text("a red bus and a red car, and one book. " * 40)
    return root


def change(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture(autouse=True)
def here(root, monkeypatch):
    """In the folder, where whoever is asked says yes."""
    asked = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": asked.append(prompt) or "y")
    monkeypatch.chdir(root)
    before = files_of(root)
    yield
    assert not asked and files_of(root) == before


REFUSED = "needs code of its own (auto_map), which heedful does not run"
DATA = ("--data", "book.txt", "--length", "40")
COMMANDS = [
    ("generate", "{}", "--prompt", "a red"),
    (
        "eval",
        "{}",
        "--tasks",
        "perplexity",
        "--data",
        "book.txt",
        "--length",
        "40",
        "--out",
        "runs",
    ),
    ("train", "{}", *DATA, "--out", "runs"),
    ("inspect", "{}", "--text", "a red bus"),
    ("budget", "{}", *DATA),
    ("convert", "{}", "out", "--mechanism", "mta"),
    ("doctor", "{}"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda x: x[0])
def test_every_command_refuses_a_model(words, capsys):
    line = refusal(capsys, *(word.format("own") for word in words))
    assert f"own {REFUSED}" in line and "give the model to heedful.convert" in line


@pytest.mark.parametrize("words", COMMANDS[:-2], ids=lambda x: x[0])
def test_every_command_refuses_a_tokenizer(words, capsys):
    line = refusal(capsys, *(word.format("words") for word in words))
    assert f"words {REFUSED}" in line


def test_python_refuses_both(tmp_path):
    model = small()
    heedful.convert(model, heedful.Selective(selector="extra"))
    heedful.save_adapter(model, tmp_path / "adapter", base="own")
    for open_it, name in (
        (stock_model, "own"),
        (stock_config, "own"),
        (stock_tokenizer, "words"),
        (lambda name: heedful.load(name, adapter=tmp_path / "adapter"), "own"),
        (lambda name: heedful.load(tmp_path / "adapter"), "own"),
    ):
        with pytest.raises(ValueError, match=rf"{name} needs code of its own \(auto_map\)"):
            open_it(name)


def test_what_transformers_knows_is_opened_without_the_code(tmp_path):
    """As the hub's folders of Llamas with a file for older versions beside them."""
    folder = shutil.copytree("own", tmp_path / "known")
    change(folder / "config.json", model_type="llama")
    assert type(stock_model(folder)) is type(small())
