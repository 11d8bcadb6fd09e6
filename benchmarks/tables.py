"""Fill the marked blocks of the documentation from `benchmarks/results`.

`python benchmarks/tables.py` writes them, `python benchmarks/tables.py --check` only says which
ones are out of date (exit status 1).
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import grouped_tables
import reproductions
import training_tables
from table_parts import RESULTS, ROOT, made, markdown, missing, origin, spread

from heedful.commands.bench.cases import PEERS
from heedful.commands.bench.options import sizes
from heedful.commands.compare.findings import RULE, configurations, findings, summarise, table
from heedful.commands.compare.small_cache_tables import tables as budget_tables
from heedful.records import read_records
from heedful.records.budgeted import WHOLE, read_budgeted

COMPARE, OPERATORS = RESULTS / "compare-cpu.jsonl", RESULTS / "operators-cpu.jsonl"
TEXT, LONGER = RESULTS / "text-cpu.jsonl", RESULTS / "text-1600-cpu.jsonl"
TILED = RESULTS / "operators-tiled-cpu.jsonl"
HALF = RESULTS / "operators-cpu-bf16.jsonl"
SMALL_TEXT, SMALL_RECALL = RESULTS / "caches-text-cpu.jsonl", RESULTS / "caches-recall-cpu.jsonl"
LONG_RECALL, TAUGHT = RESULTS / "caches-recall-1024-cpu.jsonl", RESULTS / "taught-cpu.jsonl"
RETROFIT, DECODING = RESULTS / "retrofit-cpu.jsonl", RESULTS / "decoding-cpu.jsonl"
LONG_RETROFIT = RESULTS / "retrofit-1024-cpu.jsonl"
DECODING_GROUPED = RESULTS / "decoding-grouped-cpu.jsonl"
PAIRS, ASSIGNMENT = RESULTS / "pairs-cpu.jsonl", RESULTS / "assignment-cpu.jsonl"
MAGIC_NUMBERS = RESULTS / "magic-numbers-cpu.jsonl"
VERIFICATION = RESULTS / "verification-cpu.jsonl"


def blocks() -> dict[str, Callable[[], str]]:
    """What fills each marked block, by name."""
    return {
        "compare": compare,
        "assignment": lambda: by_split(ASSIGNMENT),
        "magic-numbers": lambda: by_split(MAGIC_NUMBERS),
        "longer": longer,
        "corpora": corpora,
        "bench": lambda: bench("forward+backward"),
        "bench-forward": lambda: bench("forward"),
        "bench-decode": lambda: bench("decode"),
        "bench-tiled": tiled,
        "bench-bf16": half,
        "bench-peers": peers,
        "caches-text": lambda: caches(SMALL_TEXT),
        "caches-recall": lambda: caches(SMALL_RECALL),
        "caches-short": caches_short,
        "caches-recall-long": lambda: caches(LONG_RECALL),
        "retrofit": lambda: caches(RETROFIT),
        "retrofit-long": lambda: caches(LONG_RETROFIT),
        "taught": taught,
        "decoding": decoding,
        "decoding-short": lambda: decoding(8192),
        "decoding-grouped": lambda: decoding(path=DECODING_GROUPED),
        "grouped-text": grouped_tables.text,
        "grouped-recall": grouped_tables.recall,
        "grouped-cost": grouped_tables.cost,
        "grouped-pairs": grouped_tables.pairs,
        "pairs": pairs,
        "training": training_tables.side_by_side,
        "training-long": lambda: training_tables.longer("long"),
        "training-continual": lambda: training_tables.longer("continual"),
        "training-ablation": training_tables.ablation,
        "training-overhead": training_tables.overhead,
        "training-overhead-versions": lambda: training_tables.overhead(training_tables.VERSIONS),
        "training-overhead-narrower": lambda: training_tables.overhead(training_tables.NARROWER),
        "trainer-overhead": training_tables.command_alone,
        "toy": reproductions.toy,
        "last-words": reproductions.last_words,
        "verification": verification,
    }


def compare() -> str:
    """The comparison: table, findings, and where it was made."""
    if not COMPARE.is_file():
        return missing(COMPARE)
    records = read_records(COMPARE)
    rows = summarise(records)
    said = "\n".join(f"- {sentence}" for sentence in [*findings(rows), *configurations(records)])
    when = origin([record.environment for record in records])
    return f"{table(rows, format='markdown')}\n\n{said}\n\n{RULE}\n\n{when}"


def by_split(path: Path) -> str:
    """The share of wrong answers on rows as in training and on others."""
    if not path.is_file():
        return missing(path)
    records = read_records(path)
    splits = list(records[0].final)
    runs: dict[tuple[int, str], list[dict[str, float]]] = {}
    for record in records:
        runs.setdefault((record.steps, record.mechanism), []).append(record.final)
    several = len({steps for steps, _ in runs}) > 1
    body = []
    for (steps, name), those in sorted(runs.items(), key=lambda item: item[0][0]):
        errors = (spread([x[split] for x in those], share=True) for split in splits)
        body.append([*([f"{steps:,}"] if several else []), name, str(len(those)), *errors])
    head = [*(["steps"] if several else []), "mechanism", "seeds", *splits]
    return f"{markdown(head, body)}\n\n{origin([record.environment for record in records])}"


def longer() -> str:
    """Perplexity per byte of one seed after short and longer training, beside standard's."""
    for path in (COMPARE, LONGER):
        if not path.is_file():
            return missing(path)
    short = [r for r in read_records(COMPARE) if r.task == "text" and r.seed == 0]
    long = read_records(LONGER)
    lines = []
    for records in (short, long):
        base = next(r.value for r in records if r.mechanism == "standard")
        lines.append(
            [
                f"{records[0].steps:,}",
                *(
                    f"{r.value:.2f}"
                    if r.mechanism == "standard"
                    else f"{r.value:.2f} ({r.value / base:.2f} ×)"
                    for r in records
                ),
            ]
        )
    table = markdown(["steps", *(r.mechanism for r in long)], lines)
    when = origin([record.environment for record in long])
    return f"{table}\n\nPerplexity per byte, seed 0, and × standard.\n\n{when}"


