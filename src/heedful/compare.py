"""The main job: several mechanisms side by side on one or more tasks, and one report."""

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from heedful.environment import environment
from heedful.exhibits import exhibits_of
from heedful.files import write_whole
from heedful.hf import load
from heedful.nn import Mechanism, MultiToken, mechanism, to_json
from heedful.report import (
    Record,
    append_record,
    findings,
    read_records,
    summarise,
    table,
    write_report,
)
from heedful.tasks import TASKS, Assignment, Blocks, Copy, Parity, Task, Text
from heedful.train import Budget, Size, from_scratch, train


class Setup(NamedTuple):
    """A task as `compare` runs it: sizes at which it can be learnt within a minute or two."""

    task: Task
    size: Size
    budget: Budget
    mechanisms: tuple[str, ...]
    """What is compared by default: where the papers claim a difference."""

    def mechanism(self, name: str) -> Mechanism:
        """The configuration behind a name, in the form the paper used on this task."""
        if name == "mta" and isinstance(self.task, Blocks):
            # In every layer, as in the paper's toy task (arXiv 2504.00927, section 4.1), but with
            # the published kernels and mixing: they learn it sooner than 2 x 9 kernels alone.
            return MultiToken(conv_every=1)
        return mechanism(name)


def setups(data: Iterable[str] = ()) -> dict[str, Setup]:
    """Every task by name, with the sizes of the default comparison; `data` feeds `text`."""
    return {
        "blocks": Setup(
            Blocks(), Size(64, 3, 4), Budget(900, 32, 4e-3, mechanism_rate=8.0), ("standard", "mta")
        ),
        "assignment": Setup(
            Assignment(queries=8),
            Size(64, 2, 2),
            Budget(500, 32, 3e-3),
            ("standard", "selective"),
        ),
        "copy": Setup(Copy(), Size(64, 2, 2), Budget(400, 32, 3e-3), ("standard", "selective")),
        "parity": Setup(Parity(), Size(64, 2, 2), Budget(400, 32, 3e-3), ("standard", "selective")),
        "text": Setup(
            Text(paths=tuple(data)),
            Size(128, 4, 4),
            Budget(400, 8, 3e-3, held_out=64),
            ("standard", "mta", "selective"),
        ),
    }


