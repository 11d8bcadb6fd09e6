"""The notebooks are those of the pages, cell by cell, and their cells run."""

import json
import runpy

import pytest

from helpers import ROOT
from helpers.small_models import small, tokenizer_of_words

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SCRIPT = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def test_the_committed_notebooks_are_those_of_the_pages(tmp_path):
    SCRIPT["main"](tmp_path)
    assert [path.name for path in NOTEBOOKS] == sorted(path.name for path in tmp_path.iterdir())
    for path in NOTEBOOKS:
        same = path.read_text() == (tmp_path / path.name).read_text()
        assert same, "run python docs/notebooks.py"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_its_first_cell_to_its_last(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small(positions=8192).save_pretrained(tmp_path / HUB)  # a folder of that name: no network
    tokenizer_of_words(chat=True).save_pretrained(tmp_path / HUB)
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    namespace: dict = {"__name__": "notebook"}
    for cell in cells:
        exec("".join(cell["source"]), namespace)
    assert len(cells) >= 1
