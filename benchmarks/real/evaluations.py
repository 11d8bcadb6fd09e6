"""The tables of `heedful eval`: benchmarks, and mechanisms beside the control of their seed."""

from benchmarks.parts import markdown, provenance
from benchmarks.real.names import HIDE, MODELS, POLICIES, STOCK, read_study

MEASURES = ("perplexity, mean of domains", "perplexity"), ("needles", "accuracy")
HEAD = ["model", "validation, bits per byte", "perplexity", "needles, %"]


def stories() -> str:
    """BabiLong with every token cached: the base's answers."""
    records = sorted(read_study("babilong"), key=lambda r: r["task"])
    lines = []
    for record in records:
        value, low, high = (f"{100 * x:.1f}" for x in record["value"])
        lines.append([record["task"], str(record["samples"]), f"{value} ({low} to {high})"])
    return f"{markdown(['task', 'questions', 'right, %'], lines)}\n\n{provenance(records)}"


def harness() -> str:
    """Tasks of lm-evaluation-harness, every token cached: the base, and what adapters change."""
    earliest = read_study("harness-rank-4")
    records = read_study("harness") + [r for r in earliest if r["model"] != STOCK]
    adapters = [m for m in MODELS if m in {r["model"] for r in records} - {STOCK}]
    cells = {(r["task"], r["measure"], r["model"]): r for r in records}
    lines = []
    for task, measure in dict.fromkeys((r["task"], r["measure"]) for r in records):
        base = cells[task, measure, STOCK]
        row = [f"{task.removeprefix('lm-eval:')}, {measure}", _value(base["value"], base)]
        row += [_value(cells[task, measure, x]["difference"], base, "+") for x in adapters]
        lines.append(row)
    head = ["task, measure", MODELS[STOCK], *(MODELS[x] for x in adapters)]
    return f"{markdown(head, lines)}\n\n{provenance([*records, *earliest])}"


def harness_under_budgets() -> str:
    """The same tasks where caches evict: how far from every token cached, as the base answers."""
    records = read_study("harness-own")
    adapters = [m for m in MODELS if (m, "own") in {(r["model"], r["cache"]) for r in records}]
    cells = {(r["task"], r["measure"], r["model"], r["cache"]): r for r in records}
    lines = []
    for task, measure in dict.fromkeys((r["task"], r["measure"]) for r in records):
        base = cells[task, measure, HIDE, ""]
        row = [f"{task.removeprefix('lm-eval:')}, {measure}", _value(base["value"], base)]
        row += [_value(cells[task, measure, x, "own"]["difference"], base, "+") for x in adapters]
        lines.append(row)
    head = ["task, measure", POLICIES["whole"], *(MODELS[x] for x in adapters)]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def last_words() -> str:
    """LAMBADA where caches evict: how far from the base with every token cached."""
    records = read_study("lambada")
    cells = {(r["model"], r["cache"], r["measure"]): r for r in records}
    caches = {"": "all tokens", "own": POLICIES["by-layer"], "tova 64": "TOVA, 64 tokens"}
    lines = []
    for model, cache in dict.fromkeys((r["model"], r["cache"]) for r in records):
        values = []
        for measure in ("acc", "perplexity"):
            cell = cells[model, cache, measure]
            change = cell["difference"]
            values.append(
                _value(cell["value"], cell) if change is None else _value(change, cell, "+")
            )
        lines.append([MODELS[model], caches[cache], *values])
    head = ["model", "policy", "last words right, %", "perplexity"]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def multi_token() -> str:
    """LoRA alone, and the effect of multi-token attention beside it, by seed."""
    records = read_study("mta")
    cells = {(r["model"], r["task"], r["measure"]): r for r in records}
    stock = (_value(cells[STOCK, *x]["value"], cells[STOCK, *x]) for x in MEASURES)
    names = {"mta": "multi-token attention"}
    lines = [line for seed in range(3) for line in _beside_control(records, names, seed)]
    table = markdown(HEAD, [["stock", "–", *stock], *lines])
    return f"{table}\n\n{provenance([*_trained('lora', 'standard', 'mta'), *records])}"


def multi_token_lower() -> str:
    """The same at a quarter of that rate, and with talking heads: without kernels."""
    names = {"mta": "multi-token attention", "talking-heads": "talking heads"}
    return _of_seeds("lower", names, read_study("mta-lower"))


