"""The main job: several mechanisms side by side on one or more tasks."""

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from heedful.checks import UserError
from heedful.eviction import MostHidden
from heedful.files import only_writer, write_whole, writing_to
from heedful.hf.look import LayerLook, cached_over_time, look
from heedful.training.checkpoints import saved_step
from heedful.training.run import Stopped, check_device
from heedful_lab.commands.compare.one_model import Diverged, train
from heedful_lab.commands.compare.options import Comparison
from heedful_lab.commands.compare.scoring import write
from heedful_lab.commands.compare.scratch import described, from_scratch
from heedful_lab.commands.compare.setups import Setup, check_evictable, chosen_setups
from heedful_lab.commands.compare.small_caches import plans, policy_name, scored_as, under_budget
from heedful_lab.commands.options import Device
from heedful_lab.records import Record, UnderBudget, append, read, read_numbered
from heedful_lab.records.environment import environment
from heedful_lab.records.folder import UNFINISHED, resumed
from heedful_lab.rivals.models import load

_CONFIG = "config.json"
_PICTURED = 320  # tokens of a sequence whose way through a cache is drawn
_WRITTEN = 4  # evaluation sources of which it is shown what a model writes

Shown = TypeVar("Shown")


class _Job(NamedTuple):
    name: str
    setup: Setup
    mechanism: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.name, self.mechanism, self.seed

    @property
    def title(self) -> str:
        return f"{self.name} · {self.mechanism} · seed {self.seed}"

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.mechanism}-{self.seed}".replace(" + ", "-").replace(" ", "-")

    def model(self, out: Path) -> Path:
        """Path of its trained model."""
        return out / "models" / self.folder

    def state(self, out: Path) -> Path:
        """Path of its checkpoints while it trains."""
        return out / UNFINISHED / self.folder


class ModelLook(NamedTuple):
    """One sample as a trained model of a comparison sees it."""

    task: str
    mechanism: str
    tokens: list[str]
    looks: dict[int, LayerLook]


class CacheHistory(NamedTuple):
    """Cached tokens of one sequence after each of them, by layer, `[T, T]`."""

    task: str
    mechanism: str
    policy: str
    budget: int
    layers: dict[int, Tensor]


class ModelTexts(NamedTuple):
    """Texts of a trained model for some evaluation sources: source, target, its text."""

    task: str
    mechanism: str
    rows: list[tuple[str, str, str]]


def compare(
    comparison: Comparison,
    out: Path,
    should_stop: Callable[[], bool] = lambda: False,
    show: Callable[..., object] = lambda *finished: None,
) -> list[Record]:
    """Train everything that is not yet in `out`, and return what is finished, for the page.

    Writes `config.json`, `results.jsonl` (one line per finished run) and `models/` (the trained
    models, for `heedful.load`). Called again with the same comparison it goes on where it stopped;
    with more seeds it adds them; with fewer it trains none beyond these, and keeps and returns
    those that are there. A run that diverged is recorded as such.

    Arguments:
        comparison: what to compare.
        out: the folder.
        should_stop: called after every step.
        show: called once at the end with the arguments of `page.write_report`, also where an error
            or `should_stop` is the end, unless no run is finished.

    Returns:
        The finished runs, those of earlier calls among them.

    Raises:
        Stopped: `should_stop` returned true; finished runs are in the folder, and were shown.
        ValueError: `out` holds another comparison or is in use by another process, or an argument
            does not fit.
    """
    plan = ComparisonPlan(
        out,
        chosen_setups(comparison.planned(), comparison.changes()),
        comparison.seeds,
        comparison.budgets,
        comparison.device,
    )
    return _run(plan, should_stop, show)


class ComparisonPlan(NamedTuple):
    """A comparison in plain values.

    out: its folder.
    setups: the tasks, with what is compared on each.
    seeds: that are requested now.
    budgets: under which trained models are scored.
    device: where they are trained.
    """

    out: Path
    setups: dict[str, Setup]
    seeds: int
    budgets: tuple[float, ...]
    device: Device

    def identity(self) -> dict:
        """Options that decide the results of a seed, as JSON."""
        tasks = {
            name: _task_config(setup)
            | {"mechanisms": {x: _attention_config(setup, x) for x in setup.mechanisms}}
            for name, setup in self.setups.items()
        }
        return json.loads(json.dumps({"device": self.device, "tasks": tasks}))


