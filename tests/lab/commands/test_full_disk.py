"""A disk that fills up while a command writes: one line that names the place."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

import heedful
from helpers.command_line import status_of
from helpers.small_models import small, tokenizer_of_words

DATA = ("--data", "book.txt", "--length", "40")


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """In a folder with a model, the same converted, and a text."""
    model = small()
    model.save_pretrained(tmp_path / "plain")
    tokenizer_of_words().save_pretrained(tmp_path / "plain")
    model.config.to_json_file(tmp_path / "small.json")
    heedful.convert(model, "selective")
    model.save_pretrained(tmp_path / "model")
    tokenizer_of_words().save_pretrained(tmp_path / "model")
    (tmp_path / "book.txt").write_text("a red bus and a red car, and one book. " * 40)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def full_of_tensors(*args, **kwargs):
    raise SafetensorError("Error while serializing: I/O error: No space left on device")


def full_of_words(*args, **kwargs):
    raise Exception("No space left on device (os error 28)")


COMMANDS = {
    "runs": (
        ("compare", "--tasks", "parity", "--mechanisms", "standard", "--steps", "1", "--batch", "2",
         "--out", "runs"),
        ("heedful.files.os.fsync", full),
        "runs/results.jsonl",
    ),
    "answers": (
        ("eval", "model", "--tasks", "perplexity", *DATA, "--samples", "2", "--out", "runs"),
        ("heedful.files.os.fsync", full),
        "runs/samples.jsonl",
    ),
    "trials": (
        ("budget", "model", *DATA, "--rows", "1"),
        ("heedful.files.os.fsync", full),
        "model/budgets.search.jsonl",
    ),
    "page": (
        ("inspect", "model", "--text", "a red bus", "--out", "look.html"),
        ("pathlib.Path.write_bytes", full),
        "look.html",
    ),
    "weights": (
        ("convert", "model", "out", "--revert"),
        ("transformers.modeling_utils.safe_save_file", full_of_tensors),
        "out",
    ),
    "vocabulary": (
        ("train", "small.json", *DATA, "--steps", "1", "--batch", "1", "--out", "runs",
         "--tokenizer", "bytes"),
        ("transformers.PreTrainedTokenizerFast.save_pretrained", full_of_words),
        "runs/unfinished/tokenizer",
    ),
    "adapter": (
        ("train", "plain", *DATA, "--train", "mechanism", "--mechanism", "selective:selector=extra",
         "--steps", "1", "--batch", "1", "--out", "runs"),
        ("heedful.hf.adapter_folders.save_file", full_of_tensors),
        "runs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_one_line_names_the_place(name, here, monkeypatch, capsys):
    words, (function, failure), place = COMMANDS[name]
    monkeypatch.setattr(function, failure)
    assert status_of(*words) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("heedful: No space left on device: ") and place in line