def corpora() -> str:
    """Perplexity per byte on texts given with `--data`, with what can be told apart."""
    if not TEXT.is_file():
        return missing(TEXT)
    records = read_records(TEXT)
    names = list(dict.fromkeys(record.config["task"]["paths"][0] for record in records))
    lines, said = [], []
    for name in names:
        rows = summarise([r for r in records if r.config["task"]["paths"] == [name]])
        said += [f"- `{name}`: {sentence.removeprefix('text: ')}" for sentence in findings(rows)]
        lines.append([f"`{name}`", *(f"{row.mean:.2f} ± {row.std:.2f}" for row in rows)])
        mechanisms = [row.mechanism for row in rows]
    seeds = len({record.seed for record in records})
    about = f"Perplexity per byte, mean and standard deviation of {seeds} seeds."
    when = origin([record.environment for record in records])
    table = markdown(["text", *mechanisms], lines)
    return "\n\n".join([table, about, "\n".join(said), RULE, when])


def bench(passed: str) -> str:
    """Times of one pass beside SDPA's and the reference's, and how peak memory grows with T."""
    if not OPERATORS.is_file():
        return missing(OPERATORS)
    records = [json.loads(line) for line in OPERATORS.read_text().splitlines()]
    cases = {(r["mechanism"], r["impl"], r["tokens"]): r for r in records if r["pass"] == passed}
    lengths = sorted({tokens for _, _, tokens in cases})
    names = list(dict.fromkeys(name for name, _, _ in cases if name != "sdpa"))
    head = [
        "mechanism", "T", "tiled ms", "reference ms", "SDPA ms", "tiled / SDPA",
        "reference / tiled", "tiled MiB", "reference MiB",
    ]  # fmt: skip
    lines = []
    for name in names:
        for tokens in lengths:
            tiled = cases.get((name, "tiled", tokens))
            plain = cases.get((name, "reference", tokens))
            sdpa = cases[("sdpa", "torch", tokens)]
            lines.append([
                name,
                f"{tokens:,}",
                _number(tiled, "ms"),
                _number(plain, "ms"),
                _number(sdpa, "ms"),
                _number(tiled, "sdpa_ratio", " ×"),
                f"{plain['ms'] / tiled['ms']:.1f} ×" if plain and tiled else "–",
                _number(tiled, "peak_mib"),
                _number(plain, "peak_mib"),
            ])  # fmt: skip
    measured = any(case["peak_mib"] for case in cases.values())
    if not measured:
        head, lines = head[:-2], [line[:-2] for line in lines]
    parts = [markdown(head, lines)]
    if measured and len(lengths) > 1:
        parts.append(_growth(cases, names, lengths[0], lengths[-1]))
    memory = "; MiB: growth of the process's peak, inputs not counted" if measured else ""
    parts += [f"Pass: {passed}. {_sizes(records)}{memory}.", made(records)]
    return "\n\n".join(parts)


