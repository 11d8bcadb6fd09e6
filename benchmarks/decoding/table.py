"""The tables of cached decoding: time per token and bytes."""

from pathlib import Path

from benchmarks.parts import made, markdown, read

RESULTS = Path(__file__).parent / "results"


def decoding(only: int | None = None, path: Path = RESULTS / "decoding-cpu.jsonl") -> str:
    """Milliseconds per decoded token and bytes held, beside the unconverted model's."""
    records = read(path)
    head = ["model and cache", "context", "ms / token", "× unconverted", "MiB held", "MiB peak"]
    lines = [
        [
            r["way"], f"{r['context']:,}", f"{r['ms_per_token']:.1f}", f"{r['ratio']:.2f} ×",
            f"{r['bytes'] / 2**20:.1f}", f"{r['peak_bytes'] / 2**20:.1f}",
        ]
        for r in records
        if only in (None, r["context"])
    ]  # fmt: skip
    one = records[0]
    about = (
        f"A Llama of random weights with {one['layers']} layers, width {one['hidden']}, "
        f"{one['heads']} heads, fp32, one row; medians of {one['rounds']} rounds taken in turn."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{made(records)}"


BLOCKS = {
    "decoding": decoding,
    "decoding-short": lambda: decoding(8192),
    "decoding-grouped": lambda: decoding(path=RESULTS / "decoding-grouped-cpu.jsonl"),
}
