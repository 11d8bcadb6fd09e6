"""Cost of one step of training with every grouping: peak memory and processor seconds.

The models and sequences are those of `benchmarks/grouped/run.py`, each measured in a process of its
own with one thread: the growth of its peak over a forward and a backward pass, and the least
processor time of three of them, which other work on the machine disturbs little.

    python -m benchmarks.grouped.memory text recall translate --out runs/grouped-memory.jsonl

What is in the file already is not measured again.
"""

import json
import time

import torch
from tqdm import tqdm

from benchmarks.grouped.run import PAIRS, ROWS, hyperparameters_of, mechanisms, paired_mechanisms
from benchmarks.parts import ROOT, command_line, read_partial
from heedful.files import append_line
from heedful.testing import peak_memory_mib
from heedful_lab.commands.compare.scratch import Size, from_scratch
from heedful_lab.records.environment import environment
from heedful_lab.tasks import TASKS


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("tasks", nargs="+", choices=(*ROWS, *PAIRS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    recorded = {(line["task"], line["name"]) for line in read_partial(args.out)}
    for kind in args.tasks:
        for name in tqdm(names_of(kind), desc=kind):
            if (kind, name) in recorded:
                continue
            step, seconds = Step(kind, name), []
            for _ in range(3):
                start = time.process_time()
                step()
                seconds.append(time.process_time() - start)
            line = {
                "task": kind, "name": name, "step_peak_mib": peak_memory_mib(program(kind, name)),
                "step_cpu_seconds": min(seconds), "batch": step.batch,
                "environment": environment(),
            }  # fmt: skip
            append_line(args.out, json.dumps(line))


def names_of(kind: str) -> dict:
    task = TASKS[kind].default()
    return mechanisms(task) if kind in ROWS else paired_mechanisms(task, kind)


class Step:
    """A forward and a backward pass of a new model on the sequences of a step."""

    def __init__(self, kind: str, name: str) -> None:
        task = TASKS[kind].default()
        recipe, hyperparameters = task.recipe, hyperparameters_of(task)
        size = Size(recipe.hidden, recipe.layers, recipe.heads)
        self.model = from_scratch(task, names_of(kind)[name], size, 0).train()
        self.batch = hyperparameters.batch
        self.inputs = task.batch(self.batch, 0, 0).inputs()

    def __call__(self) -> None:
        self.model(**self.inputs, use_cache=False).loss.backward()
        self.model.zero_grad()


def program(kind: str, name: str) -> str:
    """A step, for a process of its own; a step before it has brought in all code."""
    return f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks.grouped.memory import Step
torch.set_num_threads(1)
run = Step({kind!r}, {name!r})
few = {{name: x[:1] for name, x in run.inputs.items()}}
run.model(**few, use_cache=False).loss.backward()
run.model.zero_grad()
"""


if __name__ == "__main__":
    main()