def multi_token_all() -> str:
    """Results with every weight trained, the control's too."""
    records = read_study("mta-all")
    return _of_seeds("all", {"mta": "multi-token attention"}, records, "try")


def parallax_lower() -> str:
    """Parallax at a rate of its own."""
    names = {"parallax": "parallax"}
    return _of_seeds("lower", names, read_study("parallax"), "try-parallax", seeds=1)


def multi_token_alone() -> str:
    """Changes in the base by the mechanism when nothing else is trained, by seed."""
    records = read_study("mta-alone")
    cells = {(r["model"], r["task"], r["measure"]): r for r in records}
    lines = [["stock", *(_value(cells[STOCK, *x]["value"], cells[STOCK, *x]) for x in MEASURES)]]
    names = {"mta": "multi-token attention", "talking": "talking heads"}
    for model in dict.fromkeys(r["model"] for r in records if r["model"] != STOCK):
        _, name, seed = model.split("-")
        values = (_value(cells[model, *x]["difference"], cells[model, *x], "+") for x in MEASURES)
        lines.append([f"{names[name]}, seed {seed}", *values])
    table = markdown([HEAD[0], *HEAD[2:]], lines)
    return f"{table}\n\n{provenance([*_trained('alone', 'try', *names), *records])}"


def rivals() -> str:
    """Changes by two other mechanisms beside the same control."""
    records, names = read_study("rivals"), {"dex": "Dex", "parallax": "parallax"}
    lines = _beside_control(records, names, 0)
    return f"{markdown(HEAD, lines)}\n\n{provenance([*_trained('lora', *names), *records])}"


def _of_seeds(
    study: str, names: dict[str, str], records: list[dict], *others: str, seeds: int = 3
) -> str:
    """Mechanisms of a study beside the control of their seed; other trainings are named below."""
    lines = [x for seed in range(seeds) for x in _beside_control(records, names, seed, study)]
    trained = _trained(study, "standard", *names, *others)
    return f"{markdown(HEAD, lines)}\n\n{provenance([*trained, *records])}"


def _trained(study: str, *mechanisms: str) -> list[dict]:
    """Trainings of a study, whose folders are `runs/STUDY-MECHANISM-SEED`."""
    folders = tuple(f"runs/{study}-{name}-" for name in mechanisms)
    return [r for r in read_study("mta-training") if r["model"].startswith(folders)]


def _beside_control(
    records: list[dict], names: dict[str, str], seed: int, study: str = "lora"
) -> list[list[str]]:
    """LoRA alone, and the effect of mechanisms beside it."""
    bits = {r["model"]: r["ended"]["bits_per_byte"] for r in read_study("mta-training")}
    cells = {(r["model"], r["task"], r["measure"]): r for r in records}
    control = f"runs/{study}-standard-{seed}"
    values = (_value(cells[control, *x]["value"], cells[control, *x]) for x in MEASURES)
    lines = [[f"control, seed {seed}", f"{bits[control]:.4f}", *values]]
    for name, label in names.items():
        model = f"runs/{study}-{name}-{seed}"
        changes = (cells[model, *measure] for measure in MEASURES)
        lines.append([
            f"{label}, seed {seed}", f"{bits[model] - bits[control]:+.4f}",
            *(_value(x["difference"], x, "+") for x in changes),
        ])  # fmt: skip
    return lines


def _value(interval: list[float | None], record: dict, sign: str = "") -> str:
    """A share in percent, or a difference in percentage points with its interval."""
    scale, digits = (100, 1) if record["percent"] else (1, 2)
    value, low, high = (x if x is None else f"{scale * x:{sign}.{digits}f}" for x in interval)
    return value if low is None or not sign else f"{value} ({low} to {high})"


BLOCKS = {
    "real-babilong": stories,
    "real-harness": harness,
    "real-harness-own": harness_under_budgets,
    "real-lambada": last_words,
    "real-mta": multi_token,
    "real-mta-lower": multi_token_lower,
    "real-mta-alone": multi_token_alone,
    "real-mta-all": multi_token_all,
    "real-rivals": rivals,
    "real-parallax": parallax_lower,
}
