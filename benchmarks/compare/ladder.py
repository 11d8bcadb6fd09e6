"""Forms of multi-token attention by their price: small models of text, at equal time.

First a step of every form is timed beside one of standard attention: the processor time of forward,
backward and the optimiser on one thread, the forms in turn, median of the rounds' ratios. Then each
form is trained for as many steps as it takes in the time of the task's with standard attention;
equally many steps are in run.py. Models have as many parameters as standard attention's, by the
width of their MLPs, and twice the task's learning rate, which every mechanism chose of three there.

    python -m benchmarks.compare.ladder --out runs/ladder.jsonl

Times come first in the file; with the file there they are not taken again, so that a noisy hour
changes no run. What is trained already is not trained again.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.compare.run import Run, config, equal_size
from benchmarks.parts import command_line, read_partial
from heedful.files import append_line
from heedful_lab.commands.compare.one_model import train
from heedful_lab.commands.compare.scratch import Attention, Hyperparameters, from_scratch
from heedful_lab.commands.compare.setups import Setup, setups
from heedful_lab.records.environment import environment

FORMS: dict[str, tuple[str, dict]] = {
    "standard": ("standard", {}),
    "gated": ("gated", {}),
    "canon": ("canon", {}),
    "differential-v2": ("differential-v2", {}),
    "mta": ("mta", {}),
    "mta, every layer": ("mta", {"conv_every": 1}),
    "rank 2, nothing mixed": ("mta-flash", {"post_mix": None}),
    "rank 1, pairs": ("mta-flash", {"rank": 1}),
    "rank 2, pairs": ("mta-flash", {}),
    "rank 3, pairs": ("mta-flash", {"rank": 3}),
    "rank 2, pairs before and after": ("mta-flash", {"mix": 2}),
    "rank 2, pairs, looking back": ("mta-flash", {"centred": False}),
}
RATE = 2.0  # of the task's
WARM, STEPS = 2, 3  # of a round
TASK = "text"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=FORMS, default=[*FORMS])
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    setup = setups()[TASK]
    base = setup.hyperparameters
    setup = setup._replace(hyperparameters=replace(base, learning_rate=RATE * base.learning_rate))
    slowness = {x["form"]: x["times_standard"] for x in read_partial(args.out) if "rounds" in x}
    if new := [form for form in args.only if form not in slowness]:
        for line in timed(setup, new, args.rounds):
            append_line(args.out, json.dumps(line | {"environment": environment()}))
            slowness[line["form"]] = line["times_standard"]
            print(line["form"], f"{line['times_standard']:.2f}", flush=True)
    for seed in range(args.seeds):
        for form in args.only:
            steps = round(setup.hyperparameters.steps / max(1.0, slowness[form]))
            train_form(setup, form, seed, steps, args.out)


def form_of(setup: Setup, form: str) -> Attention:
    """Attention of a form."""
    name, changes = FORMS[form]
    return replace(setup.mechanism(name), **changes)


def timed(setup: Setup, forms: list[str], rounds: int) -> Iterator[dict]:
    """A step of each form, as a multiple of standard attention's."""
    steps = {form: step(setup, form) for form in dict.fromkeys(("standard", *forms))}
    seconds: dict[str, list[float]] = {form: [] for form in steps}
    for _ in range(rounds):
        for form, one in steps.items():
            for _ in range(WARM):
                one()
            start = time.thread_time()
            for _ in range(STEPS):
                one()
            seconds[form].append((time.thread_time() - start) / STEPS)
    for form in forms:
        ratios = [x / y for x, y in zip(seconds[form], seconds["standard"], strict=True)]
        yield {
            "task": TASK, "form": form, "rounds": rounds,
            "step_ms": 1e3 * statistics.median(seconds[form]),
            "times_standard": statistics.median(ratios), "ratios": ratios,
        }  # fmt: skip


def step(setup: Setup, form: str) -> Callable[[], None]:
    """A function that takes one step of training."""
    attention = form_of(setup, form)
    model = from_scratch(setup.task, attention, equal_size(setup, attention), 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.hyperparameters.learning_rate)
    samples = setup.task.batch(setup.hyperparameters.batch, 0, 0)

    def one() -> None:
        loss = model(input_ids=samples.input_ids, labels=samples.input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return one


def train_form(setup: Setup, form: str, seed: int, steps: int, out: Path) -> None:
    """Train one model, unless it is in the file."""
    done = [x for x in read_partial(out) if "seed" in x]
    if any((x["form"], x["seed"], x["steps"]) == (form, seed, steps) for x in done):
        return
    attention = form_of(setup, form)
    size = equal_size(setup, attention)
    budget: Hyperparameters = replace(setup.hyperparameters, steps=steps)
    run = Run(TASK, form, seed, budget.learning_rate)
    folder = out.with_suffix("") / f"{'-'.join(map(str, run))}-{steps}".replace(", ", "-")
    result = train(setup.task, attention, size, budget, seed, folder)
    line = {
        "task": TASK, "form": form, "seed": seed, "steps": steps,
        "metric": result.metric, "final": result.final, "parameters": result.parameters,
        "curve": result.curve, "config": config(setup, attention, size, budget),
    }  # fmt: skip
    append_line(out, json.dumps(line | {"environment": environment()}))
    print(form, seed, steps, f"{next(iter(result.final.values())):.4f}", flush=True)


if __name__ == "__main__":
    main()
