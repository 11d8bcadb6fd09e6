"""Writes or checks `docs/api.md`, the reference of the public names, from their docstrings.

python docs/api.py [--check]
"""

import argparse
import inspect
import re
import sys
from difflib import unified_diff
from pathlib import Path

import heedful
from heedful import eviction
from heedful.training import sequences as token_rows
from heedful.training import trainer

PAGE = Path(__file__).with_suffix(".md")
PARTS = {
    "Operators": (
        heedful,
        "multi_token_attention selective_attention differential_attention grouped_attention "
        "summarise Visibility Groups Summaries SelectiveOutput",
    ),
    "Mechanisms": (
        heedful,
        "Standard LocalGlobal MultiToken TalkingHeads Selective Differential DifferentialV2 "
        "Grouped KnockingHeads Canon InterleavedHeads",
    ),
    "Models": (heedful, "convert Conversion revert load register look LayerLook"),
    "Caches": (heedful, "new_cache KVCache"),
    "Eviction": (eviction, " ".join(eviction.__all__)),
    "Training": (heedful, "MemoryLoss GroupingLoss"),
    "Training: rows and Trainer": (trainer, "parameter_groups LayerTrainer"),
    "Training: text as rows": (token_rows, "encode TrainingSequences EvaluationSequences"),
}
INTRODUCTION = """# Reference

Every public name with what its docstring says; made by `python docs/api.py`. The pages that explain: [multi-token](multi-token.md), [selective](selective.md), [differential](differential.md), [grouped](grouped.md), [converting](converting.md), [generating](generating.md), [training](train.md).
"""  # noqa: E501


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    page = written()
    if not args.check:
        PAGE.write_text(page)
        return 0
    before = PAGE.read_text() if PAGE.exists() else ""
    sys.stdout.writelines(
        unified_diff(before.splitlines(True), page.splitlines(True), "docs/api.md", "now", n=0)
    )
    return int(before != page)


def written() -> str:
    parts = [INTRODUCTION]
    for title, (room, names) in PARTS.items():
        parts.append(f"## {title}\n")
        for name in names.split():
            if callable(thing := getattr(room, name)):
                parts.append(entry(room.__name__, name, thing))
    return "\n".join(parts)


def entry(room: str, name: str, thing: object) -> str:
    """A name with its signature, its docstring, and of a class its public methods."""
    signature = plain(str(inspect.signature(thing)))
    lines = [f"### {room}.{name}\n", f"`{name}{signature}`\n"]
    lines.append(rendered(inspect.getdoc(thing) or ""))
    if inspect.isclass(thing):
        for method, value in vars(thing).items():
            function = getattr(value, "__func__", value)
            public = not method.startswith("_") and inspect.isfunction(function)
            about = public and (inspect.getdoc(function) or "").strip()
            if about:
                lines.append(f"`.{method}{plain(str(inspect.signature(function)))}`\n")
                lines.append(rendered(about))
    return "\n".join(lines)


def plain(signature: str) -> str:
    """Without the paths of modules, which say nothing to a reader."""
    signature = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", signature)
    return signature.replace("NoneType", "None").replace("(self, ", "(").replace("(self)", "()")


def rendered(text: str) -> str:
    """A docstring as Markdown: its sections are bold, its arguments a list."""
    found = []
    for line in text.splitlines():
        section = re.fullmatch(r"(Arguments|Returns|Raises|Source|Sources):(.*)", line)
        item = re.fullmatch(r"    (\w[\w, *`.]*): (.*)", line)
        if section:
            found += ["", f"**{section[1]}.**{section[2]}", ""]
        elif item:
            found.append(f"- `{item[1]}`: {item[2]}")
        elif line.startswith("        "):
            found.append(f"  {line.strip()}")
        else:
            found.append(line.strip() if line.startswith("    ") else line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(found)).strip() + "\n"


if __name__ == "__main__":
    sys.exit(main())
