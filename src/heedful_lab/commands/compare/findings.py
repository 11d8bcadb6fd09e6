"""Runs summed up over seeds: in numbers, as a table and in words."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from heedful.checks import UserError
from heedful_lab.records import HIGHER_IS_BETTER, METRICS, SHARES, WHOLE, Record, UnderBudget
from heedful_lab.records.tables import format_table

Format = Literal["text", "markdown", "html"]

BASELINE = "standard"
"""The mechanism that every other one is compared with."""

SOLVED = 0.05
"""An error task counts as solved where every seed ends at or below this error."""

RULE = (
    "One mechanism counts as better than another only where both have at least two seeds and the "
    "worst seed of the one is better than the best seed of the other; a run that diverged counts "
    f"as worst. An error task counts as solved where every seed ends at {100 * SOLVED:.0f} % error "
    "or less."
)


class Row(NamedTuple):
    """A mechanism on a task, summed up over its seeds.

    `std` is the sample standard deviation, nan with one seed. `ratio` is the mean over that of
    `"standard"`, nan where it was not run. `steps`, `batch` and `devices` hold every value.
    """

    task: str
    mechanism: str
    metric: str
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    std: float
    ratio: float
    parameters: int
    tokens_per_second: float
    peak_memory_mib: float
    steps: tuple[int, ...]
    batch: tuple[int, ...]
    devices: tuple[str, ...]


def summarise(records: Iterable[Record]) -> list[Row]:
    """One row per task and mechanism, in the order in which they first occur.

    A value that is not finite (a run that diverged) makes mean and deviation nan.
    Tokens per second are the median over seeds, peak memory the greatest.

    Raises:
        ValueError: if a seed occurs twice for a mechanism on a task, or a task has two metrics.
    """
    groups: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        groups.setdefault(record.task, {}).setdefault(record.mechanism, []).append(record)
    rows = []
    for task, mechanisms in groups.items():
        metrics = sorted({record.metric for runs in mechanisms.values() for record in runs})
        if len(metrics) > 1:
            raise UserError(
                f"records of one task must have one metric, got {' and '.join(metrics)} for "
                f"{task!r}; report them in separate folders"
            )
        task_rows = [_row(task, mechanism, runs) for mechanism, runs in mechanisms.items()]
        base = next((row for row in task_rows if row.mechanism == BASELINE), None)
        whole = base.mean if base is not None and base.mean else math.nan
        rows += [row._replace(ratio=row.mean / whole) for row in task_rows]
    return rows


def _row(task: str, mechanism: str, runs: Sequence[Record]) -> Row:
    runs = sorted(runs, key=lambda record: record.seed)
    seeds = tuple(record.seed for record in runs)
    if len(set(seeds)) < len(seeds):
        raise UserError(
            f"records must hold each seed of a mechanism on a task once, got seeds {list(seeds)} "
            f"for {mechanism!r} on {task!r}; keep one of each or report them in separate folders"
        )
    values = tuple(record.value for record in runs)
    sound = all(math.isfinite(value) for value in values)
    return Row(
        task=task,
        mechanism=mechanism,
        metric=runs[0].metric,
        seeds=seeds,
        values=values,
        mean=statistics.fmean(values) if sound else math.nan,
        std=statistics.stdev(values) if sound and len(values) > 1 else math.nan,
        ratio=math.nan,
        parameters=max(record.parameters for record in runs),
        tokens_per_second=statistics.median(record.tokens_per_second for record in runs),
        peak_memory_mib=max(record.peak_memory_mib for record in runs),
        steps=tuple(sorted({record.steps for record in runs})),
        batch=tuple(sorted({record.batch for record in runs})),
        devices=tuple(sorted({record.device or "unknown" for record in runs})),
    )


def number(metric: str, value: float) -> str:
    """A value of a metric as text: errors in percent, the rest with two or three decimals."""
    if not math.isfinite(value):
        return "diverged"
    if metric in SHARES:
        return f"{100 * value:.1f} %"
    decimals = {"perplexity": 2, "bleu": 1}.get(metric, 3)
    return f"{value:.{decimals}f}"


def better(rows: Sequence[Row]) -> str:
    """In words, whether more or less is better of what these rows are judged by."""
    higher = [row.task for row in rows if row.metric in HIGHER_IS_BETTER]
    tasks = " and ".join(dict.fromkeys(higher))
    if len(higher) == len(rows):
        return "higher is better"
    return "lower is better" + (f", on {tasks} higher" if tasks else "")


def plain(value: float) -> str:
    """A count as text, a dash where it was not measured."""
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def spread(metric: str, values: Sequence[float]) -> str:
    """Mean and sample standard deviation, as in `12.3 ± 4.0 %`; one value has no ±."""
    mean, _, unit = number(metric, statistics.fmean(values)).partition(" ")
    if len(values) > 1:
        mean = f"{mean} ± {number(metric, statistics.stdev(values)).partition(' ')[0]}"
    return f"{mean} {unit}".strip()


def table(rows: Sequence[Row], format: Format = "text") -> str:
    """The rows as a table: `"text"` for a terminal, `"markdown"` or `"html"`.

    Peak memory has a column if all runs were on a GPU: elsewhere it is that of the whole process.
    """
    head = ["task", "mechanism", "final", "× standard", "parameters", "tokens/s"]
    gpu = all(row.devices == ("cuda",) for row in rows)
    body = []
    for row in rows:
        ratio = "–" if row.mechanism == BASELINE or math.isnan(row.ratio) else f"{row.ratio:.2f}"
        diverged = sum(not math.isfinite(value) for value in row.values)
        final = (
            f"{diverged} of {len(row.values)} diverged"
            if diverged
            else (spread(row.metric, row.values))
        )
        final = f"{METRICS[row.metric]} {final} ({len(row.seeds)} seed{'s' * (len(row.seeds) > 1)})"
        cost = [f"{row.parameters:,}", plain(row.tokens_per_second), plain(row.peak_memory_mib)]
        body.append([row.task, row.mechanism, final, ratio, *cost[: 2 + gpu]])
    return format_table([*head, *["GPU peak MiB"] * gpu], body, format, words=3)


def further(records: Sequence[Record], format: Format = "text") -> list[str]:
    """A table for each task of what its runs recorded beside what they are judged by.

    Bits per byte are left out, which order models with one tokenizer as perplexity does.
    """

    def columns(runs: list[Record]) -> dict[str, str]:
        names = [name for name in METRICS if any(name in record.final for record in runs)]
        return {x: x for x in names if x not in (runs[0].metric, "bits_per_byte")}

    return _tables(records, columns, format)


def by_split(records: Sequence[Record], format: Format = "text") -> list[str]:
    """A table for each task that has several evaluation splits."""

    def columns(runs: list[Record]) -> dict[str, str]:
        splits = dict.fromkeys([x for record in runs for x in record.splits], runs[0].metric)
        return splits if len(splits) > 1 else {}

    return _tables(records, columns, format)


def _tables(
    records: Sequence[Record], columns: Callable[[list[Record]], dict[str, str]], format: Format
) -> list[str]:
    """By task, means of the named values of each mechanism, with the metrics that they are in."""
    tables = []
    for task in dict.fromkeys(record.task for record in records):
        runs = [record for record in records if record.task == task]
        metrics, body = columns(runs), []
        for mechanism in dict.fromkeys(record.mechanism for record in runs):
            cells = []
            for name, metric in metrics.items():
                values = [x.final.get(name, math.nan) for x in runs if x.mechanism == mechanism]
                cells.append(spread(metric, values) if all(map(math.isfinite, values)) else "–")
            body.append((task, mechanism, *cells))
        labels = [
            METRICS.get(x, x) + " (more is better)" * (x in HIGHER_IS_BETTER) for x in metrics
        ]
        if metrics:
            tables.append(format_table(("task", "mechanism", *labels), body, format, words=2))
    return tables


def overview(records: Iterable[Record]) -> str:
    """The table and the findings, for a terminal."""
    records = list(records)
    rows = summarise(records)
    tables = [table(rows), *further(records)]
    return "\n\n".join([*tables, "\n".join([*findings(rows), *configurations(records)])])


def findings(rows: Sequence[Row]) -> list[str]:
    """For each task one sentence on what its runs show, and on what they do not.

    A last one if something was run with one seed.

    The rule is `RULE`. Where no difference shows the sentence says so; with one seed, how runs
    ended.
    """
    tasks = dict.fromkeys(row.task for row in rows)
    sentences = [_finding([row for row in rows if row.task == task]) for task in tasks]
    single = any(len(row.seeds) == 1 for row in rows)
    return [*sentences, *["One seed may be luck; run more (--seeds 3)."] * single]


def _finding(rows: Sequence[Row]) -> str:
    base = next((row for row in rows if row.mechanism == BASELINE), None)
    others = [row for row in rows if row is not base]
    parts = []
    if base is None:
        parts.append(f"{BASELINE} was not run, so {_all(rows)} cannot be compared with it")
    elif not others:
        parts.append(f"only {_label(base)} was run, so there is nothing to compare it with")
    else:
        enough = [row for row in others if min(len(row.seeds), len(base.seeds)) > 1]
        better = [row for row in enough if _beats(row, base)]
        worse = [row for row in enough if _beats(base, row)]
        level = [row for row in enough if row not in better and row not in worse]
        alone = [row for row in others if row not in enough]
        solved = [row for row in better if _solved(row) and not _solved(base)]
        better = [row for row in better if row not in solved]
        if solved:
            parts.append(f"{_all(solved)} solved it where {BASELINE} stayed at {_value(base)}")
        if better:
            parts.append(f"every seed of {_all(better)} did better than any of {_label(base)}")
        if worse:
            parts.append(f"every seed of {_all(worse)} did worse than any of {_label(base)}")
        if level:
            parts.append(
                f"for {_all(level)} no difference from {_label(base)} beyond the spread of seeds "
                "shows at this size"
            )
        if alone:
            parts.append(f"with one seed {_all([*alone, base])}")
    if "error" in rows[0].metric and not any(map(_solved, rows)):
        parts.append("no mechanism solved it" if len(rows) > 1 else "it was not solved")
    if len({(row.steps, row.batch) for row in rows}) > 1 or len(rows[0].steps + rows[0].batch) > 2:
        parts.append("the runs differ in steps or batch size and are not like for like")
    return f"{rows[0].task}: {'; '.join(parts)}."


def _beats(row: Row, other: Row) -> bool:
    sign = -1 if row.metric in HIGHER_IS_BETTER else 1

    def loss(value: float) -> float:
        return sign * value if math.isfinite(value) else math.inf

    return max(map(loss, row.values)) < min(map(loss, other.values))


def _solved(row: Row) -> bool:
    return "error" in row.metric and all(value <= SOLVED for value in row.values)


def configurations(records: Iterable[Record]) -> list[str]:
    """A sentence for each mechanism that stands for different configurations on different tasks."""
    by_name: dict[str, dict[str, dict]] = {}
    for record in records:
        config = record.config.get("mechanism")
        if isinstance(config, dict):
            by_name.setdefault(record.mechanism, {})[record.task] = config
    sentences = []
    for name, by_task in by_name.items():
        fields = set.intersection(*(set(config) for config in by_task.values()))
        for field in sorted(fields):
            values: dict[str, list[str]] = {}
            for task, config in by_task.items():
                values.setdefault(json.dumps(config[field]), []).append(task)
            if len(values) > 1:
                each = (f"{value} on {' and '.join(tasks)}" for value, tasks in values.items())
                sentences.append(f"{name} is not the same everywhere: {field}={', '.join(each)}.")
    return sentences


def _value(row: Row) -> str:
    if not math.isfinite(row.mean):
        diverged = sum(not math.isfinite(value) for value in row.values)
        return f"{diverged} of {len(row.values)} seeds diverged"
    if "error" in row.metric:
        return f"{number(row.metric, row.mean)} {METRICS[row.metric]}"
    return f"{METRICS[row.metric]} {number(row.metric, row.mean)}"


def _label(row: Row) -> str:
    return f"{row.mechanism} ({_value(row)})"


def _all(rows: Sequence[Row]) -> str:
    *first, last = map(_label, rows)
    return f"{', '.join(first)} and {last}" if first else last


class ScoreTable(NamedTuple):
    """One task and split under small caches: models with a policy down, budgets across."""

    title: str
    head: list[str]
    body: list[list[str]]


def budget_tables(scored: Sequence[UnderBudget]) -> list[ScoreTable]:
    """A table for each task and split of models under small caches."""
    tables = []
    for task in dict.fromkeys(x.task for x in scored):
        those = [x for x in scored if x.task == task]
        sizes = sorted({x.tokens for x in those if x.policy != WHOLE}, reverse=True)
        head = ["model", "eviction", "full cache", *(f"{n} tokens" for n in sizes)]
        for split in those[0].final:
            title = f"{task}, {split}: {METRICS[those[0].metric]}, and × smaller than bf16"
            body = []
            for model in dict.fromkeys(x.mechanism for x in those):
                own = [x for x in those if x.mechanism == model]
                policies = [x for x in dict.fromkeys(x.policy for x in own) if x != WHOLE]
                whole = _scored([x for x in own if x.policy == WHOLE], split)
                for policy in policies or ["–"]:
                    evicted = [x for x in own if x.policy == policy]
                    by_size = ([x for x in evicted if x.tokens == n] for n in sizes)
                    body.append([model, policy, whole, *(_scored(x, split) for x in by_size)])
            tables.append(ScoreTable(title, head, body))
    return tables


def _scored(seeds: Sequence[UnderBudget], split: str) -> str:
    if not seeds:
        return "–"
    mean = statistics.fmean(x.final[split] for x in seeds)
    return f"{number(seeds[0].metric, mean)} ({seeds[0].compression:.1f} ×)"
