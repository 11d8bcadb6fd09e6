"""The tables of trained models under small caches."""

from pathlib import Path

from benchmarks.parts import markdown, origin, provenance, read
from benchmarks.small_caches.teach import WITH_MEMORY_LOSS
from heedful_lab.commands.compare.findings import budget_tables
from heedful_lab.records import WHOLE, UnderBudget

RESULTS = Path(__file__).parent / "results"
TEXT = RESULTS / "caches-text-cpu.jsonl"
BF16_NBYTES = {"text": 2 * 4 * 2 * 128, "recall": 2 * 2 * 2 * 64}
"""Bytes of a token in a full bfloat16 cache: layers, keys and values, channels. The
oldest records do not have it."""


def bf16_bytes(record: dict) -> int:
    """Bytes of a full cache of the same tokens in bfloat16, without reserve."""
    return record.get("bf16_bytes") or BF16_NBYTES[record["task"]] * record["length"]


def scores(path: Path) -> list[UnderBudget]:
    """The scores of a file."""
    return [UnderBudget(**{"bf16_bytes": bf16_bytes(x), **x}) for x in read(path)]


def caches(path: Path) -> str:
    """Trained models under small caches: every policy at every budget."""
    scored = scores(path)
    rows = dict.fromkeys(f"{x.rows} sequences of {x.length} tokens" for x in scored)
    tables = "\n\n".join(f"{x.title}:\n\n{markdown(x.head, x.body)}" for x in budget_tables(scored))
    return (
        f"{tables}\n\nOn the evaluation set "
        f"({', '.join(rows)}), token by token; lower is better. In brackets: × smaller than "
        "bf16, the bytes of a full cache of the same tokens in bf16 without reserve, divided by "
        "the peak of the model's caches, which are float32.\n\n"
        f"{origin([x.environment for x in scored])}"
    )


def taught(name: str) -> str:
    """Models that were fine-tuned after their training, and from what."""
    records = read(RESULTS / f"{name}-cpu.jsonl")
    head = [
        "begun with",
        "becomes",
        "sequences",
        "rate × its own",
        "memory loss",
        "before",
        "after",
    ]
    lines = []
    for r in records:
        command = r["environment"]["command"].split()
        metric = "answer_error" if r["task"] == "recall" else "perplexity"
        scores = [r[when][metric] for when in ("before", "after")]
        cells = [f"{100 * x:.1f} %" if r["task"] == "recall" else f"{x:.2f}" for x in scores]
        loss = f"{r['memory_loss']:g}" if r["mechanism"] in WITH_MEMORY_LOSS else "–"
        lines.append([
            f"`{r['from']}`", f"`{command[command.index('--to') + 1]}`",
            f"{r['steps']:,} × {r['batch']} of {r['length']:,}",
            f"{r['rate']:g} × {r['mechanism_rate']:g}", loss, *cells,
        ])  # fmt: skip
    about = "Evaluation set: wrong answers, or perplexity per token, with the full cache."
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def caches_short() -> str:
    """The full cache and the smallest one of every text model, with its best policy there."""
    scored = scores(TEXT)
    lines = []
    for name in dict.fromkeys(x.mechanism for x in scored):
        own = [x for x in scored if x.mechanism == name]
        least = min(x.tokens for x in own if not x.policy.startswith("searched"))
        small = min((x for x in own if x.tokens == least), key=lambda x: x.value)
        searched = [x for x in own if x.policy.startswith("searched")]
        for x in [*(x for x in own if x.policy == WHOLE), small, *searched]:
            cache = (
                f"all {x.length} tokens" if x.policy == WHOLE else f"{x.policy}, {x.tokens} tokens"
            )
            cache = cache.replace(f", {x.tokens} tokens", " tokens") if x in searched else cache
            lines.append([name, cache, f"{x.value:.2f}", f"{x.compression:.1f} ×"])
    return markdown(["model", "cache of each layer", "perplexity", "× smaller than bf16"], lines)


def equal_bytes(name: str) -> str:
    """Every policy with the tokens that fit into shares of the standard model's full cache."""
    records = read(RESULTS / f"equal-{name}-cpu.jsonl")
    shares = sorted({x["share"] for x in records if x["share"] is not None}, reverse=True)
    values = {(x["model"], x["policy"], x["share"]): _value(x) for x in records}
    lines = []
    for model, policy in dict.fromkeys((x["model"], x["policy"]) for x in records):
        cells = [values.get((model, policy, share), "–") for share in shares]
        bounded = next((x for x in records if (x["policy"], x["share"]) == (policy, None)), None)
        if bounded is not None:
            policy = policy.replace("Bounded ", "Bounded, ε = ")
            ratio = bf16_bytes(bounded) / bounded["peak_bytes"]
            cells.append(f"{_value(bounded)} ({ratio:.1f} ×)")
        else:
            cells.append("–")
        lines.append([model, policy, *cells])
    full = bf16_bytes(records[0]) / records[0]["measure"]
    head = [f"{full / share:.1f} ×" for share in shares]
    table = markdown(["model", "eviction", *head, "by its error"], lines)
    about = "Columns: × smaller than bf16, of all that a model's caches take at their peak."
    return f"{table}\n\n{about}\n\n{provenance(records)}"


def _value(record: dict) -> str:
    """Value that a record is judged by."""
    value = next(iter(record["final"].values()))
    return f"{value:.2f}" if record["metric"] == "perplexity" else f"{100 * value:.1f} %"


BLOCKS = {
    "equal-recall": lambda: equal_bytes("recall"),
    "equal-taught": lambda: taught("equal-taught"),
    "equal-text": lambda: equal_bytes("text"),
    "equal-text-taught": lambda: taught("equal-text-taught"),
    "caches-text": lambda: caches(TEXT),
    "caches-recall": lambda: caches(RESULTS / "caches-recall-cpu.jsonl"),
    "caches-short": caches_short,
    "caches-recall-long": lambda: caches(RESULTS / "caches-recall-1024-cpu.jsonl"),
    "caches-mta-selective": lambda: caches(RESULTS / "caches-mta-selective-cpu.jsonl"),
    "taught-mta-selective": lambda: taught("taught-mta-selective"),
    "retrofit": lambda: caches(RESULTS / "retrofit-cpu.jsonl"),
    "retrofit-long": lambda: caches(RESULTS / "retrofit-1024-cpu.jsonl"),
    "taught": lambda: taught("taught"),
}
