"""The tables of cached decoding: time per token and compression."""

from pathlib import Path

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"
BASE = "unconverted, its own cache"


def decoding(only: int | None = None, path: Path = RESULTS / "decoding-cpu.jsonl") -> str:
    """Milliseconds per decoded token and bytes of the cache, beside the base model's."""
    records = read(path)
    head = [
        "model and cache", "context", "ms per token", "× base model", "× smaller than bf16",
        "peak MiB, float32",
    ]  # fmt: skip
    # The base model's own cache has no reserve, and two bytes of bfloat16 for four.
    bf16 = {r["context"]: r["bytes"] / 2 for r in records if r["way"] == BASE}
    lines = [
        [
            r["way"].replace(BASE, "base, its own cache"), f"{r['context']:,}",
            f"{r['ms_per_token']:.1f}", f"{r['ratio']:.2f} ×",
            f"{bf16[r['context']] / r['peak_bytes']:.1f} ×", f"{r['peak_bytes'] / 2**20:.1f}",
        ]
        for r in records
        if only in (None, r["context"])
    ]  # fmt: skip
    first = records[0]
    about = (
        f"A Llama of random weights with {first['layers']} layers, width {first['hidden']}, "
        f"{first['heads']} heads, fp32, one sequence; medians of {first['rounds']} rounds taken "
        "in turn. Compression: a full cache of the same tokens in bf16 without reserve, divided by "
        "the peak."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


BLOCKS = {
    "decoding": decoding,
    "decoding-short": lambda: decoding(8192),
    "decoding-flash": lambda: decoding(path=RESULTS / "decoding-flash-cpu.jsonl"),
    "decoding-grouped": lambda: decoding(path=RESULTS / "decoding-grouped-cpu.jsonl"),
}