def _run(
    plan: ComparisonPlan, should_stop: Callable[[], bool], show: Callable[..., object]
) -> list[Record]:
    out = plan.out
    check_device(plan.device)
    if plan.budgets:
        check_evictable(plan.setups)
    for setup in plan.setups.values():
        setup.task.sample(1, 0)  # missing data, and sizes that cannot be, show before any training
        for name in setup.mechanisms:
            from_scratch(setup.task, setup.mechanism(name), setup.size, 0)
    with only_writer(out):
        before = resumed(out, _CONFIG, plan.identity)
        seeds = _seeds(plan.seeds, out, before)
        config = {"seeds": seeds} | plan.identity()
        if config != before:
            write_whole(out / _CONFIG, json.dumps(config, indent=2) + "\n")
        jobs = _jobs(seeds, plan.setups)
        own_jobs = [job for job in jobs if job.seed < plan.seeds]
        try:
            _train_missing(own_jobs, plan.device, out, should_stop)
            if plan.budgets:
                _score_missing(own_jobs, plan.budgets, out, should_stop)
        except Exception:  # but not a second Ctrl-C, which waits for nothing
            _show(jobs, config, out, show)
            raise
        with suppress(OSError):  # a seed that is not requested now may wait there
            (out / UNFINISHED).rmdir()
        return _show(jobs, config, out, show)


def _seeds(requested: int, out: Path, before: dict | None) -> int:
    """As many seeds as the folder ever had, or as are requested."""
    there = [record.seed + 1 for record in _read_runs(out / "results.jsonl")]
    seeds = max(requested, (before or {}).get("seeds", 0), *there)
    if requested < seeds:
        warnings.warn(
            f"{out} was made for {seeds} seeds: those that are there are kept and reported, and "
            f"none beyond {requested} is trained now",
            stacklevel=4,
        )
    return seeds


def kept(out: Path) -> str:
    """In words, what a comparison that was stopped has kept in its folder."""
    runs = len(_read_runs(out / "results.jsonl"))
    states = sorted((out / UNFINISHED).glob("*"))
    saved = [(path.name, step) for path in states if (step := saved_step(path)) is not None]
    parts = [f"{runs} finished run{'s' * (runs != 1)}"]
    parts += [f"{name} as it was after step {step}" for name, step in saved]
    return f"{' and '.join(parts)} kept in {out}"


def _jobs(seeds: int, setups: dict[str, Setup]) -> list[_Job]:
    return [
        _Job(name, setup, mechanism_name, seed)
        for seed in range(seeds)
        for name, setup in setups.items()
        for mechanism_name in setup.mechanisms
    ]


def _train_missing(
    jobs: list[_Job], device: Device, out: Path, should_stop: Callable[[], bool]
) -> None:
    results = out / "results.jsonl"
    recorded = {(record.task, record.mechanism, record.seed) for record in _read_runs(results)}
    for number, job in enumerate(jobs, start=1):
        if job.key not in recorded:
            append(results, _trained(job, out, f"[{number}/{len(jobs)}]", device, should_stop))


def _score_missing(
    jobs: list[_Job], budgets: tuple[float, ...], out: Path, should_stop: Callable[[], bool]
) -> None:
    """Score the trained models under the requested budgets; one line each."""
    path = out / "budgets.jsonl"
    recorded = {score.key for score in read(path, UnderBudget)}
    for number, job in enumerate(jobs, start=1):
        folder, task = job.model(out), job.setup.task
        if not task.under_budgets() or not folder.is_dir():
            continue
        model = load(folder, convert=True).eval()
        policies = []
        for eviction in plans(model, task, budgets):
            name, tokens = policy_name(eviction, task.length), min(eviction.tokens, task.length)
            if (*job.key, name, tokens) not in recorded:
                policies.append(eviction)
        for eviction in tqdm(policies, desc=f"[{number}/{len(jobs)}] {job.title} · budgets"):
            if should_stop():
                raise Stopped
            score = under_budget(model, task, eviction, job.setup.hyperparameters)
            append(path, scored_as(model, job.key, task, eviction, score))


def _read_runs(results: Path) -> list[Record]:
    """The records of a comparison: each run once."""
    numbered = read_numbered(results, Record) if results.is_file() else []
    lines: dict[tuple[str, str, int], int] = {}
    for number, record in numbered:
        key = record.task, record.mechanism, record.seed
        if key in lines:
            raise UserError(
                f"{results}, lines {lines[key]} and {number}: both hold {record.mechanism} on "
                f"{record.task} with seed {record.seed}, which is one run; delete one of the lines"
            )
        lines[key] = number
    return [record for _, record in numbered]


def _show(jobs: list[_Job], config: dict, out: Path, show: Callable[..., object]) -> list[Record]:
    records = _read_runs(out / "results.jsonl")
    if records:
        budgeted = read(out / "budgets.jsonl", UnderBudget)
        looks, caches = _looks(jobs, records, out), _caches(jobs, budgeted, out)
        texts = _texts(jobs, records, out)
        show(out, records, config, looks, budgeted, caches, texts)
    return records


