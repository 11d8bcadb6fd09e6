"""`heedful export`: folders and adapters as stock checkpoints, whole or not at all."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import heedful
from heedful.commands.export.options import Export
from heedful.commands.export.run import export_folder
from heedful.testing import assert_matches_oracle
from helpers.command_line import refusal, status_of
from helpers.families import varied
from helpers.gguf_files import write_gguf
from helpers.small_models import files_of, save_base_of_bytes, small, tokenizer_of_words


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def save_converted(folder: str, mechanism) -> None:
    model = save_base_of_bytes(Path("base"), 64)
    varied(model, mechanism, 0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained("base").save_pretrained(folder)


def test_a_folder_becomes_a_stock_one_with_its_tokenizer(capsys):
    save_converted("converted", heedful.KnockingHeads())
    status, printed = status_of("export", "converted", "deep/stock"), capsys.readouterr().out
    assert status == 0 and "KnockingHeads" in printed and "model: deep/stock" in printed
    ids = torch.arange(40)[None]
    expected = heedful.load("converted")(ids).logits
    stock = AutoModelForCausalLM.from_pretrained("deep/stock")
    base = AutoModelForCausalLM.from_pretrained("base")
    exact = heedful.load("converted", dtype=torch.float64)(ids).logits
    assert_matches_oracle("logits", stock(ids).logits, expected, exact, terms=40)
    assert (base(ids).logits - expected).abs().max() > 1e-2
    text = "a bus"
    assert AutoTokenizer.from_pretrained("deep/stock")(text) == AutoTokenizer.from_pretrained(
        "base"
    )(text)
    assert os.listdir("deep") == ["stock"]


def test_an_adapter_is_exported_with_its_base():
    base = save_base_of_bytes(Path("base"), 64)
    model = AutoModelForCausalLM.from_pretrained("base")
    varied(model, heedful.KnockingHeads(("q", "k", "v")), 0.3)
    heedful.save_adapter(model, "adapter", base="base")
    export_folder(Export("adapter", "stock"))
    ids = torch.arange(40)[None]
    actual = AutoModelForCausalLM.from_pretrained("stock")(ids).logits
    heedful.export(heedful.load("adapter"), "alone")
    weights = [Path(x, "model.safetensors").read_bytes() for x in ("stock", "alone", "base")]
    assert weights[0] == weights[1] != weights[2]
    assert (actual - base(ids).logits).abs().max() > 1e-2
    assert Path("stock/tokenizer.json").is_file()


def test_a_gguf_file_becomes_an_ordinary_folder():
    model = small(positions=64)
    write_gguf(Path("model.gguf"), model, tokenizer_of_words(pairs=("re",)))
    export_folder(Export("model.gguf", "stock"))
    ids = torch.arange(40)[None]
    stock = AutoModelForCausalLM.from_pretrained("stock")
    torch.testing.assert_close(stock(ids).logits, model(ids).logits)


def test_what_cannot_be_exported_leaves_nothing(capsys):
    save_converted("converted", heedful.Selective(selector="extra"))
    before = files_of(Path())
    line = refusal(capsys, "export", "converted", "deep/stock")
    assert line.startswith("heedful: model: Selective(") and "is not standard attention" in line
    with pytest.raises(ValueError, match="out must be a new or empty folder, got 'base'"):
        export_folder(Export("converted", "base"))
    Path("empty").mkdir()
    with pytest.raises(ValueError, match=r"'empty' is a folder without a config\.json"):
        export_folder(Export("empty", "stock"))
    assert files_of(Path()) == before and sorted(os.listdir()) == ["base", "converted", "empty"]
