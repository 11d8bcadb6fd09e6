"""An evaluation in numbers: measures with intervals, and models compared with the first one."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Literal, NamedTuple

import numpy as np

from heedful_lab.commands.evaluate.options import LM_EVAL
from heedful_lab.records import Sample
from heedful_lab.records.tables import format_table

RESAMPLES = 2000
LEAST = 5  # samples that a bootstrap is drawn from; fewer tell nothing of how they scatter
_AT_ONCE = 1 << 22  # numbers of a bootstrap at a time
_Z = 1.959963984540054  # 95 % of a normal distribution lie within so many deviations
ROUNDED = 1e-9

RULE = (
    "In parentheses 95 % intervals: of shares Wilson's, of the rest from a bootstrap over samples. "
    "Differences are paired: the same samples of both, resampled together; an "
    "interval without 0 is marked *. They say how much the choice of samples matters, not the seed "
    f"of training. Fewer than {LEAST} samples have none, nor have answers that are all alike."
)


_Cells = list[tuple[np.ndarray, np.ndarray]]


class Interval(NamedTuple):
    """A value with the ends of its 95 % interval, nan where there is none."""

    value: float
    low: float
    high: float


class Measure(NamedTuple):
    """Measure over samples: a ratio of sums in each cell, its mean over cells.

    Arguments:
        name: for readers.
        top, bottom: names in a sample's values; `None` counts samples.
        of: what becomes of the ratio.
        percent: whether it is a share.
    """

    name: str
    top: str
    bottom: str | None
    of: Callable[[np.ndarray], np.ndarray] = np.asarray
    percent: bool = False


ACCURACY = Measure("accuracy", "right", None, percent=True)
ERROR = Measure("error", "error", None, percent=True)
PERPLEXITY = Measure("perplexity", "nats", "tokens", np.exp)
WORDS = Measure("perplexity", "nats", None, np.exp)
BITS = Measure("bits per byte", "nats", "bytes", lambda nats: nats / math.log(2))

MEASURES = {
    "needles": (ACCURACY,),
    "babilong": (ACCURACY,),
    "lambada": (ACCURACY, WORDS),
    "lambada-detokenised": (ACCURACY, WORDS),
    "perplexity": (PERPLEXITY, BITS),
}
"""Of tasks of lm-evaluation-harness what their samples have, of other tasks the error."""

SHARES = ("acc", "acc_norm", "exact_match")
"""Measures of lm-evaluation-harness that are means of zeros and ones over samples."""

_PARTS = {"needles": "needles", "babilong": "kind", "perplexity": "domain"}
"""By what a task's samples are grouped in further lines."""


class EvaluationLine(NamedTuple):
    """One task or part of it, one measure, one model with its cache.

    Arguments:
        difference: from the first model on the same samples; `None` where that answered others.
        samples: how many there are.
    """

    task: str
    measure: Measure
    entry: tuple[str, str]
    estimate: Interval
    difference: Interval | None
    samples: int


def summed_up(samples: Sequence[Sample], seed: int = 0) -> list[EvaluationLine]:
    """Every task and its parts, every measure, every model: values, intervals, differences.

    Models are compared with the first one with its full cache. The perplexity of several domains
    is the mean of theirs, as the papers average it.

    Arguments:
        samples: of any models, caches and tasks.
        seed: of the bootstrap.
    """
    entries = list(dict.fromkeys(x.entry for x in samples))
    lines = []
    for task in dict.fromkeys(x.task for x in samples):
        own = [x for x in samples if x.task == task]
        for name, part in _parts(task, own):
            for measure in _measures(task, own):
                by_entry = {e: {x.key: x for x in part if x.entry == e} for e in entries}
                first = by_entry[entries[0]]
                for entry, those in by_entry.items():
                    if not those:
                        continue
                    difference = None
                    if entry != entries[0]:
                        difference = paired(measure, first, those, seed)
                    estimate = interval(measure, list(those.values()), seed)
                    lines.append(
                        EvaluationLine(name, measure, entry, estimate, difference, len(those))
                    )
    return lines


