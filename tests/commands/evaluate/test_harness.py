"""lm-evaluation-harness on our models, and our tasks in its own command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import heedful
from heedful_lab.commands.evaluate import run as runner
from heedful_lab.commands.evaluate.harness import HarnessResult
from heedful_lab.commands.evaluate.numbers import summed_up
from heedful_lab.commands.evaluate.options import Evaluation
from heedful_lab.commands.evaluate.run import evaluate, export
from heedful_lab.commands.models import open_model
from heedful_lab.records import Sample
from helpers.evaluations import evaluation_of
from helpers.small_models import small, tokenizer_of_words


@pytest.fixture(scope="module")
def ended(folder) -> Path:
    """A model whose tokenizer has an end and padding, as the harness wants it."""
    tokenizer = tokenizer_of_words()
    tokenizer.eos_token = tokenizer.pad_token = "<bot>"
    small(positions=1024, seed=2).save_pretrained(folder / "ended")
    tokenizer.save_pretrained(folder / "ended")
    return folder / "ended"


@pytest.fixture(scope="module")
def exported(folder, ended, tmp_path_factory) -> Path:
    """Our tasks as task files."""
    tasks = tmp_path_factory.mktemp("tasks")
    evaluation = Evaluation(
        (str(ended),), ("needles", "babilong", "lambada"), lengths=(700,), depths=(0.5,), samples=3,
        needles=(2,), kinds=(4,), haystack=(str(folder / "book.txt"),), export_lm_eval=str(tasks),
        data=(str(folder / "book.txt"),),
    )  # fmt: skip
    assert export(evaluation) == ["heedful_needles", "heedful_babilong", "heedful_lambada"]
    return tasks


def test_our_tasks_are_graded_alike_by_the_harness(tmp_path, ended, exported):
    """The same replies and likelihoods, hence the same numbers, on both ways."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = ["heedful_needles", "heedful_babilong", "heedful_lambada"]
    evaluation = evaluation_of(
        tmp_path, str(ended),
        tasks=("needles", "babilong", "lambada", "lm-eval:" + ",".join(names)),
        lengths=(700,), depths=(0.5,), samples=3, needles=(2,), kinds=(4,),
        lm_eval_tasks=(str(exported),),
    )  # fmt: skip
    result = evaluate(evaluation)
    by_harness = result.harness[str(ended)]
    ours = {(x.task, x.measure.name): x.estimate.value for x in summed_up(result.samples)}
    for name in ("needles", "babilong", "lambada"):
        assert by_harness[f"heedful_{name}"]["acc"] == ours[name, "accuracy"]
        assert by_harness[f"heedful_{name}"]["samples"] == 3
    expected = ours["lambada", "perplexity"]
    assert by_harness["heedful_lambada"]["perplexity"] == pytest.approx(expected, rel=1e-4)

    manager = TaskManager(include_path=str(exported), include_defaults=False)
    lm = HFLM(pretrained=open_model(str(ended)), tokenizer=str(ended), max_length=1024)
    direct = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, log_samples=True)
    for name in names:
        assert direct["results"][name]["acc,none"] == by_harness[name]["acc"]
    replies = [x["filtered_resps"][0] for x in direct["samples"]["heedful_needles"]]
    assert replies == [x.reply for x in result.samples if x.task == "needles"]


