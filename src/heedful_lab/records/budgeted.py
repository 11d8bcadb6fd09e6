"""Scores of trained models under small KV caches, one JSON line each."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from heedful.checks import UserError
from heedful.files import append_line, read_each

WHOLE = "whole"
"""The policy of a cache that keeps everything."""


@dataclass(frozen=True)
class UnderBudget:
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

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "UnderBudget":
        """The score that `to_json` wrote; anything else raises a `ValueError`."""
        try:
            fields = json.loads(line)
            if "peak_bytes" in fields and "bf16_bytes" not in fields:
                raise UserError(
                    "a score of an older version, without bf16_bytes; name another folder to score "
                    "the models again"
                )
            return cls(**fields)
        except (TypeError, RecursionError) as error:
            raise UserError(f"not the fields of a score: {error}") from error


def append_budgeted(path: str | Path, score: UnderBudget) -> None:
    """Add one line to `path`, as `heedful.files.append_line` does."""
    append_line(path, score.to_json())


def read_budgeted(path: str | Path) -> list[UnderBudget]:
    """Read the scores that `compare --budgets` wrote; none where there is no file.

    A last line that was cut off is left out with a warning.

    Raises:
        ValueError: if any other line is not a score; names the file and the line.
    """
    if not Path(path).is_file():
        return []
    return [score for _, score in read_each(path, UnderBudget.from_json, "a score")]
