"""Every example runs as a user runs it, in a process of its own, without a network."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

OFFLINE = """
import runpy, socket, sys
def refuse(self, address):
    raise AssertionError(f"an example tried to reach {address}")
socket.socket.connect = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_there_are_six_short_examples():
    assert len(EXAMPLES) == 6
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path):
    # Only look_at_a_map takes an argument, the folder for its picture.
    command = [sys.executable, "-c", OFFLINE, str(path), *["."][: path.name == "look_at_a_map.py"]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    written = sorted(made.name for made in tmp_path.iterdir())
    assert written == ["selective.png"] * (path.name == "look_at_a_map.py")
