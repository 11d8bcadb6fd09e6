"""lm-evaluation-harness on our models."""

import json
from pathlib import Path
from string import Template

import pytest

from heedful.files import write_lines
from heedful_lab.commands.evaluate import run as runner
from heedful_lab.commands.evaluate.harness import HarnessResult
from heedful_lab.commands.evaluate.numbers import summed_up
from heedful_lab.commands.evaluate.run import evaluate
from heedful_lab.records import Sample
from heedful_lab.tasks.last_words import last_words, passages_of
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


TASK = Template("""task: $name
dataset_path: json
dataset_kwargs: {data_files: {test: $file}}
test_split: test
doc_to_text: "{{context}}"
doc_to_target: "{{word}}"
target_delimiter: ""
metadata: {version: 1.0}
""")
KINDS = {
    "words_read": """output_type: loglikelihood
metric_list:
- {metric: perplexity, aggregation: perplexity, higher_is_better: false}
- {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "words_written": """output_type: generate_until
generation_kwargs: {until: [], max_gen_toks: 20, do_sample: false}
metric_list:
- {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


@pytest.fixture(scope="module")
def task_folder(folder, tmp_path_factory) -> Path:
    """Last words as a task of the harness, and a task that writes."""
    tasks = tmp_path_factory.mktemp("tasks")
    passages = last_words(passages_of((str(folder / "book.txt"),), 3, 0), 3)
    file = tasks / "words.jsonl"
    write_lines(file, ({"context": x.context, "word": x.word} for x in passages))
    for name, kind in KINDS.items():
        about = TASK.substitute(name=name, file=json.dumps(str(file)))
        (tasks / f"{name}.yaml").write_text(about + kind)
    return tasks


def test_last_words_are_graded_alike_by_the_harness(tmp_path, ended, task_folder):
    """The same likelihoods, hence the same numbers, on both ways."""
    tasks = ("lambada", "lm-eval:words_read")
    result = evaluate(
        evaluation_of(
            tmp_path, str(ended), tasks=tasks, samples=3, lm_eval_tasks=(str(task_folder),)
        )
    )
    by_harness = result.harness[str(ended)]["words_read"]
    ours = {(x.task, x.measure.name): x.estimate.value for x in summed_up(result.samples)}
    assert by_harness["acc"] == ours["lambada", "accuracy"] and by_harness["samples"] == 3
    assert by_harness["perplexity"] == pytest.approx(ours["lambada", "perplexity"], rel=1e-4)


def test_what_the_harness_has_graded_is_kept(tmp_path, task_folder, monkeypatch):
    """For each cache; its own caches are whole, also where budgets are the model's own."""
    policies, caches = [], []

    def run_task(options, task, model, tokenizer):
        policies.append(model._heedful.eviction)
        caches.append(task.cache)
        name = f"lm-eval:{task.name}"
        sample = Sample(task.model, task.cache, name, "0", "", {}, {"acc": 1.0})
        return HarnessResult({task.name: {"acc": 0.5}}, [sample])

    monkeypatch.setattr(runner, "run_task", run_task)
    tasks = ("lm-eval:words_read,words_written",)
    options = {"tasks": tasks, "lm_eval_tasks": (str(task_folder),), "budget": ("own",)}
    for _ in range(2):
        result = evaluate(evaluation_of(tmp_path, "selective", **options))
        assert list(result.harness["selective"]) == ["words_read", "words_written"]
        assert [x.values for x in result.samples] == [{"acc": 1.0}] * 4
    assert policies == [None] * 4 and caches == [""] * 2 + ["own"] * 2
    evaluate(evaluation_of(tmp_path, "selective", **options | {"samples": 3}))
    assert len(policies) == 8


@pytest.mark.slow
def test_the_harness_reads_under_a_budget_as_we_do(tmp_path, ended, task_folder):
    options = {"lm_eval_tasks": (str(task_folder),), "samples": 3, "budget": ("13",)}
    tasks, words = ("lambada", "lm-eval:words_read"), []
    result = evaluate(evaluation_of(tmp_path, str(ended), tasks=tasks, **options), words.append)
    assert words == [
        "6 samples: 3 of lambada and at most 3 of lm-evaluation-harness's words_read, for 1 "
        "model with 2 caches; --samples N changes how many\ndevice: cpu"
    ]  # and no time, as a batch holds all
    nats = {}
    for x in result.samples:
        nats.setdefault((x.task, x.cache), []).append(x.values["nats"])
    whole, small_cache = nats["lambada", ""], nats["lambada", "streaming-llm 13"]
    assert nats["lm-eval:words_read", ""] == pytest.approx(whole, rel=1e-4)
    assert nats["lm-eval:words_read", "streaming-llm 13"] == pytest.approx(small_cache, rel=1e-4)
    assert all(abs(a - b) > 1e-3 for a, b in zip(whole, small_cache, strict=True))
    with pytest.raises(ValueError, match="generate text run with the full cache alone, not with"):
        evaluate(
            evaluation_of(tmp_path / "2", str(ended), tasks=("lm-eval:words_written",), **options)
        )


def test_the_harness_refuses_what_it_would_cut(tmp_path, ended, task_folder):
    small(positions=128, seed=2).save_pretrained(tmp_path / "short")
    tokenizer = tokenizer_of_words()
    tokenizer.eos_token = tokenizer.pad_token = "<bot>"
    tokenizer.save_pretrained(tmp_path / "short")
    for name in ("words_written", "words_read"):
        evaluation = evaluation_of(
            tmp_path, str(tmp_path / "short"), tasks=(f"lm-eval:{name}",),
            lm_eval_tasks=(str(task_folder),),
        )  # fmt: skip
        with pytest.raises(ValueError, match=r"positions for 128 .*it would be cut on the left"):
            evaluate(evaluation)
    with pytest.raises(ValueError, match="no task 'words_writen'; did you mean 'words_written'"):
        evaluate(
            evaluation_of(
                tmp_path, tasks=("lm-eval:words_writen",), lm_eval_tasks=(str(task_folder),)
            )
        )
    with pytest.raises(ValueError, match="needs a tokenizer of transformers"):
        evaluate(
            evaluation_of(
                tmp_path, str(ended), tasks=("lm-eval:words_written",), tokenizer="bytes",
                lm_eval_tasks=(str(task_folder),),
            )
        )  # fmt: skip
