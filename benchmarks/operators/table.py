"""The tables of `heedful bench`: time and memory of the operators."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.parts import markdown, provenance, read
from heedful_lab.commands.bench.cases import PEERS
from heedful_lab.commands.bench.options import sizes

RESULTS = Path(__file__).parent / "results"
OPERATORS = RESULTS / "operators-cpu.jsonl"


def bench(passed: str) -> str:
    """Times of one pass beside SDPA's and the reference's, and how peak memory grows with T."""
    records = read(OPERATORS)
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
    has_peaks = any(case["peak_mib"] for case in cases.values())
    if not has_peaks:
        head, lines = head[:-2], [line[:-2] for line in lines]
    parts = [markdown(head, lines)]
    if has_peaks and len(lengths) > 1:
        parts.append(_growth(cases, names, lengths[0], lengths[-1]))
    memory = "; MiB: growth of the process's peak, inputs not counted" if has_peaks else ""
    parts += [f"Pass: {passed}. {_sizes(records)}{memory}.", provenance(records)]
    return "\n\n".join(parts)


def tiled() -> str:
    """The tiled forms alone beside SDPA, one long sequence and four sequences in both layouts."""
    records = read(RESULTS / "operators-tiled-cpu.jsonl")
    kinds = list(dict.fromkeys(map(_kind, records)))
    cases = {(r["mechanism"], *_kind(r)): r for r in records}
    names = dict.fromkeys(r["mechanism"] for r in records if r["mechanism"] != "sdpa")
    head = ["mechanism", *(f"B {b}, T {t:,}, {layout}" for b, t, layout in kinds)]
    lines = [
        [name, *(_number(cases[name, *kind], "sdpa_ratio", " ×") for kind in kinds)]
        for name in names
    ]
    about = "Forward and backward, × SDPA on the same inputs in the same run."
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def _kind(record: dict) -> tuple[int, int, str]:
    return record["config"]["batch"], record["tokens"], record["config"]["layout"]


def flash() -> str:
    """Kernels of low rank through torch's own attention, beside SDPA."""
    records = read(RESULTS / "operators-flash-cpu.jsonl")
    cases = {(r["mechanism"], r["pass"], r["tokens"]): r for r in records}
    head = ["pass", "tokens", "SDPA ms", "mta-flash ms", "× SDPA", "SDPA MiB", "mta-flash MiB"]
    lines = []
    for (name, passed, tokens), wide in cases.items():
        if name != "sdpa":
            plain = cases["sdpa", passed, tokens]
            lines.append([
                passed, f"{tokens:,}", _number(plain, "ms"), _number(wide, "ms"),
                f"{wide['sdpa_ratio']:.2f} ×", _number(plain, "peak_mib"),
                _number(wide, "peak_mib"),
            ])  # fmt: skip
    return f"{markdown(head, lines)}\n\n{_sizes(records)}.\n\n{provenance(records)}"


def half() -> str:
    """bf16 beside the fp32 of the main table: what a CPU's units for it are worth."""
    records = read(RESULTS / "operators-cpu-bf16.jsonl")
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
    return f"{markdown(head, lines)}\n\n{_sizes(records)}.\n\n{provenance(records)}"


def composed() -> str:
    """The shape for a GPU beside that for a CPU, on a CPU."""
    records = read(RESULTS / "operators-composed-cpu.jsonl")
    cases = {(r["mechanism"], r["pass"], r["impl"]): r for r in records}
    head = ["mechanism", "pass", "tiled ms", "composed ms", "composed / tiled"]
    lines = []
    for (name, passed, impl), first in cases.items():
        if impl == "tiled":
            second = cases[name, passed, "composed"]
            ratio = f"{second['ms'] / first['ms']:.1f} ×"
            lines.append([name, passed, _number(first, "ms"), _number(second, "ms"), ratio])
    about = f"{records[0]['tokens']:,} tokens. {_sizes(records)}"
    return f"{markdown(head, lines)}\n\n{about}.\n\n{provenance(records)}"


def peers() -> str:
    """Other people's implementations beside ours, where they exist and can run."""
    records = read(OPERATORS)
    foreign = {(r["mechanism"], r["pass"]) for r in records if r["impl"] in PEERS}
    peer_records = [r for r in records if (r["mechanism"], r["pass"]) in foreign]
    peer_records.sort(key=lambda r: (r["mechanism"], r["pass"], r["tokens"]))
    head = ["mechanism", "pass", "T", "implementation", "ms", "/ SDPA", "MiB"]
    lines = [
        [
            r["mechanism"], r["pass"], f"{r['tokens']:,}", r["impl"], _number(r, "ms"),
            _number(r, "sdpa_ratio", " ×"), _number(r, "peak_mib"),
        ]
        for r in peer_records
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{_sizes(records)}.\n\n{provenance(records)}"


def _sizes(records: Sequence[dict]) -> str:
    text = sizes(records[0]["config"])
    if len({record["config"]["dtype"] for record in records}) > 1:  # the table names each
        text = text.replace(f", {records[0]['config']['dtype']}", "")
    rounds = records[0]["config"]["rounds"]
    return f"{text[0].upper()}{text[1:]}; median of {rounds} rounds taken in turn"


def _growth(cases: dict, names: Sequence[str], short: int, long: int) -> str:
    """In words: by what factor peak memory grows from the shortest to the longest sequences."""
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


BLOCKS = {
    "bench": lambda: bench("forward+backward"),
    "bench-forward": lambda: bench("forward"),
    "bench-decode": lambda: bench("decode"),
    "bench-flash": flash,
    "bench-tiled": tiled,
    "bench-bf16": half,
    "bench-composed": composed,
    "bench-peers": peers,
}
