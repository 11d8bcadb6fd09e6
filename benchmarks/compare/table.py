"""The tables of `heedful compare`: models trained from scratch, side by side."""

from dataclasses import replace
from pathlib import Path

from benchmarks.compare.ladder import FORMS, TASK
from benchmarks.compare.run import FACTORS, MECHANISMS, TRIED_WITH, run_of
from benchmarks.parts import markdown, origin, provenance, read, spread
from heedful_lab.commands.compare.findings import RULE, configurations, findings, summarise, table
from heedful_lab.commands.compare.setups import setups
from heedful_lab.records import SHARES, read_records
from heedful_lab.rivals.table import mechanism

RESULTS = Path(__file__).parent / "results"
COMPARE, LONGER = RESULTS / "compare-cpu.jsonl", RESULTS / "text-1600-cpu.jsonl"


def compare() -> str:
    """The comparison: table, findings, and where it was made."""
    records = read_records(COMPARE)
    rows = summarise(records)
    sentences = "\n".join(
        f"- {sentence}" for sentence in [*findings(rows), *configurations(records)]
    )
    when = origin([record.environment for record in records])
    return f"{table(rows, format='markdown')}\n\n{sentences}\n\n{RULE}\n\n{when}"


def by_split(path: Path) -> str:
    """The share of wrong answers on sequences as in training and on others."""
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
    """Perplexity per byte on texts given with `--data`, with the differences that show."""
    records = read_records(RESULTS / "text-cpu.jsonl")
    names = list(dict.fromkeys(record.config["task"]["paths"][0] for record in records))
    lines, sentences = [], []
    for name in names:
        rows = summarise([r for r in records if r.config["task"]["paths"] == [name]])
        sentences += [
            f"- `{name}`: {sentence.removeprefix('text: ')}" for sentence in findings(rows)
        ]
        lines.append([f"`{name}`", *(f"{row.mean:.2f} ± {row.std:.2f}" for row in rows)])
        mechanisms = [row.mechanism for row in rows]
    seeds = len({record.seed for record in records})
    about = f"Perplexity per byte, mean and standard deviation of {seeds} seeds."
    when = origin([record.environment for record in records])
    table = markdown(["text", *mechanisms], lines)
    return "\n\n".join([table, about, "\n".join(sentences), RULE, when])


def pairs() -> str:
    """Encoder-decoders as `heedful compare` trains them."""
    records = read_records(RESULTS / "pairs-cpu.jsonl")
    when = origin([record.environment for record in records])
    return f"{table(summarise(records), format='markdown')}\n\n{RULE}\n\n{when}"


def tuned() -> str:
    """Results of every mechanism at its best learning rate."""
    records = [r for r in read_records(RESULTS / "tuned-cpu.jsonl") if r.seed != TRIED_WITH]
    tasks = {task: setup for task, setup in setups().items() if task in {r.task for r in records}}
    signs = dict(zip(FACTORS, ("½ ×", "1 ×", "2 ×"), strict=True))
    body = []
    trained = {r.mechanism for r in records}
    for name in filter(trained.__contains__, MECHANISMS):
        cells = []
        for task, setup in tasks.items():
            runs = [r for r in records if (r.task, r.mechanism) == (task, name)]
            if not runs:
                cells.append("–")
                continue
            rates = {run_of(r).rate / setup.hyperparameters.learning_rate for r in runs}
            marks = ", ".join(signs[rate] for rate in sorted(rates))
            mean = spread([r.value for r in runs], share=runs[0].metric in SHARES)
            cells.append(f"{mean} ({marks})")
        body.append([name, *cells])
    when = origin([record.environment for record in records])
    return f"{markdown(['mechanism', *tasks], body)}\n\n{when}"


TASKS_KEPT = {
    "blocks": "several letters in one block",
    "assignment": "the latest of a variable's values",
    "recall": "long-range recall",
    "magic-numbers": "needles in words",
    "text": "text, perplexity per byte",
}
BESIDE_FLASH = ("standard", "canon", "gated", "differential-v2", "mta", "mta-flash")


def kept() -> str:
    """Results of kernels of low rank beside the full operator and its cheaper rivals."""
    records = read_records(RESULTS / "tuned-cpu.jsonl")
    records = [r for r in records if r.seed != TRIED_WITH and r.mechanism in BESIDE_FLASH]
    body = []
    for task, words in TASKS_KEPT.items():
        runs = {x: [r for r in records if (r.task, r.mechanism) == (task, x)] for x in BESIDE_FLASH}
        share = runs["standard"][0].metric in SHARES
        cells = (spread([r.value for r in those], share=share) for those in runs.values())
        body.append([f"{words} (`{task}`)", *cells])
    about = "Wrong answers, and perplexity; three seeds, mean and standard deviation."
    when = origin([record.environment for record in records])
    return f"{markdown(['task', *BESIDE_FLASH], body)}\n\n{about}\n\n{when}"


def ladder() -> str:
    """Forms of multi-token attention by their price: small models of text, at equal time."""
    records = read(RESULTS / "ladder-cpu.jsonl")
    tuned_runs = [r for r in read_records(RESULTS / "tuned-cpu.jsonl") if r.seed != TRIED_WITH]
    body = []
    for timed in (r for r in records if "rounds" in r):
        form = timed["form"]
        runs = [r for r in records if "seed" in r and r["form"] == form]
        name, changes = FORMS[form]
        whole = [r.value for r in tuned_runs if (r.task, r.mechanism) == (TASK, name)]
        body.append([
            form,
            flops(*FORMS[form]),
            f"{timed['times_standard']:.2f} ×",
            f"{runs[0]['steps']:,}",
            spread([next(iter(r["final"].values())) for r in runs]),
            spread(whole) if whole and not changes else "–",
        ])  # fmt: skip
    seeds = len({r["seed"] for r in records if "seed" in r})
    about = (
        f"Perplexity per byte, {seeds} seeds, mean and standard deviation. FLOPs are those of the "
        "products of attention alone, counted."
    )
    head = ["form", "FLOPs", "time of a step", "steps", "at equal time", "after 400 steps"]
    return f"{markdown(head, body)}\n\n{about}\n\n{provenance(records)}"


def flops(name: str, changes: dict) -> str:
    """Products of attention as multiples of plain attention's, where they are those of SDPA."""
    if name in ("standard", "gated", "canon"):
        return "1 ×"
    if name != "mta-flash":
        return "–"
    config = replace(mechanism(name), **changes)
    width = config.rank * (config.mix or 1) + (config.post_mix or 1)
    return f"{width / 2:g} ×"


BLOCKS = {
    "tuned": tuned,
    "flash-kept": kept,
    "ladder": ladder,
    "compare": compare,
    "assignment": lambda: by_split(RESULTS / "assignment-cpu.jsonl"),
    "magic-numbers": lambda: by_split(RESULTS / "magic-numbers-cpu.jsonl"),
    "longer": longer,
    "corpora": corpora,
    "pairs": pairs,
}
