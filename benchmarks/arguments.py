"""Numbers on the command lines of these scripts."""

import argparse


def count(word: str) -> int:
    """A whole number of at least 1, as the `type` of an argument."""
    if word.isdecimal() and int(word) >= 1:
        return int(word)
    raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {word!r}")
