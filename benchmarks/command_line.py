"""What these scripts share: their command lines, and reading the results that are there."""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

from heedful.records.files import read_each


def count(word: str) -> int:
    """A whole number of at least 1, as the `type` of an argument."""
    if word.isdecimal() and int(word) >= 1:
        return int(word)
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {word!r}")


def command(main: Callable[[], None]) -> Callable[[], None]:
    """A script's `main` that ends with the message of what was wrong, without a traceback."""

    @functools.wraps(main)
    def run() -> None:
        try:
            main()
        except (ValueError, OSError) as error:
            raise SystemExit(str(error)) from None

    return run


def lines(path: Path) -> list[dict]:
    """The lines of a results file, none where there is no file; one that was cut off is left out.

    Raises:
        ValueError: any other line is not JSON; names the file and the line.
    """
    found = read_each(path, json.loads, "a result") if path.exists() else []
    return [line for _, line in found]
