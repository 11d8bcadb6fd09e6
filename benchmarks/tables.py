"""Fill the marked blocks of the documentation from the studies' results.

`python -m benchmarks.tables` writes them, `python -m benchmarks.tables --check` only says which
ones are out of date (exit status 1). A study is a folder with a `table.py`; its `BLOCKS` say what
fills the block of each name.
"""

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/*.md", "benchmarks/*/README.md")


def blocks() -> dict[str, Callable[[], str]]:
    """Functions that fill each marked block, by name."""
    studies = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/table.py"))
    tables = [importlib.import_module(f"benchmarks.{study}.table") for study in studies]
    return {name: make for table in tables for name, make in table.BLOCKS.items()}


def filled(text: str, makers: dict[str, Callable[[], str]]) -> str:
    """A page with every marked block made anew."""
    for name, make in makers.items():
        begin, end = f"<!-- begin:{name} -->", f"<!-- end:{name} -->"
        if begin in text:
            body = f"{begin}\n{make()}\n{end}"
            text = re.sub(f"{begin}.*?{end}", lambda _, body=body: body, text, flags=re.DOTALL)
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the blocks, or with `--check` say which pages are out of date."""
    if unknown := [argument for argument in arguments if argument != "--check"]:
        print(f"unknown argument {unknown[0]}; there is only --check", file=sys.stderr)
        return 2
    stale = 0
    makers = blocks()
    for page in sorted(page for pattern in PAGES for page in ROOT.glob(pattern)):
        text, new = page.read_text(), filled(page.read_text(), makers)
        if new != text:
            stale += 1
            print(f"{page.relative_to(ROOT)}: {'out of date' if arguments else 'filled'}")
            if not arguments:
                page.write_text(new)
    return 1 if stale and arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
