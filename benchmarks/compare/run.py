"""Every mechanism with its own learning rate and as many parameters as standard attention.

`heedful compare` trains all of them at the rate of a task. Here each mechanism has the best of
three rates, tried on a seed of its own for a quarter of the steps and judged by the loss of the
training sequences, of which every step draws new ones. Models with more parameters than standard
attention have narrower MLPs.

    python -m benchmarks.compare.run blocks assignment --out runs/tuned.jsonl

Each line of the file is a run of `heedful compare`, those of the seed 100 tried a rate. What is in
the file already is not trained again, and a run that was killed goes on where it was. One process
at a time writes a file.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from benchmarks.parts import command_line
from heedful.files import only_writer
from heedful_lab.commands.compare.one_model import Diverged, train
from heedful_lab.commands.compare.scratch import (
    Attention,
    Hyperparameters,
    Size,
    described,
    from_scratch,
)
from heedful_lab.commands.compare.setups import Setup, setups
from heedful_lab.records import Record, append, read_records
from heedful_lab.records.environment import environment

MECHANISMS = (
    "standard", "mta", "mta-flash", "gated", "mta-published", "talking-heads", "selective",
    "mta-selective", "differential", "differential-v2", "knocking-heads", "canon", "exclusive",
    "forgetting", "parallax", "dex", "simplicial", "local-global",
)  # fmt: skip
FACTORS = (0.5, 1.0, 2.0)  # of a task's learning rate
TRIED_WITH = 100  # the seed of the learning rates


class Run(NamedTuple):
    """One model to train; a rate of `None` is the best of those that were tried."""

    task: str
    mechanism: str
    seed: int
    rate: float | None


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("tasks", nargs="+", choices=[*setups()], metavar="TASK")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MECHANISMS, default=MECHANISMS)
    parser.add_argument("--models", type=Path, help="folder for the trained models; default none")
    args = parser.parse_args()
    if not 1 <= args.seeds <= TRIED_WITH:
        parser.error(f"--seeds must be from 1 to {TRIED_WITH}, got {args.seeds}")
    if args.out.suffix != ".jsonl":
        parser.error(f"--out must end in .jsonl, got {args.out}")
    folder = args.out.with_suffix("")
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(folder))
        except ValueError as error:
            parser.error(str(error))
        for name in args.tasks:
            train_task(name, args, folder)


def train_task(name: str, args: argparse.Namespace, folder: Path) -> None:
    """Train what is not in the file yet; checkpoints are in the folder meanwhile."""
    setup = setups()[name]
    for run in plan(name, setup, args.only, args.seeds):
        records = read_records(args.out) if args.out.exists() else []
        if run.rate is None:
            run = run._replace(rate=best_rate(records, run))
        if not any(run == run_of(record) for record in records):
            record = train_run(run, setup, folder, args.models)
            append(args.out, record)
            print(*run, f"{record.value:.4f}", flush=True)


def plan(task: str, setup: Setup, mechanisms: tuple[str, ...], seeds: int) -> Iterator[Run]:
    """Rates first, then seed by seed, so that whatever is done is a comparison."""
    for mechanism in mechanisms:
        for factor in FACTORS:
            yield Run(task, mechanism, TRIED_WITH, factor * setup.hyperparameters.learning_rate)
    for seed in range(seeds):
        for mechanism in mechanisms:
            yield Run(task, mechanism, seed, None)


def best_rate(records: list[Record], run: Run) -> float:
    """The rate whose trial ended with the lowest training loss."""
    trials = [x for x in records if run_of(x)[:3] == (run.task, run.mechanism, TRIED_WITH)]
    return run_of(min(trials, key=last_loss)).rate


def last_loss(record: Record) -> float:
    """Mean training loss of the last fifth of the steps; infinite where the run diverged."""
    losses = [loss for step, loss in record.loss_curve if step > 0.8 * record.steps]
    return mean(losses) if losses and math.isfinite(record.value) else math.inf


def run_of(record: Record) -> Run:
    """Run of a record."""
    rate = record.config["budget"]["learning_rate"]
    return Run(record.task, record.mechanism, record.seed, rate)


def train_run(run: Run, setup: Setup, folder: Path, models: Path | None) -> Record:
    """Train one model, and keep it among the models; checkpoints are in the folder meanwhile."""
    attention = setup.mechanism(run.mechanism)
    size = equal_size(setup, attention)
    steps = setup.hyperparameters.steps // (4 if run.seed == TRIED_WITH else 1)
    hyperparameters = replace(setup.hyperparameters, steps=steps, learning_rate=run.rate)
    state = folder / "-".join(map(str, run))
    try:
        result = train(setup.task, attention, size, hyperparameters, run.seed, state)
    except Diverged as error:  # a result too: it counts as the worst
        result = error.run
    if models is not None and run.seed != TRIED_WITH:
        result.model.save_pretrained(models / f"{run.task}-{run.mechanism}-{run.seed}")
    fields = result._asdict()
    del fields["model"]
    return Record(
        run.task,
        run.mechanism,
        run.seed,
        steps=steps,
        batch=hyperparameters.batch,
        config=config(setup, attention, size, hyperparameters),
        environment=environment(),
        device=result.model.device.type,
        **fields,
    )


def config(
    setup: Setup, attention: Attention, size: Size, hyperparameters: Hyperparameters
) -> dict:
    """Other data needed to repeat a run, as `heedful compare` records it."""
    model = {"size": asdict(size), "mechanism": described(attention)}
    return {"task": asdict(setup.task), "budget": asdict(hyperparameters)} | model


def equal_size(setup: Setup, attention: Attention) -> Size:
    """The task's size, with MLPs of the width that comes nearest to standard attention's number."""

    def parameters(attention: Attention, size: Size) -> int:
        model = from_scratch(setup.task, attention, size, 0)
        return sum(x.numel() for x in model.parameters())

    size = setup.size
    width = from_scratch(setup.task, attention, size, 0).config.intermediate_size
    surplus = parameters(attention, size) - parameters(setup.mechanism("standard"), size)
    unit = 3 * size.hidden * size.layers
    return replace(size, intermediate=width - round(surplus / unit))


if __name__ == "__main__":
    main()
