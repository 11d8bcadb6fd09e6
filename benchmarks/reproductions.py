"""The tables of the papers that are made again at a small size, with theirs beside ours."""

from pathlib import Path

from table_parts import RESULTS, made, markdown, missing, read, spread

TOY, LONG_CONTEXT = RESULTS / "toy-cpu.jsonl", RESULTS / "long-context-cpu.jsonl"
COLUMNS = [(letters, answer) for letters in (5, 8) for answer in ("all", "first", "last")]
PUBLISHED = {
    "standard, dropout left on": ("51.6 ± 43.1", "78.2 ± 1.5", "1.3 ± 0.4", "31.2 ± 50.3",
                                  "28.9 ± 24.9", "58.4 ± 46.8"),
    "mta": ("0.1 ± 0.1", "0.0 ± 0.0", "0.0 ± 0.0", "0.1 ± 0.0", "0.0 ± 0.0", "0.0 ± 0.0"),
}  # fmt: skip
"""Errors in percent of Golovneva et al., arXiv 2504.00927, table 1, over three seeds."""


def toy(path: Path = TOY) -> str:
    """Wrong answers about blocks of letters, with dropout off and left on."""
    records = read(path)
    if not records:
        return missing(path)
    head = ["error", "seeds", *(f"N = {letters}, {answer}" for letters, answer in COLUMNS)]
    body = []
    for name in dict.fromkeys(r["name"] for r in records):
        rows = [
            [r for r in records if (r["name"], r["letters"], r["answer"]) == (name, *column)]
            for column in COLUMNS
        ]
        seeds = str(min(map(len, rows)))
        for said, value in (
            (name, lambda r: r["final"]["in-distribution"]),
            (f"{name}, dropout left on", lambda r: r["with_dropout"]),
        ):
            found = [spread([*map(value, those)], share=True) if those else "–" for those in rows]
            body.append([said, seeds, *found])
    body += [
        [f"published: {name}", "3", *(f"{x} %" for x in found)]
        for name, found in PUBLISHED.items()
    ]  # fmt: skip
    one = records[0]
    about = (
        f"Rows of {one['blocks']} blocks, {one['steps']:,} steps; published (arXiv 2504.00927, "
        "table 1): about 50 blocks, 100,000 steps."
    )
    return f"{markdown(head, body)}\n\n{about}\n\n{made(records)}"


def long_context(path: Path = LONG_CONTEXT) -> str:
    """Last words, and needles after a lesson, by model."""
    records = read(path)
    if not records:
        return missing(path)
    columns = list(dict.fromkeys((r["task"], r["measure"]) for r in records))
    titles = [f"last words, {measure}" if task == "lambada" else task for task, measure in columns]
    body = []
    for name in dict.fromkeys(r["name"] for r in records):
        cells = [name]
        for task, measure in columns:
            found = [
                r for r in records
                if (r["name"], r["task"], r["measure"]) == (name, task, measure)
            ]  # fmt: skip
            share = measure == "accuracy"
            said = spread([r["value"] for r in found], share)
            if len(found) == 1:
                ends = [spread([found[0][end]], share) for end in ("low", "high")]
                said += f" ({ends[0]} to {ends[1]})".replace(" % to", " to")
            cells.append(said)
        body.append(cells)
    taught = next(r for r in records if "steps" in r)
    seeds = len({r["seed"] for r in records if "seed" in r})
    about = (
        f"Last words with 95 % intervals. Needles: right answers after {taught['steps']} steps of "
        f"a lesson; {seeds} orders of it."
    )
    return f"{markdown(['model', *titles], body)}\n\n{about}\n\n{made(records)}"
