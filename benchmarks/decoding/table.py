"""The tables of cached decoding: time per token and bytes."""

from pathlib import Path

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"


def decoding(only: int | None = None, path: Path = RESULTS / "decoding-cpu.jsonl") -> str:
    """Milliseconds per decoded token and bytes of the cache, beside the unconverted model's."""
    records = read(path)
    head = ["model and cache", "context", "ms / token", "× unconverted", "MiB cached", "MiB peak"]
    lines = [
        [
            r["way"], f"{r['context']:,}", f"{r['ms_per_token']:.1f}", f"{r['ratio']:.2f} ×",
            f"{r['bytes'] / 2**20:.1f}", f"{r['peak_bytes'] / 2**20:.1f}",
        ]
        for r in records
        if only in (None, r["context"])
    ]  # fmt: skip
    first = records[0]
    about = (
        f"A Llama of random weights with {first['layers']} layers, width {first['hidden']}, "
        f"{first['heads']} heads, fp32, one sequence; medians of {first['rounds']} rounds taken "
        "in turn."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


BLOCKS = {
    "decoding": decoding,
    "decoding-short": lambda: decoding(8192),
    "decoding-grouped": lambda: decoding(path=RESULTS / "decoding-grouped-cpu.jsonl"),
}
