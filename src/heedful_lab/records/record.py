"""Finished training runs, one JSON line each."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from heedful.checks import UserError
from heedful.files import append_line, read_each

METRICS = {
    "error": "error",
    "token_error": "token error",
    "answer_error": "answer error",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "loss": "loss",
    "fact_error": "fact error",
    "fact_recall": "fact recall",
    "fact_precision": "fact precision",
    "bleu": "BLEU",
    "rouge_l": "ROUGE-L",
}
"""What a run can be measured by, as written for a reader."""

HIGHER_IS_BETTER = frozenset({"fact_recall", "fact_precision", "bleu", "rouge_l"})
"""Of all others lower is better."""

SHARES = frozenset(
    {"error", "token_error", "answer_error", "fact_error", "fact_recall", "fact_precision"}
)
"""Those that lie in 0..1 and are shown in percent."""

Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Record:
    """One finished training run: what was trained, what it cost and how it ended.

    Arguments:
        task: name of the task, such as `"blocks"`.
        mechanism: name of the mechanism, such as `"standard"`.
        seed: the seed of this run.
        metric: what `curve` and `final` measure, a key of `METRICS`; errors lie in 0..1.
        steps: optimiser steps; `batch`: sequences in each.
        parameters: trained parameters of the model.
        final: value at the end by evaluation split (`"in-distribution"`, `"4x-bits"`) or, for a
            further measure of the same run, by metric name (`"bits_per_byte"`).
        curve: `(step, metric on the evaluation set)` in the order of training.
        loss_curve: `(step, training loss)` likewise.
        tokens_per_second: training throughput; `seconds`: wall time of training.
        peak_memory_mib: highest memory in use while training, in MiB: what torch had allocated on
            `"cuda"`; elsewhere the whole process, with interpreter and libraries.
        config: what else is needed to repeat the run.
        environment: commit, machine, versions, date and command.
        device: where it was trained, such as `"cpu"` or `"cuda"`; `None` in older records.
    """

    task: str
    mechanism: str
    seed: int
    metric: str
    steps: int
    batch: int
    parameters: int
    final: dict[str, float]
    curve: Points = ()
    loss_curve: Points = ()
    tokens_per_second: float = math.nan
    seconds: float = math.nan
    peak_memory_mib: float = math.nan
    config: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("task", "mechanism", "metric"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} must be a text, got {getattr(self, name)!r}")
        if self.metric not in METRICS:
            raise UserError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        for name in ("seed", "steps", "batch", "parameters"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"{name} must be a whole number, 0 or more, got {value!r}")
        for name in ("final", "config", "environment"):
            if not isinstance(getattr(self, name), dict):
                raise UserError(f"{name} must be an object, got {getattr(self, name)!r}")
        if not isinstance(self.device, str | None):
            raise UserError(f"device must be a text or null, got {self.device!r}")
        # One form whatever was given, and JSON null back to nan, so that a round trip is equal.
        for name in ("curve", "loss_curve"):
            object.__setattr__(self, name, _points(name, getattr(self, name)))
        for name in ("tokens_per_second", "seconds", "peak_memory_mib"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        final = {str(name): _number("final", value) for name, value in self.final.items()}
        object.__setattr__(self, "final", final)
        if self.metric not in final and not self.splits:
            raise UserError(
                f"final must hold a value of the metric {self.metric!r}, under that name or under "
                f"the name of an evaluation split, got {final!r}"
            )

    @property
    def splits(self) -> dict[str, float]:
        """The values of `final` that belong to an evaluation split."""
        return {name: value for name, value in self.final.items() if name not in METRICS}

    @property
    def value(self) -> float:
        """The value a run is judged by: `final[metric]`, or else that of the first split."""
        if self.metric in self.final:
            return self.final[self.metric]
        return next(iter(self.splits.values()))

    def to_json(self) -> str:
        """The record as one line of JSON without the newline; what is not finite becomes null."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Record":
        """The record that `to_json` wrote; unknown and missing fields raise."""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"not JSON: {getattr(error, 'msg', error)}") from error
        if not isinstance(data, dict):
            raise UserError(f"a record must be a JSON object, got {type(data).__name__}")
        fields = dataclasses.fields(cls)
        if unknown := sorted(data.keys() - {f.name for f in fields}):
            raise UserError(f"a record has no field {', '.join(unknown)}")
        missing = dataclasses.MISSING
        needed = {f.name for f in fields if f.default is f.default_factory is missing}
        if absent := sorted(needed - data.keys()):
            raise UserError(f"a record needs {', '.join(absent)}")
        return cls(**data)


def _number(name: str, value) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(f"{name} must be a number or null, got {value!r}")
    return float(value)


def _points(name: str, values) -> Points:
    try:
        pairs = [(step, value) for step, value in values]
    except (TypeError, ValueError):
        raise UserError(f"{name} must be pairs of step and value, got {values!r:.40}") from None
    for step, _ in pairs:
        if not isinstance(step, int) or isinstance(step, bool):
            raise UserError(f"{name} must count steps in whole numbers, got {step!r}")
    return tuple((step, _number(name, value)) for step, value in pairs)


def _finite(value):
    """`value` as JSON can hold it: nan and infinity as None, whatever is foreign as its text."""
    if isinstance(value, dict):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def append_record(path: str | Path, record: Record) -> None:
    """Add one line to `path`, as `heedful.files.append_line` does."""
    append_line(path, record.to_json())


def read_records(path: str | Path) -> list[Record]:
    """The records of a `results.jsonl`.

    A last line that was cut off is left out with a warning.

    Raises:
        ValueError: if any other line is not a record; names the file and the line.
    """
    return [record for _, record in read_numbered(path)]


def read_numbered(path: str | Path) -> list[tuple[int, Record]]:
    """As `read_records`, each record with the number of its line."""
    return read_each(path, Record.from_json, "a record")
