"""Scores of trained models under small KV caches, one JSON line each."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

WHOLE = "whole"
"""The policy of a cache that keeps everything."""


@dataclass(frozen=True)
class UnderBudget:
    """One trained model's score under one policy and budget.

    Arguments:
        task, mechanism, seed: which run's model.
        policy: name of the policy, or `WHOLE`.
        tokens: how many each layer may hold.
        length: tokens of a row.
        metric: what `final` measures, lower is better.
        final: value by evaluation split, the judged one first.
        peak_bytes: the most that the caches of one row held, measured from their tensors.
        rows: how many rows were scored.
        environment: commit, machine, versions, date and command.
    """

    task: str
    mechanism: str
    seed: int
    policy: str
    tokens: int
    length: int
    metric: str
    final: dict[str, float]
    peak_bytes: float
    rows: int
    environment: dict

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        return self.task, self.mechanism, self.seed, self.policy, self.tokens

    @property
    def value(self) -> float:
        """What it is judged by."""
        return next(iter(self.final.values()))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Self:
        return cls(**json.loads(line))


def read_budgeted(path: Path) -> list[UnderBudget]:
    """What `compare --budgets` wrote; a line that was cut off by a crash is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(UnderBudget.from_json(line))
        except (ValueError, TypeError):
            continue
    return found
