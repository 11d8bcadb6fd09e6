"""What the command lines of these scripts share."""

import argparse
import functools
from collections.abc import Callable


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
