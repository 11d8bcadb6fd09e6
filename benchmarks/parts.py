"""Common parts of the studies: their command lines, reading records, and a table's parts."""

import argparse
import html
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from heedful.files import read_each
from heedful_lab.tasks import TASKS, Task

ROOT = Path(__file__).parent.parent


def command_line(doc: str, *, new: bool = False) -> argparse.ArgumentParser:
    """The command line of a script with this docstring, which writes into `--out`.

    new: refuse a file that is there.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=_new_file if new else Path, required=True)
    return parser


def _new_file(word: str) -> Path:
    if Path(word).exists():
        raise argparse.ArgumentTypeError(f"{word} is there already; name another file")
    return Path(word)


def positive(word: str) -> int:
    """A whole number of at least 1, as the type of an option."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {word}")
    return int(word)


def add_task_options(parser: argparse.ArgumentParser, default: str) -> None:
    """The options of a study that reads sequences of `text` or `recall`."""
    parser.add_argument("--task", choices=("text", "recall"), default=default)
    parser.add_argument("--data", nargs="+", default=())
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--length", type=int)


def task_of(args: argparse.Namespace) -> Task:
    """The task that these options name."""
    return TASKS[args.task].default(tuple(args.data)).cut(args.length, args.tokenizer)


def read(path: Path) -> list[dict]:
    """The records of a complete file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; the first column is of words."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def spread(results: Sequence[float], share: bool = False, digits: int | None = None) -> str:
    """Mean and standard deviation of the seeds; shares in percent."""
    values, unit = [100 * x if share else x for x in results], " %" if share else ""
    digits = (1 if share else 2) if digits is None else digits
    more = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{more}{unit}"


def provenance(records: Sequence[dict]) -> str:
    """Provenance of records."""
    return origin([record["environment"] for record in records])


def origin(environments: Sequence[dict]) -> str:
    """Command, commit, machine, versions and date of some results; many commands fold away."""

    def several(values) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value))

    versions = (
        f"{name} {version}"
        for each in environments
        for name, version in each.get("versions", {}).items()
        if name in ("torch", "transformers")
    )
    dates = sorted(each["date"][:10] for each in environments)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    threads = sorted({each["threads"] for each in environments})
    where = (
        f"at commit {several(each.get('commit') or 'unknown' for each in environments)} on "
        f"{several(each['machine'] for each in environments)} with "
        f"{' or '.join(map(str, threads))} thread{'s' * (threads != [1])}, {several(versions)}, "
        f"{days}."
    )
    commands = list(dict.fromkeys(each["command"] for each in environments))
    if len(commands) == 1:
        return f"*Made by `{commands[0]}` {where}*"
    listed = html.escape("\n".join(commands), quote=False)
    return (
        f"<details><summary><i>Made by {len(commands)} commands {where}</i></summary>\n"
        f"<pre>\n{listed}\n</pre>\n</details>"
    )


def read_partial(path: Path) -> list[dict]:
    """The records that a run has written so far: none without a file, a cut-off line left out.

    Raises:
        ValueError: any other line is not JSON; names the file and the line.
    """
    entries = read_each(path, json.loads, "a result") if path.exists() else []
    return [line for _, line in entries]


def check_same(path: Path, about: dict) -> None:
    """Stop where a file has lines of a run with other options."""
    for line in read_partial(path):
        for name, value in about.items():
            if line.get(name, value) != value:
                raise SystemExit(
                    f"--out {path} has lines with {name} {line[name]}, and this run has {value}; "
                    "name another file"
                )
