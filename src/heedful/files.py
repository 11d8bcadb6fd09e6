"""Files that are there whole or not at all."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place and move it there, so that no reader meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Write records as JSON lines, whole or not at all."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))
