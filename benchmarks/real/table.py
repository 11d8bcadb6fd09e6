"""The table of a pretrained model under small caches."""

import statistics
from pathlib import Path

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"
STOCK = "smollm2"


def real_cache() -> str:
    """Perplexity, needles and bytes of every policy, beside the base with its whole cache."""
    records = read(RESULTS / "cache-1024-cpu.jsonl")
    whole = next(r for r in records if r["model"] == STOCK and r["policy"] == "whole")
    head = ["model", "policy", "tokens", "perplexity", "needles", "peak, MB", "bytes, 1 /"]
    lines = [
        [
            "stock" if r["model"] == STOCK else Path(r["model"]).name,
            r["policy"],
            str(r["tokens"]),
            f"{r['perplexity']:.2f} ({r['perplexity'] / whole['perplexity'] - 1:+.1%})",
            f"{statistics.mean(r['needles'].values()):.0%}",
            f"{r['peak_nbytes'] / 1e6:.1f}",
            f"{whole['peak_nbytes'] / r['peak_nbytes']:.1f}",
        ]
        for r in sorted(records, key=lambda r: (r["model"] != STOCK, r["model"], -r["tokens"]))
    ]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


BLOCKS = {"real-cache": real_cache}
