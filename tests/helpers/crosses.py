"""Which cases the usual suites run: of a cross a cover, and not what takes minutes to interpret."""

import zlib
from collections.abc import Container, Iterable
from itertools import combinations
from operator import contains

import pytest


def exhausting(*values):
    """A case that the usual suites leave out."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def usually(cases: Iterable[tuple], *few: Container) -> list:
    """Of pairs the usual suites run those with one of the few values of either axis."""
    return [x if any(map(contains, few, x)) else exhausting(*x) for x in cases]


def leave_covers(items: list[pytest.Item]) -> None:
    """Of a cross (`@pytest.mark.crossed`) what is not in its cover is marked as exhaustive.

    Of `@pytest.mark.sampled(n)` n cases, evenly spread, are usual, and the others slow.
    """
    for cases in _cases(items, "crossed"):
        usual = cover([set(map(repr, case.callspec.params.items())) for case in cases])
        for at, case in enumerate(cases):
            if at not in usual:
                case.add_marker(pytest.mark.exhaustive)
    for cases in _cases(items, "sampled"):
        count = cases[0].get_closest_marker("sampled").args[0]
        usual = {n * len(cases) // count for n in range(count)}
        for at, case in enumerate(cases):
            if at not in usual:
                case.add_marker(pytest.mark.slow)


def _cases(items: list[pytest.Item], marker: str) -> list[list[pytest.Function]]:
    """Cases of each test with this marker that the usual suites would run."""
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        rare = any(item.get_closest_marker(name) for name in ("slow", "exhaustive"))
        if item.get_closest_marker(marker) and not rare:
            tests.setdefault((item.location[0], item.originalname), []).append(item)
    return [*tests.values()]


def in_share(name: str, number: int, shares: int) -> bool:
    """Whether a test is in one of as many shares: in one and the same, whatever else is run."""
    return zlib.crc32(name.encode()) % shares == number - 1


def cover(cases: list[set[str]]) -> set[int]:
    """Which few cases together have every pair of values that any has; of two axes, all cases.

    Of all cases the one with most that is new comes first, and so on.
    """
    parts = [set(combinations(sorted(case), min(len(case), 2))) for case in cases]
    missing, sample = set().union(*parts), set()
    while missing:
        best = max(range(len(parts)), key=lambda at: len(parts[at] & missing))
        sample.add(best)
        missing -= parts[best]
    return sample
