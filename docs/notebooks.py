"""Make the notebooks of `examples/notebooks/` from pages whose blocks the tests run.

`python docs/notebooks.py [FOLDER]`: text becomes a cell of text, a Python block a cell of code.
"""

import json
import re
import sys
from pathlib import Path

PAGES = ("operators", "quickstart", "inspecting")
DOCS = Path(__file__).parent


def main(folder: Path) -> None:
    """Write every notebook into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        text = (DOCS / f"{name}.md").read_text()
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook(text), indent=1) + "\n")


def notebook(page: str) -> dict:
    """A page as a notebook; links stay as words, as the notebook lies elsewhere."""
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```$", page, flags=re.M | re.S)):
        code = number % 2 == 1
        text = part.strip() if code else _apart(part)
        if text:
            more = {"execution_count": None, "outputs": []} if code else {}
            kind = "code" if code else "markdown"
            lines = text.splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": lines}
            cells.append(cell | more)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _apart(text: str) -> str:
    text = text.replace("](pictures/", "](../../docs/pictures/")
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text).strip()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS.parent / "examples" / "notebooks")
