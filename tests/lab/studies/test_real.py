"""The study of a pretrained model under small caches, on a model that takes seconds."""

import importlib
import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import heedful
from heedful.eviction import MostHidden
from heedful.hf.budgets import write_budgets
from heedful.hf.stock import stock_model
from heedful_lab.commands.evaluate.answers import LanguageModel
from heedful_lab.commands.models import open_model
from heedful_lab.records import Sample
from heedful_lab.rivals.calibration import read_calibration
from helpers.families import stir
from helpers.small_models import save_base_of_bytes
from helpers.unconverted import beside


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A base, an adapter, two books, and the script as its command would run."""
    monkeypatch.chdir(tmp_path)
    model = save_base_of_bytes(Path("base"), 512)
    heedful.convert(model, heedful.Selective(selector="extra"))
    stir(model, 0.5, ".heedful.")
    heedful.save_adapter(model, "adapter", base="base")
    Path("books").mkdir()
    for number in range(2):
        lines = [f"Book {number} has line {i}, and it is a quiet one." for i in range(300)]
        Path(f"books/{number}.txt").write_text("\n\n".join(lines))

    def call(*arguments: str) -> list[dict]:
        fixed = ["--books", "books", "--length", "256", "--rows", "2", "--out", "out.jsonl"]
        monkeypatch.setattr(sys, "argv", ["benchmarks.real.run", *arguments, *fixed])
        importlib.import_module("benchmarks.real.run").main()
        return [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]

    return call


def test_a_calibrated_policy_needs_its_calibration(study, monkeypatch):
    options = ("--tokens", "64", "--needles", "0")
    with pytest.raises(SystemExit, match="triattention needs --calibration FILE"):
        study("base", *options)
    script = importlib.import_module("benchmarks.real.calibrate")
    arguments = "base --data books --length 64 --rows 2 --out c"
    monkeypatch.setattr(sys, "argv", ["benchmarks.real.calibrate", *arguments.split()])
    script.main()
    calibration = read_calibration(Path("c"), open_model("base"))
    assert len(calibration.layers) == 2
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--rows", "0"])
        script.main()
    lines = study("base", "--policies", "whole", "triattention", "--calibration", "c", *options)
    whole, small = lines
    assert small["policy"] == "triattention" and small["peak_nbytes"] < whole["peak_nbytes"] / 2
    assert small["nats"] != whole["nats"]


def test_times_of_every_way_stand_beside_each_other(study, monkeypatch):
    monkeypatch.setattr("benchmarks.real.speed.stock_model", open_model)
    model = open_model("adapter")
    write_budgets(Path("adapter/budgets.json"), MostHidden(tokens=(20, 40)), model, {})
    arguments = "base adapter --lengths 64 --share 2 --rounds 2 --decoded 3 --out speed.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmarks.real.speed", *arguments.split()])
    speed = importlib.import_module("benchmarks.real.speed")
    speed.main()
    lines = [json.loads(line) for line in Path("speed.jsonl").read_text().splitlines()]
    names = ["own", "whole", "whole", "tova", "by-layer", "by-layer"]
    assert [line["policy"] for line in lines] == names
    for line in lines:
        prompts, tokens = zip(*line["rounds"], strict=True)
        assert line["prompt_s"] == sum(prompts) / 2 and len(prompts) == 2  # the median of two
        assert line["token_ms"] == pytest.approx(1e3 * sum(tokens) / 2)
    words = ("base=streaming-llm,20,slack=4", "adapter=by-layer,18,int8")
    settings = (*words, "base=streaming-llm,20,static")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr("benchmarks.real.speed.stock_model", stock_model)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--settings", *settings])
    speed.main()
    lines = [json.loads(line) for line in Path("speed.jsonl").read_text().splitlines()]
    fields = [(x["model"], x["policy"], x["tokens"], x["cache_dtype"], x["slack"]) for x in lines]
    assert fields == [
        ("base", "own", 64, "auto", 0), ("base", "streaming-llm", 20, "auto", 4),
        ("adapter", "by-layer", 18, "int8", 0), ("base", "streaming-llm", 20, "auto", 0),
    ]  # fmt: skip
    assert [x["compiled"] for x in lines] == [False, False, False, True]
    assert [len(x["rounds"]) for x in lines] == [2] * 4
    assert [x["nbytes"] is None for x in lines] == [True, False, False, False]
    assert lines[2]["nbytes"] < lines[1]["nbytes"] < 2 * lines[1]["bf16_nbytes"]


def test_answers_are_judged_by_the_base_with_its_whole_cache(study, monkeypatch):
    written = []

    class Writer(LanguageModel):
        def write(self, prompts, room):
            written.append((self.eviction, self.chunk, room))
            return super().write(prompts, room)

    monkeypatch.setattr("benchmarks.real.answers.LanguageModel", Writer)
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = "Q: {{ messages[0].content }} A: "
    tokenizer.save_pretrained("base")
    options = "--policies most-hidden --tokens 20 --conversations 2 --words 30 40 --reply-tokens 8"
    arguments = f"base adapter --books books --out answers.jsonl {options}".split()
    for _ in range(2):  # the second time every setting is there
        monkeypatch.setattr(sys, "argv", ["benchmarks.real.answers", *arguments])
        importlib.import_module("benchmarks.real.answers").main()
    lines = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [(x["policy"], x["tokens"]) for x in lines] == [("whole", None), ("most-hidden", 20)]
    base = AutoModelForCausalLM.from_pretrained("base")
    whole, small = (line["answers"] for line in lines)
    assert written == [(False, 32, 8)] * 2 + [(MostHidden(20), 32, 8)] * 2
    for answer in (*whole, *small):
        chat = list(f"Q: {answer['question']} A: ".encode())
        ids = tokenizer(answer["reply"])["input_ids"]
        labels = torch.tensor([[-100] * len(chat) + ids])
        with torch.no_grad():
            expected = base(input_ids=torch.tensor([chat + ids]), labels=labels).loss.item()
        assert sum(answer["nats"]) / len(ids) == pytest.approx(expected, rel=1e-5)
    for words, message in (
        ("--reply-tokens 9", "lines with reply_tokens 8, and this run has 9"),
        ("--policies by-layer --out new.jsonl", "budgets.json cannot be read"),
    ):
        monkeypatch.setattr(sys, "argv", ["benchmarks.real.answers", *arguments, *words.split()])
        with pytest.raises(SystemExit, match=message):
            importlib.import_module("benchmarks.real.answers").main()
    assert not Path("new.jsonl").exists() and lines == [
        json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()
    ]


def test_kinds_of_tokens_are_counted_in_every_layer(study, monkeypatch):
    arguments = "adapter --books books --length 200 --tokens 40 --rows 2 --out kept.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmarks.real.kept", *arguments.split()])
    importlib.import_module("benchmarks.real.kept").main()
    lines = [json.loads(line) for line in Path("kept.jsonl").read_text().splitlines()]
    for layer in {line["layer"] for line in lines}:
        for group in ("kind", "age", "surprise"):
            own = [x for x in lines if (x["layer"], x["group"]) == (layer, group)]
            assert sum(x["total"] for x in own) == 2 * (200 - 12)
            assert sum(x["kept"] for x in own) == 2 * (40 - 1 - 12)  # and the protected ones
    with pytest.raises(SystemExit):
        importlib.import_module("benchmarks.real.kept").main()


KINDS = {
    " Ahab": "name", " the": "function word", ",": "punctuation", "\n\n": "line break",
    " 1851": "number", "ing": "word's end", " whale": "other word", "The": "function word",
}  # fmt: skip


@pytest.mark.parametrize("word", KINDS)
def test_the_kind_of_a_token(word):
    assert importlib.import_module("benchmarks.real.kept").kind_of(word) == KINDS[word]


def test_batches_stand_beside_as_many_requests_and_as_many_bytes(study, monkeypatch):
    ranked = beside(stock_model("base"))
    heedful.save_adapter(ranked, "ranked", base="base")
    policy = MostHidden(tokens=(30,) * ranked.config.num_hidden_layers)
    write_budgets(Path("ranked/budgets.json"), policy, ranked, {})
    arguments = "base ranked --length 128 --tokens 32 --slack 4 --requests 1 3 --rounds 2"
    arguments += " --decoded 6 --chunk 32 --out batches.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmarks.real.batches", *arguments.split()])
    importlib.import_module("benchmarks.real.batches").main()
    lines = [json.loads(line) for line in Path("batches.jsonl").read_text().splitlines()]
    config = stock_model("base").config
    per_token = 2 * config.num_hidden_layers * config.hidden_size * 4  # all heads have keys
    per_token = per_token * config.num_key_value_heads // config.num_attention_heads
    for count in (1, 3):
        own, *small = [x for x in lines if x["beside"] == count]
        assert (own["policy"], own["requests"]) == ("own", count)
        assert own["nbytes"] == count * 128 * per_token
        for policy in ("streaming-llm", "by-layer"):
            alike, many = [x for x in small if x["policy"] == policy]
            assert alike["requests"] == count < many["requests"]
            one = alike["nbytes"] / count
            assert many["nbytes"] <= own["nbytes"] < many["nbytes"] + 1.01 * one
    for x in lines:
        assert x["tokens_per_second"] == pytest.approx(x["requests"] / x["step_ms"] * 1e3)
        assert len(x["rounds"]) == 2


def test_each_setting_is_scored_once_against_the_whole_cache(study):
    options = ("--tokens", "64", "--needles", "1")
    lines = study("base", "--policies", "whole", "streaming-llm", *options)
    assert [(x["policy"], x["tokens"]) for x in lines] == [("whole", 256), ("streaming-llm", 64)]
    whole, small = lines
    assert small["peak_nbytes"] < whole["peak_nbytes"] / 2 - 1
    assert whole["needles"].keys() == {"0.1", "0.5", "0.9"}
    text = Path("books/0.txt").read_text()[4000:]
    ids = torch.tensor([list(text.encode()[:256])])
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained("base")
        expected = base(input_ids=ids, labels=ids).loss.item()
    assert whole["nats"][0] == pytest.approx(expected, rel=1e-5)
    assert whole["perplexity"] == pytest.approx(math.exp(sum(whole["nats"]) / 2))
    assert small["nats"] != whole["nats"]
    again = study("adapter", *options, "--policies", "whole", "streaming-llm", "most-hidden")
    assert again[:2] == lines
    assert [(x["model"], x["policy"]) for x in again[2:]] == [
        ("adapter", "whole"),
        ("adapter", "streaming-llm"),
        ("adapter", "most-hidden"),
    ]


def test_several_numbers_in_a_text_are_another_setting(study):
    options = ("--tokens", "64", "--needles", "2", "--policies", "whole", "streaming-llm")
    study("base", *options)
    lines = study("base", *options, "--numbers", "2")
    assert [x["numbers"] for x in lines] == [1, 1, 2, 2]
    for line in lines:
        assert all(len(hits) == 2 for hits in line["hits"].values())
        assert line["needles"] == {x: sum(hits) / 2 for x, hits in line["hits"].items()}
    with pytest.raises(SystemExit, match="with 2 for --needles, and this is 3: choose another"):
        study("base", *options, "--needles", "3")
    Path("books/1.txt").unlink()
    with pytest.raises(SystemExit, match="with 2 for books, and this is 1"):
        study("base", *options)
    assert len(Path("out.jsonl").read_text().splitlines()) == 4


def test_several_evaluations_are_one(tmp_path, monkeypatch, capsys):
    """Differences are from the first folder's model, sample by sample."""
    monkeypatch.chdir(tmp_path)
    answers = {"first": {("stock", ""): "110000"}, "second": {("other", "own"): "111010"}}
    for folder, models in answers.items():
        Path(folder).mkdir()
        about = {"lm_eval": {}, "environment": {"command": folder}}
        Path(folder, "evaluation.json").write_text(json.dumps(about))
        samples = [
            Sample(model, cache, "lm-eval:piqa", str(n), "", {}, {"acc": int(right)})
            for (model, cache), rights in models.items() for n, right in enumerate(rights)
        ]  # fmt: skip
        lines = "".join(f"{x.to_json()}\n" for x in samples)
        Path(folder, "samples.jsonl").write_text(lines)
    monkeypatch.setattr(sys, "argv", ["evaluated", "first", "second", "--out", "out.jsonl"])
    Path("first/report.html").touch()
    with pytest.raises(SystemExit):  # the second has not ended
        importlib.import_module("benchmarks.real.evaluated").main()
    assert "second is not the --out of a finished heedful eval" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
    Path("second/report.html").touch()
    importlib.import_module("benchmarks.real.evaluated").main()
    stock, other = (json.loads(line) for line in Path("out.jsonl").read_text().splitlines())
    assert (stock["model"], stock["cache"], stock["value"][0]) == ("stock", "", 2 / 6)
    assert (other["model"], other["cache"], other["value"][0]) == ("other", "own", 4 / 6)
    assert other["difference"][0] == pytest.approx(2 / 6) and stock["difference"] is None
    assert [x["environment"]["command"] for x in (stock, other)] == ["first", "second"]
    monkeypatch.setattr(sys, "argv", ["evaluated", "first", "first", "--out", "twice.jsonl"])
    with pytest.raises(SystemExit, match="first has the answer of stock with cache 'whole'"):
        importlib.import_module("benchmarks.real.evaluated").main()
    assert not Path("twice.jsonl").exists()
