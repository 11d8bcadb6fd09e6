"""The toy table of the multi-token paper at a small size, the published one beside it."""

from pathlib import Path

from benchmarks.parts import markdown, provenance, read, spread

RESULTS = Path(__file__).parent / "results"
COLUMNS = [(letters, answer) for letters in (5, 8) for answer in ("all", "first", "last")]
PUBLISHED = {
    "standard, dropout left on": ("51.6 ± 43.1", "78.2 ± 1.5", "1.3 ± 0.4", "31.2 ± 50.3",
                                  "28.9 ± 24.9", "58.4 ± 46.8"),
    "mta": ("0.1 ± 0.1", "0.0 ± 0.0", "0.0 ± 0.0", "0.1 ± 0.0", "0.0 ± 0.0", "0.0 ± 0.0"),
}  # fmt: skip
"""Errors in percent of Golovneva et al., arXiv 2504.00927, table 1, over three seeds."""


def toy(path: Path = RESULTS / "toy-cpu.jsonl") -> str:
    """Wrong answers about blocks of letters, with dropout off and left on."""
    records = read(path)
    head = ["error", "seeds", *(f"N = {letters}, {answer}" for letters, answer in COLUMNS)]
    body = []
    for name in sorted({r["name"] for r in records}, reverse=True):  # standard first
        rows = [
            [r for r in records if (r["name"], r["letters"], r["answer"]) == (name, *column)]
            for column in COLUMNS
        ]
        counts = [len(those) for those in rows if those]
        seeds = " to ".join(map(str, sorted({min(counts), max(counts)})))
        for label, value in (
            (name, lambda r: r["final"]["in-distribution"]),
            (f"{name}, dropout left on", lambda r: r["with_dropout"]),
        ):
            cells = [spread([*map(value, those)], share=True) if those else "–" for those in rows]
            body.append([label, seeds, *cells])
    body += [
        [f"published: {name}", "3", *(f"{x} %" for x in cells)]
        for name, cells in PUBLISHED.items()
    ]  # fmt: skip
    first = records[0]
    size = first["size"]
    steps = {(r["letters"], r["answer"]): r["steps"] for r in records}
    least = min(steps.values())
    longer = "".join(
        f" ({steps[c]:,} where N = {c[0]}, {c[1]})" for c in COLUMNS if steps.get(c, least) != least
    )
    about = (
        f"Models {size['hidden']} wide with {size['layers']} layers and {size['heads']} heads, "
        f"sequences of {first['blocks']} blocks, {least:,} steps of "
        f"{first['budget']['batch']} sequences{longer}; published (arXiv 2504.00927, "
        "table 1): 256 wide with 4 layers and 2 heads, about 50 blocks, 100,000 steps of 64 "
        "sequences."
    )
    return f"{markdown(head, body)}\n\n{about}\n\n{provenance(records)}"


BLOCKS = {"toy": toy}
