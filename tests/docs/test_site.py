"""The documentation as a site: every page in its navigation, every link and anchor whole."""

import os
import re
import subprocess
import sys

import heedful
from helpers import ROOT


def test_the_site_builds_without_a_warning(tmp_path):
    process = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert "not included in the" not in process.stderr  # a page that the navigation lacks
    page = (tmp_path / "site" / "converting" / "index.html").read_text()
    headings = re.findall(r"^## ", (ROOT / "docs" / "converting.md").read_text(), re.MULTILINE)
    assert page.count("<h2 id=") == len(headings)
    reference = (tmp_path / "site" / "reference" / "index.html").read_text()
    names = re.findall(r"^::: (\S+)", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE)
    assert all(f'<h3 id="{name}"' in reference for name in names)
    public = set(heedful.__all__) - {"__version__"}
    assert public <= {name.rpartition(".")[2] for name in names}
    assert reference.count("Raises:") > 20
