"""An adapter in the commands: as MODEL, and with --adapter; in one folder with its base."""

import os
from pathlib import Path

import pytest
import torch

import heedful
from heedful_lab.commands.convert.options import FolderConversion
from heedful_lab.commands.convert.run import convert_folder
from heedful_lab.commands.evaluate.options import Evaluation
from heedful_lab.commands.evaluate.run import evaluate
from heedful_lab.commands.generate.options import Generation
from heedful_lab.commands.generate.run import generate
from heedful_lab.commands.models import configuration_of, open_model
from helpers.families import stir
from helpers.small_models import save_base_of_bytes


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = save_base_of_bytes(Path("base"), 256)
    heedful.convert(model, heedful.Selective(selector="extra"))
    stir(model, 0.5, ".heedful.")
    heedful.save_adapter(model, "adapter", base="base")


def test_both_ways_to_name_an_adapter_open_the_same_model():
    ids = torch.arange(40)[None]
    by_folder, by_option = open_model("adapter"), open_model("base", adapter="adapter")
    assert torch.equal(by_folder(ids).logits, by_option(ids).logits)
    assert not torch.equal(by_folder(ids).logits, open_model("base")(ids).logits)
    assert configuration_of("adapter")[1] == [str(heedful.Selective(selector="extra"))]
    texts = []
    for model in ({"model": "adapter"}, {"model": "base", "adapter": "adapter"}):
        options = Generation(**model, prompt="abc", max_new_tokens=5, budget="16")
        texts += generate(options, lambda _: None)
    assert texts[0].text == texts[1].text and texts[0].nbytes == texts[1].nbytes


def test_an_adapter_is_evaluated_beside_its_base():
    options = Evaluation(
        ("base", "adapter"),
        tasks=("perplexity",),
        out="out",
        length=32,
        samples=1,
        data=("text.txt",),
    )
    with open("text.txt", "w") as file:
        file.write("a quiet text " * 20)
    scores = {x.model: x for x in evaluate(options).samples}
    assert scores.keys() == {"base", "adapter"}


def test_an_adapter_and_its_base_are_written_into_one_folder():
    assert "base with Selective" in convert_folder(FolderConversion("adapter", "whole"))
    ids = torch.arange(40)[None]
    whole = heedful.load("whole")
    assert torch.equal(whole(ids).logits, heedful.load("adapter")(ids).logits)
    assert "tokenizer.json" in os.listdir("whole")


def test_what_is_no_adapter_is_refused():
    with pytest.raises(ValueError, match=r"'base' has no adapter\.json"):
        open_model("base", adapter="base")
    with pytest.raises(ValueError, match="leave --mechanism"):
        convert_folder(FolderConversion("adapter", "out", ("mta",)))
    with pytest.raises(ValueError, match="either --mechanism"):
        convert_folder(FolderConversion("base", "out"))
