"""The tables of training: at equal steps and time, longer, in parts, and what a step costs."""

import json
from pathlib import Path

import numpy as np

from benchmarks.parts import markdown, origin, provenance, read, spread
from benchmarks.training.run import SLOWER
from heedful_lab.commands.evaluate.numbers import RULE, evaluated_table, summed_up
from heedful_lab.records import Sample
from heedful_lab.records import read as read_entries

RESULTS = Path(__file__).parent / "results"
TRAINING, OVERHEAD = RESULTS / "training-cpu.jsonl", RESULTS / "training-overhead-cpu.jsonl"
VERSIONS = RESULTS / "training-overhead-versions-cpu.jsonl"
NARROWER = RESULTS / "training-overhead-narrower-cpu.jsonl"
RIVALS = RESULTS / "training-overhead-rivals-cpu.jsonl"
TURNS = RESULTS / "trainer-overhead-cpu.jsonl"
PUBLISHED = {
    "standard": 11.25,
    "talking-heads": 11.04,
    "pre+post conv, pre+post mix, scalar gate": 10.90,
    "pre conv, pre+post mix, scalar gate": 10.95,
    "pre conv, pre+post mix, no norm": 10.99,
    "pre conv, post mix, no norm": 11.16,
    "post conv, post mix, no norm": 11.19,
    "pre conv, pre mix, no norm": 11.20,
    "6x11 pre conv only, depth scaling": 11.23,
    "pre conv, post mix, layer-norm scaling": 11.41,
}
"""Perplexities of Golovneva et al., arXiv 2504.00927, tables 2 and 5."""
WHOLE = "pre+post conv, pre+post mix, no norm"
"""What `mta` is."""
UNPUBLISHED = (WHOLE, "layer-norm scaling alone")