def _trained(job: _Job, out: Path, place: str, device: Device, should_stop) -> Record:
    setup, hyperparameters = job.setup, job.setup.hyperparameters
    config = setup.mechanism(job.mechanism)
    with tqdm(
        total=hyperparameters.steps, desc=f"{place} {job.title}", unit="step", file=sys.stderr
    ) as bar:

        def progress(step: int, value: float | None) -> None:
            bar.update(step - bar.n)
            if value is not None:
                bar.set_postfix_str(f"evaluation {setup.task.metric.replace('_', ' ')} {value:.3g}")

        try:
            run = train(
                setup.task,
                config,
                setup.size,
                hyperparameters,
                job.seed,
                job.state(out),
                memory_loss=setup.memory_factor(job.mechanism),
                device=device,
                progress=progress,
                should_stop=should_stop,
            )
            with writing_to(job.model(out)):
                run.model.save_pretrained(job.model(out))
                if (tokens := setup.task.saved_tokenizer()) is not None:
                    special = setup.task.special_tokens()
                    names = {name: tokens.id_to_token(index) for name, index in special.items()}
                    fast = PreTrainedTokenizerFast(tokenizer_object=tokens, **names)
                    fast.save_pretrained(job.model(out))
        except Diverged as error:  # a result too: it counts as the worst
            run = error.run
            warnings.warn(f"{job.title}: {error}", stacklevel=2)
    return Record(
        task=job.name,
        mechanism=job.mechanism,
        seed=job.seed,
        metric=run.metric,
        steps=hyperparameters.steps,
        batch=hyperparameters.batch,
        parameters=run.parameters,
        final=run.final,
        curve=run.curve,
        loss_curve=run.loss_curve,
        tokens_per_second=run.tokens_per_second,
        seconds=run.seconds,
        peak_memory_mib=run.peak_memory_mib,
        config=_task_config(setup)
        | {"mechanism": described(config)}
        | _memory_config(setup, job.mechanism),
        environment=environment(),
        device=run.model.device.type,
    )


def _looks(jobs: list[_Job], records: list[Record], out: Path) -> Iterator[ModelLook]:
    def model_look(job: _Job, folder: Path) -> ModelLook:
        task = job.setup.task
        ids = task.shown()
        return ModelLook(
            job.name, job.mechanism, task.tokens(ids), look(load(folder, convert=True), ids[None])
        )

    decoders = [job for job in jobs if not job.setup.task.paired]
    return _of_models(decoders, records, out, model_look)


def _texts(jobs: list[_Job], records: list[Record], out: Path) -> Iterator[ModelTexts]:
    def model_texts(job: _Job, folder: Path) -> ModelTexts:
        task = job.setup.task
        rows = task.held_out(_WRITTEN)
        sources, references = (task.references(ids) for ids in (rows.input_ids, rows.labels))
        texts = write(load(folder, convert=True).eval(), task, rows)
        return ModelTexts(
            job.name, job.mechanism, list(zip(sources, references, texts, strict=True))
        )

    writing = [job for job in jobs if job.setup.task.paired]
    return _of_models(writing, records, out, model_texts)


def _of_models(
    jobs: list[_Job], records: list[Record], out: Path, exhibit: Callable[[_Job, Path], Shown]
) -> Iterator[Shown]:
    """The exhibits of the first seed's models, one after the other."""
    keys = {(r.task, r.mechanism, r.seed) for r in records}
    for job in jobs:
        folder = job.model(out)
        if job.seed == 0 and job.key in keys and folder.is_dir():
            try:
                result = exhibit(job, folder)
            except Exception as error:  # no damaged model may cost the report of the others
                warnings.warn(
                    f"{folder} cannot be shown, its numbers stay: {error}. If the model is "
                    "damaged, delete that folder: the report comes without its pictures",
                    stacklevel=2,
                )
            else:
                yield result


def _caches(jobs: list[_Job], budgeted: list[UnderBudget], out: Path) -> Iterator[CacheHistory]:
    """Of the first seed's models that mask tokens, under the smallest budget of their own rule."""
    for job in jobs:
        those = [x for x in budgeted if x.key[:3] == job.key and x.policy == MostHidden.__name__]
        if job.seed or not those:
            continue
        eviction = MostHidden(tokens=min(x.tokens for x in those))
        ids = next(iter(job.setup.task.under_budgets().values())).held_out(1).input_ids[:1]
        layers = cached_over_time(load(job.model(out), convert=True), ids[:, :_PICTURED], eviction)
        yield CacheHistory(job.name, job.mechanism, MostHidden.__name__, eviction.tokens, layers)


def _task_config(setup: Setup) -> dict:
    return {
        "task": dataclasses.asdict(setup.task),
        "size": dataclasses.asdict(setup.size),
        "budget": dataclasses.asdict(setup.hyperparameters),
    }


def _memory_config(setup: Setup, name: str) -> dict:
    factor = setup.memory_factor(name)
    return {"memory_loss": factor} if factor else {}


def _attention_config(setup: Setup, name: str) -> dict:
    return described(setup.mechanism(name)) | _memory_config(setup, name)
