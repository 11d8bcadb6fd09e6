"""What every table of results is made of: cells in a row, where they come from, what is missing."""

import html
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read(path: Path) -> list[dict]:
    """The records of a file; none where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; the first column is of words."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def spread(found: Sequence[float], share: bool = False, digits: int | None = None) -> str:
    """Mean and standard deviation of the seeds; shares in percent."""
    values, unit = [100 * x if share else x for x in found], " %" if share else ""
    digits = (1 if share else 2) if digits is None else digits
    more = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{more}{unit}"


def missing(path: Path) -> str:
    """What stands in the place of a table whose results are not there."""
    return (
        f"*No results yet: `benchmarks/results/{path.name}` is missing. `benchmarks/README.md` has "
        "the command that makes it.*"
    )


def made(records: Sequence[dict]) -> str:
    """Where records come from."""
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