def _measures(task: str, samples: list[Sample]) -> Sequence[Measure]:
    if not task.startswith(LM_EVAL):
        return MEASURES.get(task, (ERROR,))
    shares = [Measure(x, x, None, percent=True) for x in SHARES if x in samples[0].values]
    return [*shares, WORDS] if "nats" in samples[0].values else shares


def _parts(task: str, samples: list[Sample]) -> list[tuple[str, list[Sample]]]:
    """A task's samples, and if they are of several kinds those of each by its own name."""
    key = _PARTS.get(task, "split")
    parts = []
    for kind in dict.fromkeys(x.cell.get(key) for x in samples):
        name = f"{task}, n = {kind}" if key == "needles" else f"{task}, {kind}"
        own = [x for x in samples if x.cell.get(key) == kind]
        parts.append((task if kind is None else name, own))
    if key == "split" or (key == "domain" and len(parts) == 1):
        return parts
    whole = (f"{task}, mean of domains" if key == "domain" else task, samples)
    return [whole, *parts] if len(parts) > 1 else [whole]


def interval(measure: Measure, samples: Sequence[Sample], seed: int = 0) -> Interval:
    """A measure of samples with its 95 % interval.

    Arguments:
        measure: what they add up to.
        samples: of one model; each must have the measure's values.
        seed: of the bootstrap, where that is needed.
    """
    cells = _cells(measure, samples)
    (tops, _), *others = cells
    if measure.percent and not others and np.isin(tops, (0, 1)).all():
        return Interval(float(tops.mean()), *wilson(int(tops.sum()), len(tops)))
    return _bootstrap(measure, [cells], seed)


def paired(
    measure: Measure, first: dict[str, Sample], second: dict[str, Sample], seed: int = 0
) -> Interval | None:
    """By how much the second's measure differs from the first's, on samples that both have.

    Both are resampled together, so that what makes a sample easy or hard for both does not count.

    Arguments:
        measure: what samples add up to.
        first, second: samples by key.
        seed: of the bootstrap.

    Returns:
        second less first; `None` if they share no sample with the same question.
    """
    keys = [key for key, x in first.items() if key in second and second[key].digest == x.digest]
    if not keys:
        return None
    both = [_cells(measure, [samples[key] for key in keys]) for samples in (first, second)]
    difference = _bootstrap(measure, both, seed)
    if difference.low == difference.high == 0:  # alike on every sample: nothing says how sure
        return Interval(difference.value, math.nan, math.nan)
    return difference


def _bootstrap(measure: Measure, models: Sequence[_Cells], seed: int) -> Interval:
    """The last model's measure less the first's, or of one model the measure itself."""
    values = [_value(measure, cells) for cells in models]
    value = float(values[-1] - values[0]) if values[1:] else float(values[0])
    if min(len(top) for top, _ in models[0]) < LEAST:
        return Interval(value, math.nan, math.nan)
    # The same draws for both: each begins anew from the seed.
    drawn = [_value(measure, cells, np.random.default_rng(seed)) for cells in models]
    low, high = np.percentile(drawn[-1] - drawn[0] if drawn[1:] else drawn[0], [2.5, 97.5])
    return Interval(value, float(low), float(high))


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % score interval of a share.

    (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n) with p = right / count and z = 1.96.

    Arguments:
        right: how many of them.
        count: at least one.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    share, square = right / count, _Z**2 / count
    middle = (share + square / 2) / (1 + square)
    reach = _Z * math.sqrt(share * (1 - share) / count + square / count / 4) / (1 + square)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _cells(measure: Measure, samples: Sequence[Sample]) -> _Cells:
    """Numerators and denominators of each cell, cells in order of appearance.

    Shares of cells of one size are one cell: their mean is the share of all.
    """
    sums: dict[str, tuple[list[float], list[float]]] = {}
    for x in samples:
        top, bottom = sums.setdefault(str(x.cell), ([], []))
        top.append(x.values[measure.top])
        bottom.append(1.0 if measure.bottom is None else x.values[measure.bottom])
    cells = [(np.array(top), np.array(bottom)) for top, bottom in sums.values()]
    if measure.percent and len({len(top) for top, _ in cells}) == 1:
        tops, bottoms = zip(*cells, strict=True)
        return [(np.concatenate(tops), np.concatenate(bottoms))]
    return cells


