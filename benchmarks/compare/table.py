"""The tables of `heedful compare`: models trained from scratch, side by side."""

from pathlib import Path

from benchmarks.compare.run import FACTORS, MECHANISMS, TRIED_WITH, run_of
from benchmarks.parts import markdown, origin, spread
from heedful_lab.commands.compare.findings import RULE, configurations, findings, summarise, table
from heedful_lab.commands.compare.setups import setups
from heedful_lab.records import SHARES, read_records

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


BLOCKS = {
    "tuned": tuned,
    "compare": compare,
    "assignment": lambda: by_split(RESULTS / "assignment-cpu.jsonl"),
    "magic-numbers": lambda: by_split(RESULTS / "magic-numbers-cpu.jsonl"),
    "longer": longer,
    "corpora": corpora,
    "pairs": pairs,
}