def side_by_side() -> str:
    """Bits per byte at equal steps and at equal time, with the rate that served each best."""
    records = [r for r in read(TRAINING) if r["kind"] in ("rate", "steps", "time")]
    trained = [r for r in records if r["kind"] == "steps"]
    head = ["mechanism", "parameters", "learning rate", "equal steps", "equal time", "its steps"]
    lines = []
    for name in dict.fromkeys(r["name"] for r in trained):
        equal = [r for r in trained if r["name"] == name]
        faster = [r for r in records if (r["name"], r["kind"]) == (name, "time")]
        cells = [name, f"{equal[0]['parameters']:,}", f"{equal[0]['rate']:g}", scores(equal)]
        lines.append([*cells, scores(faster), str(faster[0]["steps"]) if faster else "–"])
    first = trained[0]
    about = (
        f"Bits per byte of the evaluation books, seeds in brackets; {first['steps']} steps of "
        f"{first['batch']} sequences of {first['length']} byte pairs; the rate is the best of "
        f"{len({r['rate'] for r in records if r['kind'] == 'rate'})} on a seed of its own. Equal "
        "time: as many steps of sequences of the same text as a mechanism takes in the time of "
        "standard attention's, by the tables of overheads; left out where a step takes less than "
        f"{100 * (SLOWER - 1):.0f} % longer."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def longer(kind: str) -> str:
    """Bits per byte in the course of long runs, or of going on from a standard model."""
    records = [r for r in read(TRAINING) if r["kind"] == kind]
    last = records[0]["steps"]
    # Some were scored just before their end too.
    steps = [step for step, _ in records[0]["curve"] if step == last or step < 0.99 * last]
    head = ["mechanism", *(f"{step:,} steps" for step in steps)]
    lines = [[r["name"], *(f"{dict(r['curve'])[x]:.3f}" for x in steps)] for r in records]
    about = "Bits per byte of the evaluation books, one seed."
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def ablation() -> str:
    """Multi-token attention in parts, beside the perplexities of the paper, in its order."""
    records = [r for r in read(TRAINING) if r["kind"] in ("steps", "ablation")]
    published = {name: f"{x:.2f}" for name, x in PUBLISHED.items()} | dict.fromkeys(
        UNPUBLISHED, "–"
    )
    records = [r | {"name": WHOLE if r["name"] == "mta" else r["name"]} for r in records]
    records = [r for r in records if r["name"] in published]
    head = ["form", "bits per byte", "parameters", "published perplexity"]
    lines = []
    for name, perplexity in sorted(published.items(), key=lambda item: item[1]):
        rows = [r for r in records if r["name"] == name]
        if rows:
            lines.append([name, scores(rows), f"{rows[0]['parameters']:,}", perplexity])
    about = (
        "Bits per byte of the evaluation books, seeds in brackets. The published ones are those of "
        "880M parameters on SlimPajama (arXiv 2504.00927, tables 2 and 5)."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def overhead(path: Path = OVERHEAD) -> str:
    """Tokens per second of `heedful train` beside a plain Trainer on the stock model."""
    records = read(path)
    head = ["trained", "tokens/s", "time of a step, × plain loop"]
    names = {"plain": "stock model, plain Trainer"}
    lines = [
        [names.get(r["kind"], r["kind"]), f"{r['tokens_per_second']:,.0f}",
         f"{r['times_plain']:.2f} ×"]
        for r in records
    ]  # fmt: skip
    first = records[0]
    about = (
        f"A Llama of 4 layers, width {first['config']['hidden_size']}, {first['batch']} "
        f"sequences of {first['length']} tokens packed with documents; medians of "
        f"{first['rounds']} rounds taken in turn, ratios within a round."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def in_turn(path: Path) -> str:
    """Time of `heedful train` beside the plain loop, step by step in one process."""
    records = read(path)
    names = {"standard": "`heedful train`, standard attention", "plain": "the plain loop itself"}
    lines = []
    for r in records:
        rng = np.random.default_rng(0)
        values, ends = [], []
        for order in (r["times_plain"], r["plain_times"]):
            values.append(np.median(order))
            ends.append(np.median(rng.choice(order, (2000, len(order))), axis=1))
        low, high = np.quantile(np.sqrt(ends[0] / ends[1]), (0.025, 0.975))
        lines.append([
            names.get(r["kind"], r["kind"]), f"{values[0]:.3f} ×", f"{1 / values[1]:.3f} ×",
            f"{np.sqrt(values[0] / values[1]):.3f} ×", f"{low:.3f} to {high:.3f}",
        ])  # fmt: skip
    head = ["beside the plain loop", "plain began", "it began", "both", "95 %"]
    first = records[0]
    about = (
        f"The same model and sequences; {first['pairs']} steps of each loop in turn, twice. The "
        "time of a step is divided by the mean of the other's steps before and after it; medians, "
        "of both orders the geometric mean, and a bootstrap of the steps."
    )
    return f"{markdown(head, lines)}\n\n{about}\n\n{provenance(records)}"


def last_words(folder: Path = RESULTS / "last-words-cpu") -> str:
    """Last words of passages, the models of the long runs beside standard attention's."""
    lines = summed_up(read_entries(folder / "samples.jsonl", Sample))
    about = json.loads((folder / "evaluation.json").read_text())
    table = evaluated_table(lines, "markdown")
    return f"{table}\n\n{RULE}\n\n{origin([about['environment']])}"


def scores(records: list[dict]) -> str:
    """Mean and spread of the seeds, and how many there are."""
    if not records:
        return "–"
    return f"{spread([r['bits_per_byte'] for r in records], digits=3)} ({len(records)})"


BLOCKS = {
    "training": side_by_side,
    "training-long": lambda: longer("long"),
    "training-continual": lambda: longer("continual"),
    "training-ablation": ablation,
    "training-overhead": overhead,
    "training-overhead-versions": lambda: overhead(VERSIONS),
    "training-overhead-narrower": lambda: overhead(NARROWER),
    "training-overhead-rivals": lambda: in_turn(RIVALS),
    "trainer-overhead": lambda: in_turn(TURNS),
    "last-words": last_words,
}