def _value(
    measure: Measure, cells: _Cells, rng: np.random.Generator | None = None
) -> np.ndarray | np.floating:
    """The measure, or with a generator what it is in as many resamples as `RESAMPLES`."""
    values = []
    for top, bottom in cells:
        if rng is None:
            tops, bottoms = top.sum(), bottom.sum()
        else:
            count, parts, remaining = len(top), [], RESAMPLES
            while remaining:
                size = min(remaining, max(1, _AT_ONCE // count))
                times = rng.multinomial(count, np.full(count, 1 / count), size=size)
                parts.append((times @ top, times @ bottom))
                remaining -= size
            tops, bottoms = (np.concatenate(x) for x in zip(*parts, strict=True))
        with np.errstate(over="ignore"):  # of a model that knows nothing of the text
            values.append(measure.of(tops / bottoms))
    return np.mean(values, axis=0)


def labels(entries: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Models and their caches for readers; models by the last part of their names if it is
    unique."""
    entries = list(dict.fromkeys(entries))
    models = {model for model, _ in entries}
    short = {model: PurePath(model).name or model for model in models}
    if len(set(short.values())) < len(models):
        short = {model: model for model in models}
    return {
        (model, cache): f"{short[model]}, {cache}" if cache else short[model]
        for model, cache in entries
    }


def evaluated_table(
    lines: Sequence[EvaluationLine], format: Literal["text", "markdown", "html"] = "text"
) -> str:
    """The lines as a table; differences from the first model only where there are others."""
    others = any(line.difference is not None or line.entry != lines[0].entry for line in lines)
    head = ["task", "measure", "model", "value", "95 %", *["difference", "95 %"] * others]
    body, names = [], labels(line.entry for line in lines)
    for line in lines:
        cells = [line.task, line.measure.name, names[line.entry]]
        cells += _formatted(line.measure, line.estimate)
        if others and line.entry == lines[0].entry:
            cells += ["", ""]
        elif others and line.difference is None:
            cells += ["other samples", "–"]
        elif others:
            value, ends = _formatted(line.measure, line.difference, "+")
            sure = line.difference.low > ROUNDED or line.difference.high < -ROUNDED
            cells += [value + "*" * sure, ends]
        body.append((*cells, str(line.samples)))
    return format_table([*head, "samples"], body, format, words=3)


def _formatted(measure: Measure, estimate: Interval, sign: str = "") -> list[str]:
    if measure.percent:
        value, low, high = (f"{100 * x:{sign}.1f}" for x in estimate)
    else:
        value, low, high = (f"{x:{sign}{'.4g' if abs(x) >= 1e5 else '.3f'}}" for x in estimate)
    unit = " %" if measure.percent and not sign else ""
    return [value + unit, f"({low} to {high})" if math.isfinite(estimate.low) else "–"]


def harness_table(
    harness: dict[str, dict[str, dict[str, float]]],
    format: Literal["text", "markdown", "html"] = "text",
) -> str:
    """The results of lm-evaluation-harness, with its own standard errors; empty without any."""
    body, names = [], labels((model, "") for model in harness)
    for model, tasks in harness.items():
        for task, numbers in tasks.items():
            about = (names[model, ""], f"{numbers.get('samples', 0):.0f}")
            for measure in numbers:
                if "_stderr" not in measure and measure != "samples":
                    error = numbers.get(f"{measure}_stderr", math.nan)
                    spread = f"± {error:.4f}" if math.isfinite(error) else "–"
                    value = (about[0], f"{numbers[measure]:.4f}", spread, about[1])
                    body.append((f"lm-eval: {task}", measure, *value))
    head = ("task", "measure", "model", "value", "standard error", "samples")
    body.sort(key=lambda row: row[:2])
    return format_table(head, body, format, words=3) if body else ""
