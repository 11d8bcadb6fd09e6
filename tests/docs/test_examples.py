"""Every example runs, without a network (conftest.py refuses one)."""

import runpy
import sys

import pytest

from helpers import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


ARGUMENTS = {
    "look_at_a_map.py": ["."],  # the folder for its picture
    "smaller_cache.py": ["--steps", "2", "--length", "64"],
}
WRITTEN = {
    "look_at_a_map.py": ["selective.png"],
    "smaller_cache.py": ["base", "base.json", "selective"],
}


def test_there_are_seven_short_examples():
    assert len(EXAMPLES) == 7
    assert all(len(path.read_text().splitlines()) < 70 for path in EXAMPLES)


LONG = ("smaller_cache.py",)


@pytest.mark.parametrize(
    "path",
    [pytest.param(x, marks=[pytest.mark.slow] * (x.name in LONG), id=x.name) for x in EXAMPLES],
)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ARGUMENTS.get(path.name, [])
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    names = sorted(path_out.name for path_out in tmp_path.iterdir())
    assert names == WRITTEN.get(path.name, [])
