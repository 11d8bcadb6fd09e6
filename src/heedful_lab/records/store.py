"""Files of results, one JSON line for each entry of one type; they only grow."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, TypeVar

from heedful.checks import UserError
from heedful.files import append_line, read_each

Points = tuple[tuple[int, float], ...]
"""Steps with their values."""


@dataclass(frozen=True)
class Entry:
    """One line: its fields are texts, whole numbers, numbers (null is nan), objects or points.

    A field of another type raises and is named. A subclass gives its name in messages as `KIND`.
    """

    KIND: ClassVar[str]

    def __post_init__(self) -> None:
        # One form whatever was given, so that a round trip is equal.
        for field in dataclasses.fields(self):
            value = _checked(field.name, field.type, getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    def to_json(self) -> str:
        """The entry as one line of JSON without the newline; what is not finite becomes null."""
        return json.dumps(_finite(dataclasses.asdict(self)), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """The entry that `to_json` wrote; unknown and missing fields raise."""
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"not JSON: {getattr(error, 'msg', error)}") from error
        if not isinstance(data, dict):
            raise UserError(f"{cls.KIND} must be a JSON object, got {type(data).__name__}")
        fields = dataclasses.fields(cls)
        if unknown := sorted(data.keys() - {f.name for f in fields}):
            raise UserError(f"{cls.KIND} has no field {', '.join(unknown)}")
        missing = dataclasses.MISSING
        needed = {f.name for f in fields if f.default is f.default_factory is missing}
        if absent := sorted(needed - data.keys()):
            raise UserError(
                f"{cls.KIND} needs {', '.join(absent)}; if an older version wrote it without, name "
                "another folder"
            )
        return cls(**data)


Kind = TypeVar("Kind", bound=Entry)


def append(path: str | Path, *entries: Entry) -> None:
    """Add lines to `path` in one write, as `heedful.files.append_line` does."""
    append_line(path, "\n".join(entry.to_json() for entry in entries))


def read(path: str | Path, kind: type[Kind]) -> list[Kind]:
    """The entries of a file; none where there is no file.

    A last line that was cut off is left out with a warning.

    Raises:
        ValueError: if any other line is not one; names the file and the line.
    """
    return [entry for _, entry in read_numbered(path, kind)] if Path(path).is_file() else []


def read_numbered(path: str | Path, kind: type[Kind]) -> list[tuple[int, Kind]]:
    """The entries of a file that is there, each with the number of its line."""
    return read_each(path, kind.from_json, kind.KIND)


def _checked(name: str, kind: object, value):
    if kind is str and not isinstance(value, str):
        raise UserError(f"{name} must be a text, got {value!r}")
    if kind == str | None and not isinstance(value, str | None):
        raise UserError(f"{name} must be a text or null, got {value!r}")
    if kind is int and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UserError(f"{name} must be a whole number, 0 or more, got {value!r}")
    if (kind is dict or getattr(kind, "__origin__", None) is dict) and not isinstance(value, dict):
        raise UserError(f"{name} must be an object, got {value!r}")
    if kind == dict[str, float]:
        return {str(key): _number(name, number) for key, number in value.items()}
    if kind == Points:
        return _points(name, value)
    return _number(name, value) if kind is float else value


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
