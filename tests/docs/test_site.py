"""The documentation as a site: every page in its navigation, every link and anchor whole."""

import os
import re
import subprocess
import sys

from helpers import ROOT


def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "not included in the" not in done.stderr  # a page that the navigation lacks
    page = (tmp_path / "site" / "converting" / "index.html").read_text()
    headings = re.findall(r"^## ", (ROOT / "docs" / "converting.md").read_text(), re.MULTILINE)
    assert page.count("<h2 id=") == len(headings)
