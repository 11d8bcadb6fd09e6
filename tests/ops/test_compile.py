"""Law 13: custom operators are well-formed, and everything compiles whole; see compiled.py."""

import json
import subprocess
import sys

import pytest

from helpers import ROOT
from helpers.compiled import CHECKS

# Of the rest the operator of mta alone takes half a minute.
USUAL = ("operator softmax", "whole graph softmax", "whole graph mta-full")


@pytest.fixture(scope="module")
def problems(request) -> dict[str, str | None]:
    mine = [x for x in request.session.items if getattr(x, "originalname", "") == "test_compile"]
    checks = [x.callspec.params["check"] for x in mine]
    program = [sys.executable, "-m", "helpers.compiled", *checks]
    process = subprocess.run(program, cwd=ROOT / "tests", capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line["problem"] for line in lines}


@pytest.mark.parametrize(
    "check", [x if x in USUAL else pytest.param(x, marks=pytest.mark.slow) for x in CHECKS]
)
def test_compile(problems, check):
    assert problems[check] is None, problems[check]
