"""A GGUF file, and a packaged model, wherever a command takes a model."""

import json
from pathlib import Path

import pytest
import torch

import heedful
from heedful.hf.stock import stock_tokenizer
from heedful_lab.commands.models import open_model, open_tokenizer
from helpers.command_line import refusal, status_of
from helpers.gguf_files import write_gguf
from helpers.small_models import files_of, small, tokenizer_of_words

TEXT = "a red bus and a red car, and then another line of one book. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """small.gguf, a text, and a checkpoint of the same model."""
    root = tmp_path_factory.mktemp("gguf")
    tokenizer = tokenizer_of_words(chat=True, pairs=("re", "bu"))
    write_gguf(root / "small.gguf", small(vocabulary=261), tokenizer)
    small(vocabulary=261).save_pretrained(root / "plain")
    stock_tokenizer(root / "small.gguf").save_pretrained(root / "plain")
    (root / "book.txt").write_text(TEXT)
    return root


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def test_it_is_opened_with_its_tokenizer():
    model = open_model("small.gguf")
    ids = torch.tensor([open_tokenizer(None, "small.gguf", model).encode("a red bus")])
    assert 259 in ids[0]
    assert torch.equal(model(ids).logits, small(vocabulary=261)(ids).logits)


def test_it_is_converted_with_its_tokenizer():
    assert status_of("convert", "small.gguf", "out-mta", "--mechanism", "mta") == 0
    model, ids = heedful.load("out-mta"), torch.arange(60)[None]
    assert torch.equal(model(ids).logits, small(vocabulary=261)(ids).logits)
    assert stock_tokenizer("out-mta").encode(TEXT[:60]) == stock_tokenizer("small.gguf").encode(
        TEXT[:60]
    )
    assert stock_tokenizer("out-mta").chat_template


def test_generate_and_inspect_read_it(capsys):
    outputs = []
    for model in ("small.gguf", "plain"):
        words = ("generate", model, "--prompt", "a red", "--max-new-tokens", "6")
        assert status_of(*words) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert status_of("inspect", "small.gguf", "--text", "a red bus", "--out", "look.html") == 0
    assert Path("look.html").is_file()


def test_eval_reads_it():
    words = ("--tasks", "perplexity", "--data", "book.txt", "--length", "64", "--samples", "3")
    assert status_of("eval", "small.gguf", "plain", *words, "--out", "runs/eval") == 0
    lines = Path("runs/eval/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    values = {
        model: [x for x in samples if x["model"] == model] for model in ("small.gguf", "plain")
    }
    assert len(values["plain"]) == len(values["small.gguf"]) == 3
    for first, second in zip(*values.values(), strict=True):
        # Of the file the weights are the same, and the configuration says less.
        assert first["identity"] != second.pop("identity")
        assert first | {"model": "plain"} == second | {"identity": first["identity"]}


def test_training_begins_with_it():
    words = ("--steps", "1", "--batch", "2", "--length", "48", "--out", "runs/train")
    assert status_of("train", "small.gguf", "--data", "book.txt", "--mechanism", "mta", *words) == 0
    assert len(heedful.load("runs/train").model.layers) == 2


def test_budgets_need_a_folder_to_stand_in(capsys):
    line = refusal(capsys, "budget", "small.gguf", "--data", "book.txt")
    assert "heedful convert small.gguf OUT --mechanism standard makes one" in line
    assert status_of("convert", "small.gguf", "out-plain", "--mechanism", "standard") == 0
    words = ("--data", "book.txt", "--length", "40", "--rows", "1", "--loss", "5")
    assert status_of("budget", "out-plain", *words) == 0
    assert Path("out-plain/budgets.json").is_file()


def test_doctor_reads_its_configuration(capsys):
    assert status_of("doctor", "small.gguf") == 0
    assert "selective" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("convert", "short.gguf", "out", "--mechanism", "mta"),
        ("generate", "short.gguf", "--prompt", "a"),
        ("eval", "short.gguf", "--tasks", "perplexity", "--data", "book.txt", "--out", "runs/none"),
        ("train", "short.gguf", "--data", "book.txt", "--out", "runs/none"),
        ("inspect", "short.gguf", "--text", "a"),
        ("doctor", "short.gguf"),
    ],
    ids=lambda x: x[0],
)
def test_a_damaged_file_is_one_line_and_nothing_is_written(words, folder, capsys):
    (folder / "short.gguf").write_bytes((folder / "small.gguf").read_bytes()[:3000])
    before = files_of(folder)
    line = refusal(capsys, *words)
    assert "'short.gguf'" in line and "short.gguf is damaged, cut short, or no GGUF file" in line
    assert len(line) < 800 and files_of(folder) == before
