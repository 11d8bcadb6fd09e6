"""Answers of models, sample by sample: one JSON line each."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from heedful.checks import UserError
from heedful.files import append_line, read_each


@dataclass(frozen=True)
class Sample:
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

    def __post_init__(self) -> None:
        for name in ("model", "cache", "task", "key", "digest", "identity"):
            if not isinstance(getattr(self, name), str):
                raise UserError(f"{name} must be a text, got {getattr(self, name)!r}")
        for name in ("cell", "values", "curve"):
            if not isinstance(getattr(self, name), dict):
                raise UserError(f"{name} must be an object, got {getattr(self, name)!r}")
        for name, value in self.values.items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise UserError(f"values must be numbers, got {value!r} for {name}")

    @property
    def entry(self) -> tuple[str, str]:
        """The model and what its cache may hold."""
        return self.model, self.cache

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Sample":
        """The sample that `to_json` wrote; anything else raises a `ValueError`."""
        try:
            return cls(**json.loads(line))
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UserError(f"not the fields of a sample: {error}") from error


def append_samples(path: str | Path, samples: Iterable[Sample]) -> None:
    """Add lines to `path` in one write, as `heedful.files.append_line` does."""
    append_line(path, "\n".join(sample.to_json() for sample in samples))


def read_samples(path: str | Path) -> list[Sample]:
    """Read the samples that `heedful eval` wrote; none where there is no file.

    A last line that was cut off is left out with a warning.

    Raises:
        ValueError: if any other line is not a sample; names the file and the line.
    """
    if not Path(path).is_file():
        return []
    return [sample for _, sample in read_each(path, Sample.from_json, "a sample")]
