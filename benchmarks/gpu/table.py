"""What a call launches and moves on a GPU, counted without one."""

from pathlib import Path

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"


def counted() -> str:
    """Launches and bytes at both shapes, and the estimate beside FlashAttention's."""
    records = read(RESULTS / "counted.jsonl")
    head = ["mechanism", "shape", "launches", "GB moved", "ms, estimated", "FlashAttention 2, ms"]
    lines = [
        [
            r["mechanism"],
            f"{r['batch']} × {r['heads']} × {r['tokens']:,} × {r['dim']}",
            f"{r['launches']:,}",
            f"{r['nbytes'] / 1e9:.1f}",
            f"{r['estimated_ms']:.1f}",
            f"{r['flash_ms']:g}",
        ]
        for r in records
    ]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


BLOCKS = {"counted": counted}