def tiled() -> str:
    """The tiled forms alone beside SDPA, one row of long inputs and four rows in both layouts."""
    if not TILED.is_file():
        return missing(TILED)
    records = [json.loads(line) for line in TILED.read_text().splitlines()]
    kinds = list(dict.fromkeys(map(_kind, records)))
    cases = {(r["mechanism"], *_kind(r)): r for r in records}
    names = dict.fromkeys(r["mechanism"] for r in records if r["mechanism"] != "sdpa")
    head = ["mechanism", *(f"B {b}, T {t:,}, {layout}" for b, t, layout in kinds)]
    lines = [
        [name, *(_number(cases[name, *kind], "sdpa_ratio", " ×") for kind in kinds)]
        for name in names
    ]
    about = "Forward and backward, × SDPA on the same inputs in the same run."
    return f"{markdown(head, lines)}\n\n{about}\n\n{made(records)}"


def _kind(record: dict) -> tuple[int, int, str]:
    return record["config"]["batch"], record["tokens"], record["config"]["layout"]


def half() -> str:
    """bf16 beside the fp32 of the main table: what a CPU's units for it are worth."""
    if not HALF.is_file():
        return missing(HALF)
    records = [json.loads(line) for line in HALF.read_text().splitlines()]
    cases = {(r["mechanism"], r["pass"], r["tokens"], r["config"]["dtype"]): r for r in records}
    head = ["mechanism", "pass", "T", "fp32 ms", "bf16 ms", "fp32 / bf16", "bf16 / SDPA in bf16"]
    lines = []
    for (name, passed, tokens, dtype), narrow in cases.items():
        wide = cases.get((name, passed, tokens, "float32"))
        if dtype == "bfloat16" and wide:
            lines.append([
                name, passed, f"{tokens:,}", _number(wide, "ms"), _number(narrow, "ms"),
                f"{wide['ms'] / narrow['ms']:.2f} ×", _number(narrow, "sdpa_ratio", " ×"),
            ])  # fmt: skip
    return f"{markdown(head, lines)}\n\n{_sizes(records)}.\n\n{made(records)}"


