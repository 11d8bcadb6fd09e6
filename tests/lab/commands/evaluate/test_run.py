"""`heedful eval`: which items, what is kept, what is refused; and lm-evaluation-harness."""

import json
import math
import re

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

import heedful
from heedful.data import ByteTokenizer
from heedful_lab.cli import main
from heedful_lab.commands import models
from heedful_lab.commands.compare.scoring import score
from heedful_lab.commands.compare.scratch import Hyperparameters, Size, from_scratch
from heedful_lab.commands.evaluate import run as runner
from heedful_lab.commands.evaluate.answers import LanguageModel, Likelihood
from heedful_lab.commands.evaluate.items import by_position, encoded
from heedful_lab.commands.evaluate.numbers import summed_up
from heedful_lab.commands.evaluate.options import ROWS, Evaluation
from heedful_lab.commands.evaluate.run import ask, evaluate, prepare
from heedful_lab.commands.evaluate.store import AnswerStore
from heedful_lab.commands.models import open_model
from heedful_lab.records import Sample, read
from heedful_lab.tasks import TASKS
from helpers.command_line import status_of
from helpers.evaluations import BOOK, evaluation_of
from helpers.small_models import small, tokenizer_of_words

NEEDLES = {
    "tasks": ("needles",), "lengths": (420,), "depths": (0.0, 1.0), "needles": (1, 2), "samples": 3,
}  # fmt: skip


class Oracle:
    """Knows the answers to needles and first-kind stories from the prompt, and every next token."""

    def __init__(self) -> None:
        self.count = 0

    def write(self, prompts, room):
        self.count += len(prompts)
        return [self._answer(bytes(x).decode()) for x in prompts]

    def _answer(self, prompt: str) -> str:
        if "magic" in prompt:
            numbers = dict(re.findall(r"number of (\w+) is (\d+)\.", prompt))
            question = prompt.split("Question:")[1].split("\n")[0]
            cities = [x for x in re.findall(r"\w+", question) if x in numbers]
            return " " + " and ".join(numbers[x] for x in cities) + "."
        context, question = prompt.split("<context>")[-1].split("</context>")
        person = re.search(r"Where is (\w+)\?", question)[1]
        return re.findall(rf"{person} [a-z ]+ to the (\w+)\.", context)[-1]

    def read(self, rows):
        self.count += len(rows)
        return [Likelihood(torch.zeros(len(x) - 1), torch.tensor(x[1:])) for x in rows]


def test_an_oracle_is_right_everywhere(tmp_path):
    evaluation = evaluation_of(
        tmp_path, tasks=("needles", "babilong", "lambada", "perplexity"), lengths=(0, 900),
        needles=(1, 3), queries=2, kinds=(1,), tokenizer="bytes", length=64,
    )  # fmt: skip
    (plan,) = prepare(evaluation)
    oracle = Oracle()
    store = AnswerStore(tmp_path, vars(evaluation))
    store.about["models"]["plain"] = {"caches": {"": {}}}
    samples = ask(oracle, plan, "", store, 4)
    assert len(samples) == oracle.count == 2 * 3 * 2 + 2 * 2 + 2 + 2
    assert all(x.values["right"] == 1 for x in samples if x.task != "perplexity")
    for line in summed_up(samples):
        assert (
            line.estimate.value
            == {"accuracy": 1, "perplexity": 1, "bits per byte": 0}[line.measure.name]
        )
    assert {x.cell["needles"] for x in samples if x.task == "needles"} == {1, 3}
    for x in samples:
        if x.task == "needles":
            assert len(x.expected.split(", ")) == min(2, x.cell["needles"])


