"""Every example runs, without a network (conftest.py refuses one)."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def test_there_are_six_short_examples():
    assert len(EXAMPLES) == 6
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # Only look_at_a_map takes an argument, the folder for its picture.
    arguments = ["."][: path.name == "look_at_a_map.py"]
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
    written = sorted(made.name for made in tmp_path.iterdir())
    assert written == ["selective.png"] * (path.name == "look_at_a_map.py")