@pytest.mark.slow
def test_the_command_line_of_the_harness_runs_our_tasks(tmp_path, folder, exported):
    """In a process of its own, by the shim of a converted folder."""
    model = small(positions=1024, seed=2)
    heedful.convert(model, "talking-heads")
    model.save_pretrained(tmp_path / "converted")
    tokenizer = tokenizer_of_words()
    tokenizer.eos_token = tokenizer.pad_token = "<bot>"
    tokenizer.save_pretrained(tmp_path / "converted")
    arguments = f"pretrained={tmp_path / 'converted'},trust_remote_code=True"
    words = ["--model", "hf", "--model_args", arguments]
    words += ["--include_path", str(exported), "--tasks", "heedful_needles,heedful_lambada"]
    process = subprocess.run(
        [sys.executable, "-m", "lm_eval", *words, "--output_path", str(tmp_path / "out")],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    (results_file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(results_file.read_text())["results"]
    assert results["heedful_needles"]["acc,none"] == 0
    assert results["heedful_lambada"]["perplexity,none"] > 1


def test_the_exported_grading_knows_right_from_wrong(exported, monkeypatch):
    monkeypatch.syspath_prepend(exported)
    import heedful_grading

    for name in ("needles", "babilong"):
        lines = (exported / f"heedful_{name}.jsonl").read_text().splitlines()
        grade = getattr(heedful_grading, name)
        for doc in map(json.loads, lines):
            assert grade(doc, [f" {doc['answers'][0]}."]) == {"acc": 1.0}
            assert grade(doc, [" no"]) == {"acc": 0.0}


def test_what_the_harness_has_graded_is_kept(tmp_path, exported, monkeypatch):
    """For each cache; its own caches are whole, also where budgets are the model's own."""
    policies, caches = [], []

    def run_task(options, task, model, tokenizer):
        policies.append(model._heedful.eviction)
        caches.append(task.cache)
        name = f"lm-eval:{task.name}"
        sample = Sample(task.model, task.cache, name, "0", "", {}, {"acc": 1.0})
        return HarnessResult({task.name: {"acc": 0.5}}, [sample])

    monkeypatch.setattr(runner, "run_task", run_task)
    tasks = ("lm-eval:heedful_needles,heedful_babilong", "lm-eval:heedful_lambada")
    options = {"tasks": tasks, "lm_eval_tasks": (str(exported),), "budget": ("own",)}
    for _ in range(2):
        result = evaluate(evaluation_of(tmp_path, "selective", **options))
        assert list(result.harness["selective"]) == [
            "heedful_needles", "heedful_babilong", "heedful_lambada",
        ]  # fmt: skip
        assert [x.values for x in result.samples] == [{"acc": 1.0}] * 6
    assert policies == [None] * 6 and caches == [""] * 3 + ["own"] * 3
    evaluate(evaluation_of(tmp_path, "selective", **options | {"samples": 3}))
    assert len(policies) == 12


def test_the_harness_reads_under_a_budget_as_we_do(tmp_path, ended, exported):
    options = {"lm_eval_tasks": (str(exported),), "samples": 3, "budget": ("13",)}
    tasks, words = ("lambada", "lm-eval:heedful_lambada"), []
    result = evaluate(evaluation_of(tmp_path, str(ended), tasks=tasks, **options), words.append)
    assert words == [
        "6 samples: 3 of lambada and at most 3 of lm-evaluation-harness's heedful_lambada, for 1 "
        "model with 2 caches; --samples N changes how many\ndevice: cpu"
    ]  # and no time, as a batch holds all
    nats = {}
    for x in result.samples:
        nats.setdefault((x.task, x.cache), []).append(x.values["nats"])
    whole, small_cache = nats["lambada", ""], nats["lambada", "streaming-llm 13"]
    assert nats["lm-eval:heedful_lambada", ""] == pytest.approx(whole, rel=1e-4)
    assert nats["lm-eval:heedful_lambada", "streaming-llm 13"] == pytest.approx(
        small_cache, rel=1e-4
    )
    assert all(abs(a - b) > 1e-3 for a, b in zip(whole, small_cache, strict=True))
    with pytest.raises(ValueError, match="generate text run with the full cache alone, not with"):
        evaluate(
            evaluation_of(tmp_path / "2", str(ended), tasks=("lm-eval:heedful_needles",), **options)
        )


def test_the_harness_refuses_what_it_would_cut(tmp_path, ended, exported):
    small(positions=128, seed=2).save_pretrained(tmp_path / "short")
    tokenizer = tokenizer_of_words()
    tokenizer.eos_token = tokenizer.pad_token = "<bot>"
    tokenizer.save_pretrained(tmp_path / "short")
    for name in ("heedful_needles", "heedful_lambada"):
        evaluation = evaluation_of(
            tmp_path, str(tmp_path / "short"), tasks=(f"lm-eval:{name}",),
            lm_eval_tasks=(str(exported),),
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"positions for 128 .*it would be cut on the left"):
            evaluate(evaluation)
    with pytest.raises(
        ValueError, match="no task 'heedful_needle'; did you mean 'heedful_needles'"
    ):
        evaluate(
            evaluation_of(
                tmp_path, tasks=("lm-eval:heedful_needle",), lm_eval_tasks=(str(exported),)
            )
        )
    with pytest.raises(ValueError, match="needs a tokenizer of transformers"):
        evaluate(
            evaluation_of(
                tmp_path, str(ended), tasks=("lm-eval:heedful_needles",), tokenizer="bytes",
                lm_eval_tasks=(str(exported),),
            )
        )  # fmt: skip
