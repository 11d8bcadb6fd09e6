"""The suite itself and the sources' docstrings: covers leave out nothing, every test asserts."""

import ast
import re
import tomllib
import warnings
from collections.abc import Iterator
from itertools import combinations, product

import pytest

from helpers import ROOT
from helpers.crosses import cover, in_share

TESTS = sorted((ROOT / "tests").rglob("test_*.py"))
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_every_pair_of_values_is_covered():
    axes = {"mechanism": range(9), "family": range(17), "dtype": range(2)}
    cases = [
        {f"{axis}={value}" for axis, value in zip(axes, values, strict=True)}
        for values in product(*axes.values())
    ]
    sample = cover(cases)

    def pairs(numbers) -> set:
        return {pair for at in numbers for pair in combinations(sorted(cases[at]), 2)}

    assert pairs(sample) == pairs(range(len(cases)))
    assert len(sample) == 9 * 17  # of 306: as many as the two longest axes have pairs


def test_of_two_axes_all_cases_are_the_cover():
    cases = [{f"a={a}", f"b={b}"} for a in range(5) for b in range(3)]
    assert cover(cases) == set(range(15))


def test_what_fits_only_one_is_kept():
    assert cover([{"a=1", "b=1"}, {"a=1", "b=2"}, {"a=1", "b=1"}]) == {0, 1}
    assert cover([{"a=1"}, {"a=2"}, {"a=1"}]) == {0, 1}


def test_every_test_is_in_one_share():
    names = [f"tests/a.py::test_it[{n}]" for n in range(1400)]
    shares = [[x for x in names if in_share(x, number, 14)] for number in range(1, 15)]
    assert sorted(x for share in shares for x in share) == sorted(names)
    assert all(60 < len(share) < 140 for share in shares)


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    nodes = list(function.body)
    while nodes:
        node = nodes.pop()
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            nodes += ast.iter_child_nodes(node)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.relative_to(ROOT / "tests")))
def test_no_test_returns_early_or_imports_from_a_test(path):
    tree = ast.parse(path.read_text())
    modules = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
    assert not [name for name in modules if name.split(".")[-1].startswith("test_")]
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            early = [x.lineno for x in own_nodes(function) if isinstance(x, ast.Return)]
            assert not early, f"{function.name} returns in line {early}: it passes untested"


def test_docstrings_begin_with_a_noun_or_a_verb():
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for path in SOURCES:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and re.match(r"(What|How|Which|Whether|Where|Who|When)\b", text):
                found.append(f"{name}: {text.splitlines()[0]}")
    assert SOURCES
    assert not found, "\n".join(found)


def test_every_law_names_tests_that_exist():
    rows = re.findall(r"^\| (\d+) \| .* \| (.+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 36))
    for number, tests in rows:
        names = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
        assert names, f"law {number} names no test"
        for path, name in names:
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.M), f"{path}::{name}"


def test_future_warnings_are_errors():
    """Law 28, in this environment; the oldest transformers has one of its own."""
    filters = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert "error::FutureWarning" in filters["filterwarnings"]
    with pytest.raises(FutureWarning, match="later"):
        warnings.warn("later", FutureWarning, stacklevel=1)
