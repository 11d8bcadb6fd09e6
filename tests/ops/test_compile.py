"""Law 13: custom operators are well-formed, and everything compiles whole; see compiled.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import CHECKS


@pytest.fixture(scope="module")
def problems() -> dict[str, str | None]:
    program = Path(__file__).with_name("compiled.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line["problem"] for line in lines}


@pytest.mark.parametrize("check", CHECKS)
def test_compile(problems, check):
    assert problems[check] is None, problems[check]
