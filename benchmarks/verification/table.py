"""The table of what the proof of a conversion costs."""

from pathlib import Path

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"


def verification() -> str:
    """Seconds of a conversion with and without the proof."""
    records = read(RESULTS / "verification-cpu.jsonl")
    ways = list(records[0]["seconds"])
    head = ["parameters", *(f"{way}, s" for way in ways)]
    lines = [
        [f"{r['parameters'] / 1e6:,.0f} M", *(f"{r['seconds'][way]:.2f}" for way in ways)]
        for r in records
    ]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


BLOCKS = {"verification": verification}
