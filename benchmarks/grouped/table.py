"""The tables of grouped attention: what it is worth, beside its controls, and what it costs."""

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.parts import markdown, provenance, read, spread

RESULTS = Path(__file__).parent / "results"
TEXT, RECALL = RESULTS / "grouped-text-cpu.jsonl", RESULTS / "grouped-recall-cpu.jsonl"
PAIRS, COST = RESULTS / "grouped-pairs-cpu.jsonl", RESULTS / "grouped-cost-cpu.jsonl"
MEMORY = RESULTS / "grouped-memory-cpu.jsonl"
BF16 = "× smaller than bf16"
STEP = ("a step: MiB", "CPU seconds")
STEP_NOTE = " A step of training was measured in a process of its own (`grouped-memory-cpu.jsonl`)."
WRONG = {"translate": "sentences wrong", "summarise": "facts wrong"}


def text() -> str:
    """Perplexity per byte of every grouping and refinement, with what its attention takes."""
    columns = {
        "perplexity per byte": lambda rows: spread([r["final"]["held-out"] for r in rows]),
        "first eighth of the sequence": lambda rows: (
            f"{mean(r['loss_by_position'][0] for r in rows):.3f}"
        ),
        "last eighth": lambda rows: f"{mean(r['loss_by_position'][-1] for r in rows):.3f}",
    }
    about = "Sequences of 256 bytes, {steps} steps. The columns by position are nats per byte."
    return grid(TEXT, columns, about)


def recall() -> str:
    """Wrong answers of every grouping and refinement, begun with a model that knows the task."""
    splits = {"in-distribution": "answers wrong", "dormant": "dormant", "recent": "recent"}
    columns = {
        title: lambda rows, split=split: spread([r["final"][split] for r in rows], share=True)
        for split, title in splits.items()
    }
    about = (
        "Sequences of 256 tokens, {steps} steps on from the weights of standard attention that has "
        "learnt the task."
    )
    return grid(RECALL, columns, about)


def grid(path: Path, columns: dict[str, Callable], about: str) -> str:
    """A row for every kind of attention: what it scored, then what it takes."""
    records = read(path)
    head = [
        "attention", "seeds", *columns, "groups of a sequence", "score pairs per query",
        BF16, *STEP,
    ]  # fmt: skip
    whole = next(r for r in records if r["name"] == "full attention")["whole_nbytes"]
    body = []
    for name in dict.fromkeys(r["name"] for r in records):
        rows = [r for r in records if r["name"] == name]
        groups = [mean(r["groups"]["decoder"]) for r in rows if r["groups"]]
        pairs = mean(mean(r["pairs"]["decoder"]) for r in rows) / 256
        body.append([
            name, str(len(rows)), *(column(rows) for column in columns.values()),
            f"{mean(groups):.1f}" if groups else "", f"{pairs:.0f}",
            _compression(rows, whole), *step_of(rows[0]),
        ])  # fmt: skip
    notes = (
        f"{about.format(**records[0])} Compression: keys and values of all tokens in bf16 without "
        f"reserve, divided by the bytes of the float32 cache with its reserve.{STEP_NOTE}"
    )
    return f"{markdown(head, body)}\n\n{notes}\n\n{provenance(records)}"


def pairs() -> str:
    """Encoder-decoders on tasks with a source and a target."""
    records = read(PAIRS)
    head = [
        "task", "attention", "seeds", "score", "pairs of a sequence: encoder", "decoder", "cross",
        BF16, *STEP,
    ]  # fmt: skip
    body = []
    for task, name in dict.fromkeys((r["task"], r["name"]) for r in records):
        rows = [r for r in records if (r["task"], r["name"]) == (task, name)]
        full = next(r for r in records if r["task"] == task and r["name"] == "full attention")
        share = rows[0]["metric"] != "perplexity"
        score = spread([next(iter(r["final"].values())) for r in rows], share)
        roles = (mean(mean(r["pairs"][x]) for r in rows) for x in ("encoder", "decoder", "cross"))
        body.append([
            task, name, str(len(rows)), f"{score} {WRONG.get(task, 'perplexity')}",
            *(f"{x:.0f}" for x in roles),
            _compression(rows, full["whole_nbytes"]),
            *step_of(rows[0]),
        ])  # fmt: skip
    notes = (
        "A sentence with any wrong token is wrong; the perplexity is that of missing spans. Pairs "
        "are means over 16 evaluation sequences and the layers."
        f"{STEP_NOTE}"
    )
    return f"{markdown(head, body)}\n\n{notes}\n\n{provenance(records)}"


def cost() -> str:
    """Seconds, memory and score pairs of the operator beside SDPA's."""
    records = read(COST)
    full = {r["tokens"]: r["cache_bytes"] for r in records if r["way"] == "sdpa"}
    head = [
        "tokens", "attention", "forward s", "gain", "with backward s", "gain", "peak MiB",
        "score pairs per query", BF16, "cache MiB, float32",
    ]  # fmt: skip
    body = [
        [
            f"{r['tokens']:,}", r["way"], f"{r['forward_s']:.3f}", f"{r['forward_gain']:.2f} ×",
            f"{r['backward_s']:.3f}", f"{r['backward_gain']:.2f} ×", f"{r['peak_mib']:.0f}",
            f"{r['pairs'] / r['tokens']:.0f}", f"{full[r['tokens']] / 2 / r['cache_bytes']:.1f} ×",
            f"{r['cache_bytes'] / 2**20:.1f}",
        ]
        for r in records
    ]  # fmt: skip
    first = records[0]
    about = (
        f"One operator, {first['heads']} heads of {first['dim']}, fp32, one sequence, groups of "
        f"{first['size']}, window {first['window']}; medians of rounds taken in turn. Gains are "
        "SDPA's time over ours; bytes of a cache are counted here, without reserve."
    )
    return f"{markdown(head, body)}\n\n{about}\n\n{provenance(records)}"


def _compression(rows: list[dict], whole_nbytes: float) -> str:
    """Ratio of a full cache in bfloat16, half of its float32 bytes, to the cache."""
    return f"{whole_nbytes / 2 / mean(r['cache_nbytes'] for r in rows):.1f} ×"


def step_of(record: dict) -> tuple[str, ...]:
    """Peak memory and processor seconds of a step of training, if they were measured."""
    for line in read(MEMORY):
        if (line["task"], line["name"]) == (record["task"], record["name"]):
            return f"{line['step_peak_mib']:.0f}", f"{line['step_cpu_seconds']:.2f}"
    return "–", "–"


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


BLOCKS = {
    "grouped-text": text,
    "grouped-recall": recall,
    "grouped-cost": cost,
    "grouped-pairs": pairs,
}