@dataclass(frozen=True)
class Comparison:
    """What to compare.

    Arguments:
        tasks: names of `heedful.tasks.TASKS`.
        mechanisms: names of `heedful.nn.NAMES`; empty takes each task's own.
        seeds: how many seeds each run is repeated with.
        data: text for the task `text`: files, folders or `hf:NAME`; empty takes the standard
            library's sources.
        steps, batch: override the tasks' budgets.
        device: `"auto"`, `"cpu"` or `"cuda"`.
    """

    tasks: tuple[str, ...] = ("blocks", "assignment", "text")
    mechanisms: tuple[str, ...] = ()
    seeds: int = 1
    data: tuple[str, ...] = ()
    steps: int | None = None
    batch: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in TASKS:
                near = get_close_matches(name, TASKS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"tasks must be among {', '.join(TASKS)}, got {name!r}{hint}")
        for name in self.mechanisms:
            mechanism(name)  # raises, with the nearest name
        for field in ("steps", "batch"):
            if getattr(self, field) is not None and getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not self.tasks:
            raise ValueError(f"tasks must name at least one of {', '.join(TASKS)}")
        for field in ("tasks", "mechanisms"):
            if len(set(getattr(self, field))) != len(getattr(self, field)):
                raise ValueError(f"{field} must be different, got {getattr(self, field)}")
        if self.seeds < 1:
            raise ValueError(f"seeds must be at least 1, got {self.seeds}")
        if self.data and "text" not in self.tasks:
            raise ValueError("data is read by the task 'text': add it to the tasks")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, got {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device='cuda', but torch sees no CUDA device; use auto or cpu")

    def setups(self) -> dict[str, Setup]:
        """The chosen tasks with this comparison's overrides."""
        chosen = {}
        for name in self.tasks:
            setup = setups(self.data)[name]
            steps, batch = self.steps or setup.budget.steps, self.batch or setup.budget.batch
            names = self.mechanisms or setup.mechanisms
            budget = replace(setup.budget, steps=steps, batch=batch)
            chosen[name] = setup._replace(budget=budget, mechanisms=names)
        return chosen


class _Job(NamedTuple):
    name: str
    setup: Setup
    mechanism: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.name, self.mechanism, self.seed

    def folder(self, out: Path) -> Path:
        return out / "models" / f"{self.name}-{self.mechanism}-{self.seed}"


def compare(
    comparison: Comparison, out: Path, should_stop: Callable[[], bool] = lambda: False
) -> list[Record]:
    """Train everything that is not yet in `out`, then write the table's records and the report.

    Writes `config.json`, `results.jsonl` (one line per finished run), `models/` (the trained
    models, for `heedful.load`) and `report.html`. Called again with the same comparison it goes
    on where it stopped.

    Raises:
        Stopped: `should_stop` said so; finished runs are in the folder, and in the report.
        ValueError: `out` holds another comparison, or an argument does not fit.
    """
    chosen = comparison.setups()
    for setup in chosen.values():
        setup.task.sample(1, 0)  # missing data, and sizes that cannot be, show before any training
        for name in setup.mechanisms:
            from_scratch(setup.task, setup.mechanism(name), setup.size, 0)
    config = _config(comparison, chosen)
    _claim(out, config)
    results = out / "results.jsonl"
    before = read_records(results) if _has(results) else []
    done = {(record.task, record.mechanism, record.seed) for record in before}
    jobs = [
        _Job(name, setup, mechanism_name, seed)
        for seed in range(comparison.seeds)
        for name, setup in chosen.items()
        for mechanism_name in setup.mechanisms
    ]
    try:
        for number, job in enumerate(jobs, start=1):
            if job.key not in done:
                record = _run(job, out, f"[{number}/{len(jobs)}]", comparison.device, should_stop)
                append_record(results, record)
    finally:
        records = read_records(results) if _has(results) else []
        if records:
            write_report(out, records, list(_exhibits(jobs, records, out)), config)
    shutil.rmtree(out / "unfinished", ignore_errors=True)
    return records


def summary(records: list[Record]) -> str:
    """The table and the findings, for a terminal."""
    rows = summarise(records)
    return table(rows) + "\n\n" + "\n".join(findings(rows))


def _run(job: _Job, out: Path, place: str, device: str, should_stop) -> Record:
    setup, budget = job.setup, job.setup.budget
    config = setup.mechanism(job.mechanism)
    label = f"{place} {job.name} · {job.mechanism} · seed {job.seed}"
    with tqdm(total=budget.steps, desc=label, unit="step", file=sys.stderr) as bar:

        def progress(step: int, value: float | None) -> None:
            bar.update(step - bar.n)
            if value is not None:
                bar.set_postfix_str(f"held out {value:.3g}")

        run = train(
            setup.task,
            config,
            setup.size,
            budget,
            job.seed,
            out / "unfinished" / "-".join(map(str, job.key)),
            device=device,
            progress=progress,
            should_stop=should_stop,
        )
    run.model.save_pretrained(job.folder(out))
    return Record(
        task=job.name,
        mechanism=job.mechanism,
        seed=job.seed,
        metric=run.metric,
        steps=budget.steps,
        batch=budget.batch,
        parameters=run.parameters,
        final=run.final,
        curve=run.curve,
        loss_curve=run.loss_curve,
        tokens_per_second=run.tokens_per_second,
        seconds=run.seconds,
        peak_memory_mib=run.peak_memory_mib,
        config=_job_config(setup) | {"mechanism": to_json(config)},
        environment=environment(),
    )


def _exhibits(jobs: list[_Job], records: list[Record], out: Path) -> Iterator:
    finished = {(r.task, r.mechanism, r.seed) for r in records}
    for job in jobs:
        if job.seed == 0 and job.key in finished and job.folder(out).is_dir():
            yield from exhibits_of(load(job.folder(out)), job.setup.task, job.name, job.mechanism)


def _job_config(setup: Setup) -> dict:
    return {
        "task": dataclasses.asdict(setup.task),
        "size": dataclasses.asdict(setup.size),
        "budget": dataclasses.asdict(setup.budget),
    }


def _config(comparison: Comparison, chosen: dict[str, Setup]) -> dict:
    tasks = {
        name: _job_config(setup)
        | {"mechanisms": {m: to_json(setup.mechanism(m)) for m in setup.mechanisms}}
        for name, setup in chosen.items()
    }
    config = {"seeds": comparison.seeds, "device": comparison.device, "tasks": tasks}
    return json.loads(json.dumps(config))


def _claim(out: Path, config: dict) -> None:
    """Make the folder this comparison's own, or recognise it; another one's is refused."""
    path = out / "config.json"
    out.mkdir(parents=True, exist_ok=True)
    if path.is_file():
        if json.loads(path.read_text()) != config:
            raise ValueError(
                f"out={out} holds another comparison (see {path}); choose another folder with "
                "--out, or delete this one"
            )
        return
    if _has(out / "results.jsonl"):
        raise ValueError(f"out={out} holds results without a config.json; choose another folder")
    write_whole(path, json.dumps(config, indent=2) + "\n")


def _has(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0