def test_a_model_that_knows_nothing(tmp_path):
    """Uniform over 260 tokens, so a perplexity of 260, log2(260) bits per byte, and no answer."""
    model = small(positions=1024)
    model.lm_head.weight.data.zero_()
    model.save_pretrained(tmp_path / "uniform")
    result = evaluate(
        evaluation_of(
            tmp_path, str(tmp_path / "uniform"), tokenizer="bytes", length=100, stride=30,
            **NEEDLES | {"tasks": ("needles", "lambada", "perplexity"), "samples": 5},
        )
    )  # fmt: skip
    values = {(x.task, x.measure.name): x.estimate.value for x in summed_up(result.samples)}
    assert values["perplexity, book", "perplexity"] == pytest.approx(260, rel=1e-5)
    assert values["perplexity, book", "bits per byte"] == pytest.approx(math.log2(260))
    word = {len(x.expected) for x in result.samples if x.task == "lambada"}
    assert word == {len(" garden")} or word == {len(" before")}
    assert values["lambada", "perplexity"] == pytest.approx(260 ** min(word), rel=1e-4)
    assert values["lambada", "accuracy"] == values["needles", "accuracy"] == 0


def test_perplexity_is_that_of_the_model(tmp_path, folder):
    evaluation = evaluation_of(tmp_path, tasks=("perplexity",), length=48, stride=16, samples=3)
    samples = evaluate(evaluation).samples
    model = open_model("plain")
    ids = tokenizer_of_words().encode(BOOK)
    assert ids[0] == 256  # BOS, which has no bytes
    for number, x in enumerate(samples):
        start = 1 + 16 * number
        row = torch.tensor([[256, *ids[start : start + 47]]])
        first = 48 - 16 if number else 1
        with torch.no_grad():
            losses = -model(row).logits.double().log_softmax(-1)[0, :-1]
        nats = losses.gather(1, row[0, 1:, None])[:, 0]
        assert x.values["nats"] == pytest.approx(nats[first - 1 :].sum().item(), rel=1e-5)
        assert (x.values["tokens"], x.values["bytes"]) == (48 - first, 48 - first)
        assert x.curve["tokens"] == [1, 2, 4, 8, 16, 16]
        assert x.curve["nats"][2] == pytest.approx(nats[3:7].sum().item(), rel=1e-5)


def test_positions_are_counted_from_one():
    assert by_position([1.0] * 5) == {"nats": [1.0, 2.0, 2.0], "tokens": [1, 2, 2]}


def test_tokens_end_where_their_bytes_end():
    text = "a é – b"
    ids, ends = encoded(tokenizer_of_words(), text)
    assert ids[0] == 256 and ends[0] == 0 and ends[-1] == len(text.encode())
    assert ends == sorted(ends)
    assert encoded(ByteTokenizer(), text) == (list(text.encode()), [*range(1, 11)])


