"""Converted models compile whole, for every length; see compiled_models.py."""

import json
import subprocess
import sys

import pytest

from helpers import ROOT


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    program = [sys.executable, "-m", "helpers.compiled_models"]
    process = subprocess.run(program, cwd=ROOT / "tests", capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line["problem"] for line in lines}


@pytest.mark.slow
def test_every_check_of_a_compiled_model(problems):
    assert len(problems) == 16
    wrong = {check: problem for check, problem in problems.items() if problem is not None}
    assert not wrong, "\n".join(f"{check}: {problem}" for check, problem in wrong.items())
