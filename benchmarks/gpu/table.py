"""Measurements of a GPU, and a call's launches and traffic there, counted without one."""

from pathlib import Path

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"
FLASH, CUDNN = "FLASH_ATTENTION", "CUDNN_ATTENTION"
NAMES = {
    "sdpa": "SDPA", "mta-pre": "kernels before the softmax", "mta": "multi-token, everything",
    "talking-heads": "talking heads", "selective": "selective", "differential": "differential",
}  # fmt: skip
IMPLS = {FLASH: "flash", CUDNN: "cuDNN"}


def operators() -> str:
    """Forward and backward beside SDPA: as it was called, and the device alone."""
    records = [r for r in read(RESULTS / "h100.jsonl") if r["stage"] == 2]
    head = ["", "by", "tokens", "forward, ms", "with backward, ms", "× flash",
            "device alone, ms", "× flash", "MiB"]  # fmt: skip
    by_case = {
        (c["mechanism"], c["impl"], c["tokens"], c["pass"]): r["numbers"]
        for r in records
        for c in (r["config"],)
    }
    lines = []
    for mechanism, impl, tokens, passed in by_case:
        if passed == "forward":
            continue
        mine = by_case[mechanism, impl, tokens, passed]
        flash = by_case["sdpa", FLASH, tokens, passed]
        lines.append([
            NAMES[mechanism], IMPLS.get(impl, impl), f"{tokens:,}",
            f"{by_case[mechanism, impl, tokens, 'forward']['ms']:.2f}", f"{mine['ms']:.2f}",
            f"{mine['ms'] / flash['ms']:.1f}", f"{mine['replay_ms']:.2f}",
            f"{mine['replay_ms'] / flash['replay_ms']:.1f}", f"{mine['peak_mib']:,.0f}",
        ])  # fmt: skip
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def long() -> str:
    """Long sequences, forward."""
    records = [
        r for r in read(RESULTS / "h100.jsonl")
        if r["stage"] == 4 and r["config"]["pass"] == "forward"
    ]  # fmt: skip
    flash = next(r["numbers"] for r in records if r["config"]["impl"] == FLASH)
    head = ["", "by", "tokens", "forward, ms", "× flash", "MiB"]
    lines = [
        [
            NAMES[c["mechanism"]], IMPLS.get(c["impl"], c["impl"]), f"{c['tokens']:,}",
            f"{n['ms']:.1f}", f"{n['ms'] / flash['ms']:.1f}", f"{n['peak_mib']:,.0f}",
        ]
        for c, n in ((r["config"], r["numbers"]) for r in records)
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def steps() -> str:
    """Training steps of the 880M model."""
    records = [r for r in read(RESULTS / "h100.jsonl") if r["stage"] == 5]
    first = records[0]["numbers"]["tokens_per_second"]
    head = ["model", "by", "ms per step", "20 to 80 %", "tokens/s", "share", "GiB"]
    lines = [
        [
            r["config"]["mechanism"], IMPLS.get(r["config"]["impl"], r["config"]["impl"]),
            f"{n['step_ms']:.0f}", f"{n['step_low_ms']:.0f} to {n['step_high_ms']:.0f}",
            f"{n['tokens_per_second']:,.0f}", f"{n['tokens_per_second'] / first:.0%}",
            f"{n['peak_mib'] / 1024:.1f}",
        ]
        for r in records
        for n in (r["numbers"],)
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def ceilings() -> str:
    """Ceilings of the device and its libraries, and the parts of a form for a GPU."""
    records = [r for r in read(RESULTS / "h100-ceilings.jsonl") if "ms" in r["numbers"]]
    lines = []
    for r in records:
        n = r["numbers"]
        rate = f"{n['tflops']:,.1f} TFLOP/s" if "tflops" in n else ""
        rate = f"{n['gb_per_second']:,.0f} GB/s" if "gb_per_second" in n else rate
        if r["case"] in ("torch operation", "Triton launch"):
            rate = f"{1e3 * n['ms'] / r['config']['calls']:.0f} µs each"
        lines.append([r["case"], f"{n['ms']:.3f}", rate])
    return f"{markdown(['case', 'ms', ''], lines)}\n\n{provenance(records)}"


def counted() -> str:
    """Launches and bytes at both shapes."""
    records = read(RESULTS / "counted.jsonl")
    head = ["mechanism", "shape", "launches", "GB moved"]
    lines = [
        [
            r["mechanism"],
            f"{r['batch']} × {r['heads']} × {r['tokens']:,} × {r['dim']}",
            f"{r['launches']:,}",
            f"{r['nbytes'] / 1e9:.1f}",
        ]
        for r in records
    ]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def visited() -> str:
    """The share of tiles that selective attention computes."""
    records = read(RESULTS / "visited.jsonl")
    lines = [[f"{r['tokens']:,}", f"{r['share']:.0%}"] for r in records]
    return f"{markdown(['tokens', 'tiles computed'], lines)}\n\n{provenance(records)}"


BLOCKS = {
    "counted": counted,
    "h100-operators": operators,
    "h100-long": long,
    "h100-visited": visited,
    "h100-steps": steps,
    "h100-ceilings": ceilings,
}