def test_a_batch_is_its_rows(tmp_path):
    """Ragged prompts padded on the left, other sequences on the right; budgets too."""
    lines = [
        "the red bus and the red bus",
        "a car, a red car and one more red car",
        "a bus in a bus",
    ]
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    options = NEEDLES | {"tasks": ("needles", "lambada"), "lambada": str(tmp_path / "lines.txt")}
    options |= {"lengths": (260,), "needles": (1,), "budget": ("30", "own")}
    singles = evaluate(evaluation_of(tmp_path / "1", "selective", batch=1, **options)).samples
    many = evaluate(evaluation_of(tmp_path / "2", "selective", batch=8, **options)).samples
    assert [x.cache for x in singles[:: len(singles) // 3]] == ["", "most-hidden 30", "own"]
    for a, b in zip(singles, many, strict=True):
        assert (a.key, a.reply, a.digest) == (b.key, b.reply, b.digest)
        assert a.values == pytest.approx(b.values, rel=1e-4)
    (plan,) = prepare(evaluation_of(tmp_path, "selective", **options))
    for task in ("needles", "lambada"):
        assert len({len(x.ids) for x in plan.items if x.task == task}) > 1


def test_quantized_caches_are_evaluated_beside_the_whole_one(tmp_path):
    options = NEEDLES | {"tasks": ("needles", "perplexity"), "length": 64, "budget": ("20",)}
    quantized = evaluate(evaluation_of(tmp_path / "8", cache_dtype="int8", **options)).samples
    plain = evaluate(evaluation_of(tmp_path / "32", **options)).samples

    def of(samples, cache):
        return [x for x in samples if x.cache == cache]

    assert of(quantized, "") == of(plain, "")
    assert {x.cache for x in quantized} == {"", "int8", "streaming-llm 20, int8"}
    for name, exact in (("int8", ""), ("streaming-llm 20, int8", "streaming-llm 20")):
        for a, b in zip(of(quantized, name), of(plain, exact), strict=True):
            assert a.key == b.key
            if a.task == "perplexity":
                assert 0 < abs(a.values["nats"] - b.values["nats"]) < 0.02 * b.values["nats"]


def test_a_budget_that_holds_everything_changes_nothing(tmp_path):
    options = NEEDLES | {"tasks": ("needles", "perplexity"), "length": 64}
    samples = evaluate(evaluation_of(tmp_path, budget=("1024", "20"), **options)).samples
    whole, full, small_cache = (
        [x for x in samples if x.cache == cache]
        for cache in ("", "streaming-llm 1024", "streaming-llm 20")
    )
    assert [x.reply for x in whole] == [x.reply for x in full]
    for a, b, c in zip(whole, full, small_cache, strict=True):
        assert a.values == pytest.approx(b.values, rel=1e-5)
        if a.task == "perplexity":
            assert abs(a.values["nats"] - c.values["nats"]) > 1e-3
    assert [x.reply for x in whole] != [x.reply for x in small_cache]


def test_what_was_stopped_goes_on(tmp_path, monkeypatch):
    options = NEEDLES | {"tasks": ("needles", "perplexity"), "length": 32, "batch": 2}
    whole = evaluate(evaluation_of(tmp_path / "whole", "plain", "selective", **options)).samples
    evaluation = evaluation_of(tmp_path, "plain", "selective", **options)
    calls, write = [], LanguageModel.write

    def stops(self, prompts, room):
        calls.append(len(prompts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return write(self, prompts, room)

    monkeypatch.setattr(LanguageModel, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        evaluate(evaluation)
    path = tmp_path / "run" / "samples.jsonl"
    assert len(read(path, Sample)) == 8  # with the batch of each task that comes first
    path.write_bytes(path.read_bytes()[:-20])  # killed while it wrote
    calls[:] = [0] * 4
    with pytest.warns(UserWarning, match="cut off"):
        again = evaluate(evaluation).samples
    assert sum(calls) == 2 * 12 - 5
    for a, b in zip(again, whole, strict=True):
        assert a.reply == b.reply and a.values == pytest.approx(b.values, rel=1e-4)
    assert len(read(path, Sample)) == len(whole)
    calls.clear()
    assert evaluate(evaluation).samples == again and not calls


def test_the_time_is_estimated_after_a_batch_of_each_kind(tmp_path, monkeypatch):
    """A second for a token that is read, and none for one that is written."""
    clock, words, read = [0.0], [], []

    def reads(self, rows):
        read.append(len(rows))
        clock[0] += sum(map(len, rows))
        return [Likelihood(torch.zeros(len(x) - 1), torch.tensor(x[1:])) for x in rows]

    monkeypatch.setattr(LanguageModel, "read", reads)
    monkeypatch.setattr(runner.time, "perf_counter", lambda: clock[0])
    options = {"tasks": ("perplexity",), "length": 32, "batch": 3, "samples": 9}
    evaluation = evaluation_of(tmp_path, "plain", "selective", **options)
    evaluate(evaluation, words.append)
    assert read == [3] * 6
    assert words == [
        "18 samples: 9 of perplexity, for 2 models with 1 cache; --samples N changes how many\n"
        "device: cpu",
        f"They take about {(2 * 6 * 32) / 60:.0f} minutes from now on if all models are as fast as "
        "the first",
    ]
    evaluate(evaluation, words.append)
    assert len(words) == 3 and len(read) == 6


def test_more_of_the_same_asks_only_what_is_new(tmp_path, monkeypatch):
    """More samples, lengths, kinds, domains: what was answered stands, whatever stands beside."""
    options = NEEDLES | {"tasks": ("needles", "babilong", "lambada", "perplexity")}
    options |= {"lengths": (0, 700), "kinds": (4,), "length": 32}
    before = evaluate(evaluation_of(tmp_path, **options)).samples
    counts, write, read = [], LanguageModel.write, LanguageModel.read
    monkeypatch.setattr(LanguageModel, "write", lambda *x: counts.append(len(x[1])) or write(*x))
    monkeypatch.setattr(LanguageModel, "read", lambda *x: counts.append(len(x[1])) or read(*x))
    more = {"lengths": (0, 700, 800), "kinds": (1, 4), "needles": (1, 2, 3), "samples": 4}
    after = evaluate(evaluation_of(tmp_path, **options | more)).samples
    assert sum(counts) == len(after) - len(before)
    by_key = {(x.task, x.key): x for x in after}
    assert all(by_key[x.task, x.key] == x for x in before)


def test_a_folder_is_of_one_evaluation(tmp_path, folder):
    evaluate(evaluation_of(tmp_path, **NEEDLES))
    before = (tmp_path / "run" / "samples.jsonl").read_bytes()
    evaluate(evaluation_of(tmp_path, "selective", **NEEDLES))  # more models, and fewer
    assert (tmp_path / "run" / "samples.jsonl").read_bytes().startswith(before)
    with pytest.raises(ValueError, match="holds an answer of 'plain' to another needles"):
        evaluate(evaluation_of(tmp_path, seed=1, **NEEDLES))
    about = tmp_path / "run" / "evaluation.json"
    content = json.loads(about.read_text())
    assert content["models"].keys() == {"plain", "selective"} and content["environment"]["date"]
    content["models"]["plain"]["weights"] = "0"
    about.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"knows another model by the name 'plain' \(weights"):
        evaluate(evaluation_of(tmp_path, **NEEDLES))
    about.write_text("{")
    with pytest.raises(ValueError, match=r"evaluation\.json is damaged"):
        evaluate(evaluation_of(tmp_path, **NEEDLES))
    about.unlink()
    path = tmp_path / "run" / "samples.jsonl"
    path.write_bytes(b"nonsense\n" + before)
    with pytest.raises(ValueError, match=r"samples\.jsonl, line 1: not a sample"):
        evaluate(evaluation_of(tmp_path, **NEEDLES))
    assert path.read_bytes() == b"nonsense\n" + before  # nothing is lost
    evaluate(evaluation_of(tmp_path, restart=True, **NEEDLES))
    assert len(read(path, Sample)) == 12


@pytest.mark.parametrize("name", ["recall", "copy"])
def test_rows_are_scored_as_compare_scores_them(tmp_path, name):
    task = TASKS[name].default()
    model = from_scratch(task, heedful.Selective(), Size(16, 1, 2), 0)
    model.save_pretrained(tmp_path / "model")
    evaluation = Evaluation(
        (str(tmp_path / "model"),), tasks=(name,), out=str(tmp_path / "run"), samples=6
    )
    values = {x.task: x.estimate.value for x in summed_up(evaluate(evaluation).samples)}
    assert values.keys() == {f"{name}, {split}" for split in task.evaluations()}
    for split, other in task.evaluations().items():
        expected = score(model, other, Hyperparameters(held_out=6))[other.metric]
        assert values[f"{name}, {split}"] == pytest.approx(expected)


def test_every_task_of_rows_is_offered():
    unpaired = {name for name, task in TASKS.items() if not task.paired and name != "text"}
    assert set(ROWS) == unpaired


def test_what_does_not_fit_is_refused_before_a_model_is_opened(tmp_path, monkeypatch):
    def opens(*args, **options):
        raise AssertionError("a model was opened")

    monkeypatch.setattr(models, "open_model", opens)
    BertForMaskedLM(
        BertConfig(vocab_size=260, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=16)
    ).save_pretrained(tmp_path / "bert")  # fmt: skip
    for options, message in (
        ({"lengths": (1100,)}, r"for 1024 tokens, and needles asks for 1\d+ and up to 20"),
        ({"tasks": ("babilong",), "lengths": (100,)}, "length 100 is too short for a question"),
        ({"tasks": ("copy",)}, "task 'copy' has .* tokens and model 'plain' has 260"),
        ({"tasks": ("lambada",), "lambada": "gone.txt"}, "does not exist"),
        ({"tasks": ("babilong",), "babi": "gone"}, "babi 'gone' cannot be read"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            evaluate(evaluation_of(tmp_path, **{"lengths": (420,)} | options))
    with pytest.raises(ValueError, match=r"is a Bert, which is not a causal language model"):
        evaluate(evaluation_of(tmp_path, str(tmp_path / "bert"), tokenizer="bytes"))
    with pytest.raises(ValueError, match=r"model '\./gone/away' has no configuration"):
        evaluate(evaluation_of(tmp_path, "./gone/away"))
    assert not (tmp_path / "run").exists()


def test_a_policy_that_cannot_be_leaves_no_folder(tmp_path):
    """Known once a model is open."""
    with pytest.raises(ValueError, match="tokens must be whole numbers of at least"):
        evaluate(evaluation_of(tmp_path, budget=("8",), **NEEDLES))
    assert not (tmp_path / "run").exists()


def test_own_budgets_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"no budgets\.json stands beside 'plain'"):
        prepare(evaluation_of(tmp_path, budget=("own",), **NEEDLES))
    model = small(positions=1024)
    heedful.convert(model, heedful.MultiToken(conv_every=1))
    model.save_pretrained(tmp_path / "mta")
    options = NEEDLES | {"budget": ("50",), "tokenizer": "bytes"}
    with pytest.raises(ValueError, match="mta': eviction: StreamingLLM does not support Multi"):
        evaluate(evaluation_of(tmp_path, str(tmp_path / "mta"), **options))
    assert not (tmp_path / "run" / "samples.jsonl").exists()  # refused before any item


def test_a_broken_model_is_named(tmp_path):
    model = small(positions=1024)
    model.lm_head.weight.data.fill_(float("nan"))
    model.save_pretrained(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"broken': .* its own outputs are not finite"):
        evaluate(evaluation_of(tmp_path, str(tmp_path / "broken"), tasks=("perplexity",), length=32,
                       tokenizer="bytes"))  # fmt: skip


def test_the_command(tmp_path, capsys, folder):
    words = [
        "eval", "plain", "selective", "--tasks", "needles", "perplexity", "--samples", "5",
        "--lengths", "420", "--depths", "0", "1", "--needles", "1", "--haystack", "book.txt",
        "--data", "book.txt", "--length", "32", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    assert status_of(*words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^needles +accuracy +plain +0\.0 % +\(0\.0 to 27\.8\) +10$", printed, re.M)
    assert re.search(r"^perplexity.* selective .*[+-]\d+\.\d+\*? +\([+-]", printed, re.M)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Needles: depth and length" in page and "Perplexity by position" in page
    for more, message in (
        (["--tasks", "needels"], "did you mean 'needles'?"),
        (["--seed", "1"], "choose another --out, or add --restart"),
    ):
        assert status_of(*words, *more) == 1
        assert message in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(tmp_path, capsys, monkeypatch):
    def stops(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(LanguageModel, "read", stops)
    with pytest.raises(SystemExit) as stop:
        main(["eval", "plain", "--tasks", "perplexity", "--data", "book.txt", "--length", "32",
              "--out", str(tmp_path / "run")])  # fmt: skip
    assert stop.value.code == 130
    error = capsys.readouterr().err
    assert f"stopped: the answers so far are kept in {tmp_path / 'run'}" in error
