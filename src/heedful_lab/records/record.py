"""Results of training runs, under small caches, and answers of models."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from heedful.checks import UserError
from heedful_lab.records.store import Entry, Points, read_numbered

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
"""Measures of a run, as written for a reader."""

HIGHER_IS_BETTER = frozenset({"fact_recall", "fact_precision", "bleu", "rouge_l"})
"""Of all others lower is better."""

SHARES = frozenset(
    {"error", "token_error", "answer_error", "fact_error", "fact_recall", "fact_precision"}
)
"""Those that lie in 0..1 and are shown in percent."""


@dataclass(frozen=True)
class Record(Entry):
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

    KIND: ClassVar[str] = "a record"

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
        super().__post_init__()
        if self.metric not in METRICS:
            raise UserError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if self.metric not in self.final and not self.splits:
            raise UserError(
                f"final must hold a value of the metric {self.metric!r}, under that name or under "
                f"the name of an evaluation split, got {self.final!r}"
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


def read_records(path: str | Path) -> list[Record]:
    """The records of a `results.jsonl`.

    A last line that was cut off is left out with a warning.

    Raises:
        ValueError: if any other line is not a record; names the file and the line.
    """
    return [record for _, record in read_numbered(path, Record)]


WHOLE = "whole"
"""The policy of a cache that keeps everything."""


@dataclass(frozen=True)
class UnderBudget(Entry):
    """One trained model's score under one policy and budget.

    Arguments:
        task, mechanism, seed: which run's model.
        policy: name of the policy, or `WHOLE`.
        tokens: how many each layer may hold.
        length: tokens of a sequence.
        metric: what `final` measures, lower is better.
        final: value by evaluation split, the judged one first.
        peak_bytes: the most that the caches of one sequence held, measured from their tensors.
        bf16_bytes: of a full cache of the same tokens in bfloat16, keys and values without reserve.
        rows: how many sequences were scored.
        environment: commit, machine, versions, date and command.
    """

    KIND: ClassVar[str] = "a score"

    task: str
    mechanism: str
    seed: int
    policy: str
    tokens: int
    length: int
    metric: str
    final: dict[str, float]
    peak_bytes: float
    bf16_bytes: int
    rows: int
    environment: dict

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        return self.task, self.mechanism, self.seed, self.policy, self.tokens

    @property
    def compression(self) -> float:
        """Ratio of the full bfloat16 cache to the peak of this one."""
        return self.bf16_bytes / self.peak_bytes

    @property
    def value(self) -> float:
        """Value that it is judged by."""
        return next(iter(self.final.values()))


@dataclass(frozen=True)
class Sample(Entry):
    """One model's answer to one sample of a task.

    Arguments:
        model: its name.
        cache: what its cache may hold, such as `"streaming-llm 256"`; `""` is everything.
        task: such as `"needles"`.
        key: names the sample within its task.
        digest: of the exact question.
        cell: what the sample is one of several of, such as `{"length": 1024}`.
        values: numbers by name: `right` (0 or 1), `error`, or `nats` with `tokens` and `bytes`.
        reply: what was written, where something was.
        expected: what is right, where it is a text.
        identity: of the model, with its adapter, and of its cache; empty in older files.
    """

    KIND: ClassVar[str] = "a sample"

    model: str
    cache: str
    task: str
    key: str
    digest: str
    cell: dict
    values: dict[str, float]
    reply: str | None = None
    expected: str | None = None
    curve: dict[str, list[float]] = field(default_factory=dict)
    identity: str = ""

    @property
    def entry(self) -> tuple[str, str]:
        """The model and what its cache may hold."""
        return self.model, self.cache