def peers() -> str:
    """Other people's implementations beside ours, where they exist and can run."""
    if not OPERATORS.is_file():
        return missing(OPERATORS)
    records = [json.loads(line) for line in OPERATORS.read_text().splitlines()]
    foreign = {(r["mechanism"], r["pass"]) for r in records if r["impl"] in PEERS}
    shown = [r for r in records if (r["mechanism"], r["pass"]) in foreign]
    shown.sort(key=lambda r: (r["mechanism"], r["pass"], r["tokens"]))
    head = ["mechanism", "pass", "T", "implementation", "ms", "/ SDPA", "MiB"]
    lines = [
        [
            r["mechanism"], r["pass"], f"{r['tokens']:,}", r["impl"], _number(r, "ms"),
            _number(r, "sdpa_ratio", " ×"), _number(r, "peak_mib"),
        ]
        for r in shown
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{_sizes(records)}.\n\n{made(records)}"


def caches(path: Path) -> str:
    """Trained models under small caches: every policy at every budget."""
    if not path.is_file():
        return missing(path)
    scored = read_budgeted(path)
    rows = dict.fromkeys(f"{x.rows} of {x.length} tokens" for x in scored)
    return (
        f"{budget_tables(scored, markdown=True)}\n\nBy held-out rows ({', '.join(rows)}), token by "
        "token; lower is better. In brackets: how many times less its caches took at their peak "
        "than the whole cache.\n\n"
        f"{origin([x.environment for x in scored])}"
    )


def taught() -> str:
    """What models were taught after their training, and from what."""
    if not TAUGHT.is_file():
        return missing(TAUGHT)
    records = [json.loads(line) for line in TAUGHT.read_text().splitlines()]
    head = ["begun with", "becomes", "rows", "rate × its own", "memory loss", "before", "after"]
    lines = []
    for r in records:
        command = r["environment"]["command"].split()
        metric = "answer_error" if r["task"] == "recall" else "perplexity"
        scores = [r[when][metric] for when in ("before", "after")]
        said = [f"{100 * x:.1f} %" if r["task"] == "recall" else f"{x:.2f}" for x in scores]
        loss = f"{r['memory_loss']:g}" if r["mechanism"] == "selective" else "–"
        lines.append([
            f"`{r['from']}`", f"`{command[command.index('--to') + 1]}`",
            f"{r['steps']:,} × {r['batch']} of {r['length']:,}",
            f"{r['rate']:g} × {r['mechanism_rate']:g}", loss, *said,
        ])  # fmt: skip
    about = "Held-out rows: wrong answers, or perplexity per token, with the whole cache."
    return f"{markdown(head, lines)}\n\n{about}\n\n{made(records)}"


def caches_short() -> str:
    """The whole cache and the smallest one of every text model, with its best policy there."""
    if not SMALL_TEXT.is_file():
        return missing(SMALL_TEXT)
    scored = read_budgeted(SMALL_TEXT)
    lines = []
    for name in dict.fromkeys(x.mechanism for x in scored):
        own = [x for x in scored if x.mechanism == name]
        least = min(x.tokens for x in own if not x.policy.startswith("searched"))
        small = min((x for x in own if x.tokens == least), key=lambda x: x.value)
        searched = [x for x in own if x.policy.startswith("searched")]
        for x in [*(x for x in own if x.policy == WHOLE), small, *searched]:
            held = (
                f"all {x.length} tokens" if x.policy == WHOLE else f"{x.policy}, {x.tokens} tokens"
            )
            held = held.replace(f", {x.tokens} tokens", " tokens") if x in searched else held
            lines.append([name, held, f"{x.value:.2f}", f"{x.peak_bytes / 1024:,.0f}"])
    return markdown(["model", "cache of each layer", "perplexity", "peak KiB"], lines)


def pairs() -> str:
    """Encoder-decoders as `heedful compare` trains them."""
    if not PAIRS.is_file():
        return missing(PAIRS)
    records = read_records(PAIRS)
    when = origin([record.environment for record in records])
    return f"{table(summarise(records), format='markdown')}\n\n{RULE}\n\n{when}"


def decoding(only: int | None = None, path: Path = DECODING) -> str:
    """Milliseconds per decoded token and bytes held, beside the unconverted model's."""
    if not path.is_file():
        return missing(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
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


def verification() -> str:
    """Seconds of a conversion with and without the proof."""
    if not VERIFICATION.is_file():
        return missing(VERIFICATION)
    records = [json.loads(line) for line in VERIFICATION.read_text().splitlines()]
    ways = list(records[0]["seconds"])
    head = ["parameters", *(f"{way}, s" for way in ways)]
    lines = [
        [f"{r['parameters'] / 1e6:,.0f} M", *(f"{r['seconds'][way]:.2f}" for way in ways)]
        for r in records
    ]
    return f"{markdown(head, lines)}\n\n{made(records)}"


def _sizes(records: Sequence[dict]) -> str:
    said = sizes(records[0]["config"])
    if len({record["config"]["dtype"] for record in records}) > 1:  # the table names each
        said = said.replace(f", {records[0]['config']['dtype']}", "")
    rounds = records[0]["config"]["rounds"]
    return f"{said[0].upper()}{said[1:]}; median of {rounds} rounds taken in turn"


def filled(text: str) -> str:
    """A page with every marked block as it should be."""
    for name, make in blocks().items():
        begin, end = f"<!-- begin:{name} -->", f"<!-- end:{name} -->"
        if begin in text:
            body = f"{begin}\n{make()}\n{end}"
            text = re.sub(f"{begin}.*?{end}", lambda _, body=body: body, text, flags=re.DOTALL)
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the blocks, or with `--check` say which pages are out of date."""
    if unknown := [argument for argument in arguments if argument != "--check"]:
        print(f"unknown argument {unknown[0]}; there is only --check", file=sys.stderr)
        return 2
    stale = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        if filled(text) != text:
            stale += 1
            print(f"{page.relative_to(ROOT)}: {'out of date' if arguments else 'filled'}")
            if not arguments:
                page.write_text(filled(text))
    return 1 if stale and arguments else 0


def _growth(cases: dict, names: Sequence[str], short: int, long: int) -> str:
    """In words: by what factor peak memory grows from the shortest to the longest rows."""
    parts = []
    for name in names:
        factors = []
        for impl in ("tiled", "reference"):
            low, high = cases.get((name, impl, short)), cases.get((name, impl, long))
            if low and high and low["peak_mib"] and high["peak_mib"]:
                factors.append(f"{high['peak_mib'] / low['peak_mib']:.1f} × {impl}")
        if factors:
            parts.append(f"{name} {', '.join(factors)}")
    times = f"{long / short:g} times as many tokens"
    return f"Peak memory with {times}: {'; '.join(parts)}." if parts else ""


def _number(record: dict | None, field: str, unit: str = "") -> str:
    value = None if record is None else record[field]
    if value is None:
        return "–"
    digits = 0 if value >= 100 or field == "peak_mib" else 1
    return f"{value:,.{digits}f}{unit}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
