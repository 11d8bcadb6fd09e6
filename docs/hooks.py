"""What the documentation's site takes from outside of `docs/`: README, studies, diary.

Hooks of mkdocs. On GitHub pages link to each other by where they lie; on the site `docs/` is the
root, so links are moved by as much.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "dev/*.md", "benchmarks/**/README.md")


def on_files(files, config):
    """Adds the pages; README is the first one."""
    pages = {"index.md": ROOT / "README.md"}
    for pattern in OUTSIDE:
        pages |= {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob(pattern)}
    for name, path in pages.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links of this page, by where their targets are on the site; only names of other files.

    Words behind the language of a code block, which our tests read, are left out.
    """
    here = Path(page.file.abs_src_path).parent
    markdown = re.sub(r"^```(\w+) .*$", r"```\1", markdown, flags=re.MULTILINE)
    pages = {file.src_uri for file in files}

    def moved(match: re.Match) -> str:
        name, target, anchor = match[1], match[2], match[3] or ""
        path = (here / target).resolve()
        if path == ROOT / "README.md":
            where = "index.md"
        elif path.is_relative_to(ROOT / "docs"):
            where = path.relative_to(ROOT / "docs").as_posix()
        else:
            where = path.relative_to(ROOT).as_posix()
        if where not in pages:
            return name
        up = "../" * page.file.src_uri.count("/")
        return f"[{name}]({up}{where}{anchor})"

    return re.sub(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)", moved, markdown)
