"""The public workflows: no action that can change, no permission that is not needed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT

ZIZMOR = Path(sys.executable).with_name("zizmor")


@pytest.mark.skipif(not ZIZMOR.exists(), reason="zizmor has no wheel for this platform")
def test_the_linter_reports_nothing(tmp_path):
    def lint(folder: Path) -> subprocess.CompletedProcess:
        command = [ZIZMOR, "--offline", "--no-progress", folder]
        return subprocess.run(command, capture_output=True, text=True)

    workflows = ROOT / ".github" / "workflows"
    process = lint(workflows)
    assert process.returncode == 0 and "No findings" in process.stdout + process.stderr, (
        process.stdout
    )

    shutil.copytree(workflows, tmp_path / "workflows")
    file = tmp_path / "workflows" / "tests.yml"
    file.write_text(file.read_text().replace("permissions: {}\n", "permissions: write-all\n"))
    assert lint(tmp_path / "workflows").returncode != 0  # it does look
