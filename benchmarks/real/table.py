"""The table of a pretrained model under small caches."""

import statistics
from pathlib import Path

import numpy

from benchmarks.parts import markdown, provenance, read

RESULTS = Path(__file__).parent / "results"
STOCK, HIDE, EVICT = "smollm2", "adapters/smollm2-135m-hide", "adapters/smollm2-135m-evict"
ALWAYS = "runs/evict-r6"  # matrices that always act
AT_ONCE = "runs/after"  # those of the adapter that is kept, in full from the first eviction on
MODELS = {
    STOCK: "stock",
    "gemma/gemma-3-270m.gguf": "stock",
    "runs/gate": "gates trained",
    HIDE: "selectors trained",
    "runs/gemma-hide": "selectors trained",
    "runs/hide-s1": "selectors of seed 1",
    EVICT: "trained under the budgets too",
    AT_ONCE: "the same, in full from the first eviction on",
    "runs/after-1": "in full from the first eviction on, seed 1",
    "runs/after-2": "in full from the first eviction on, seed 2",
    ALWAYS: "the same, with matrices that always act",
    "runs/evict-r4": "the same, never without eviction, rank 4",
    "runs/evict-0": "the same, never without eviction, rank 8",
}
FORMER = {"2026-11-26T12:40": "runs/evict-r4", "2026-11-26T21:03": ALWAYS}
"""What the folder of the last adapter had until when."""
GRADUAL = "2026-11-27T10:00"
"""When its matrices began to act by how much is evicted."""
LABELS = {
    "below 32": "9 to 32 tokens",
    "below 128": "33 to 128",
    "below 512": "129 to 512",
    "512 and more": "more",
    "least": "least",
    "less": "less",
    "more": "more",
    "most": "most",
}
MEASURES = ("perplexity, mean of domains", "perplexity"), ("needles", "accuracy")
HEAD_TRAINED = ["model", "validation, bits per byte", "perplexity", "needles, %"]
HEAD = ["model", "policy", "tokens", "perplexity", "needles found", "peak MB", "smaller by"]
NAMES = {
    "own": "all tokens, transformers' own cache",
    "whole": "all tokens",
    "streaming-llm": "StreamingLLM",
    "tova": "TOVA",
    "snap-kv": "SnapKV",
    "h2o": "H2O",
    "random": "random",
    "window": "window",
    "triattention": "TriAttention",
    "lowest-gate": "LowestGate",
    "lowest-gate-recent": "LowestGate, half of them the newest",
    "most-hidden": "MostHidden",
    "by-layer": "MostHidden, budgets by layer",
    "tova-by-layer": "TOVA, the same budgets",
}
SHORT = (
    (STOCK, "streaming-llm", 128),
    (STOCK, "tova", 128),
    (STOCK, "triattention", 128),
    (HIDE, "most-hidden", 128),
    (HIDE, "by-layer", 120),
    (EVICT, "by-layer", 120),
)
TOVA_INT8, LAST_INT8 = (STOCK, "tova", 448), (EVICT, "by-layer")
COMPARED = (
    (STOCK, "whole", 1024),
    (STOCK, "tova", 128),
    (HIDE, "most-hidden", 128),
    (HIDE, "by-layer", 120),
    (ALWAYS, "whole", 1024),
    (ALWAYS, "by-layer", 256),
    (ALWAYS, "by-layer", 120),
)


def _line(record: dict, whole: dict) -> list[str]:
    """A setting beside the base with its whole cache; of ten books with an interval."""
    return [
        MODELS[record["model"]],
        NAMES[record["policy"]],
        f"{record['tokens']:,}",
        _rise(record, whole),
        _needles(record),
        f"{record['peak_nbytes'] / 1e6:.1f}",
        f"{whole['peak_nbytes'] / record['peak_nbytes']:.1f} ×",
    ]


def _rise(record: dict, whole: dict) -> str:
    """How much perplexity rises, and what 95 % of bootstrap samples of ten books give."""
    rises = numpy.array(record["nats"]) - numpy.array(whole["nats"])
    rise = f"{numpy.expm1(rises.mean()):+.1%}"
    if len(rises) < 10 or record is whole:
        return rise
    low, high = numpy.expm1(_interval(rises))
    return f"{rise} ({100 * low:.1f} to {100 * high:.1f})"


def _interval(values: numpy.ndarray) -> numpy.ndarray:
    """Between which two the mean of 95 % of bootstrap samples lies."""
    draws = numpy.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    return numpy.quantile(values[draws].mean(1), (0.025, 0.975))


def _needles(record: dict) -> str:
    """The share of needles in the answers, or a dash where the study asked for none."""
    return f"{statistics.mean(record['needles'].values()):.0%}" if "needles" in record else "–"


def _read(name: str) -> list[dict]:
    """The records of a file, with the adapters that their models were."""
    records = read(RESULTS / f"{name}-cpu.jsonl")
    return [r | {"model": _adapter(r)} if "model" in r else r for r in records]


def _adapter(record: dict) -> str:
    """The adapter of a record, whatever folder it lay in at that time."""
    model, date = record["model"], record["environment"]["date"]
    if model == EVICT:
        model = next((x for until, x in FORMER.items() if date < until), EVICT)
    if model not in (EVICT, AT_ONCE):
        return model
    evicts = record.get("policy", record.get("cache") or "whole") != "whole"
    return AT_ONCE if evicts and date < GRADUAL else EVICT


def _whole(records: list[dict]) -> dict:
    """The model as it comes, with every token cached."""
    return next(r for r in records if MODELS[r["model"]] == "stock" and r["policy"] == "whole")


def _setting(record: dict) -> tuple[str, str, int]:
    return record["model"], record["policy"], record["tokens"]


def _records(name: str) -> list[dict]:
    """The records of a file, the base first and every model's whole cache before its policies."""
    models = list(MODELS)
    return sorted(
        _read(f"cache-{name}"),
        key=lambda r: (models.index(r["model"]), r["policy"] != "whole", r["policy"], -r["tokens"]),
    )


def ten_books(name: str) -> list[dict]:
    """Records of ten books, with the needles of the same settings in another file."""
    needles = {_setting(r): r["needles"] for r in _records(name)}
    return [
        r | ({"needles": needles[_setting(r)]} if _setting(r) in needles else {})
        for r in _records(f"{name}-ten")
    ]


def real_cache(name: str) -> str:
    """Perplexity, needles and bytes of every policy, beside the base with its whole cache."""
    records = _records(name)
    lines = [_line(record, _whole(records)) for record in records]
    return f"{markdown(HEAD, lines)}\n\n{provenance(records)}"


def real_1024() -> str:
    """The same of ten books."""
    records = ten_books("1024")
    settings = {_setting(r) for r in records}
    lines = [_line(record, _whole(records)) for record in records]
    sources = records + [r for r in _records("1024") if _setting(r) in settings]
    return f"{markdown(HEAD, lines)}\n\n{provenance(sources)}"


def real_earlier() -> str:
    """Adapters that are not kept, on five books, and what they are compared with."""
    current = {r["model"] for r in _records("1024-ten")}
    records = [r for r in _records("1024") if r["model"] not in current or _setting(r) in COMPARED]
    lines = [_line(record, _whole(records)) for record in records]
    return f"{markdown(HEAD, lines)}\n\n{provenance(records)}"


def question_known() -> str:
    """Needles where all of the prompt is read before anything is evicted."""
    records = _records("known")
    lines = [
        [MODELS[r["model"]], NAMES[r["policy"]], f"{r['tokens']:,}", _needles(r)] for r in records
    ]
    return f"{markdown(HEAD[:3] + HEAD[4:5], lines)}\n\n{provenance(records)}"


def several_numbers() -> str:
    """Several numbers in a text, one of them queried: beside the base with its whole cache."""
    records = _records("numbers")
    base, lines = numpy.concatenate([*_whole(records)["hits"].values()]), []
    for r in records:
        changes = 100 * (numpy.concatenate([*r["hits"].values()]) - base.astype(int))
        low, high = _interval(changes)
        beside = f"{changes.mean():+.1f} ({low:+.1f} to {high:+.1f})" if changes.any() else "+0.0"
        size = f"{_whole(records)['peak_nbytes'] / r['peak_nbytes']:.1f} ×"
        tokens = f"{r['tokens']:,}"
        lines.append([MODELS[r["model"]], NAMES[r["policy"]], tokens, _needles(r), beside, size])
    head = [*HEAD[:3], HEAD[4], "points beside the whole cache", HEAD[6]]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def stories() -> str:
    """BabiLong with every token cached: the base's answers."""
    records = sorted(_read("babilong"), key=lambda r: r["task"])
    lines = []
    for record in records:
        value, low, high = (f"{100 * x:.1f}" for x in record["value"])
        lines.append([record["task"], str(record["samples"]), f"{value} ({low} to {high})"])
    return f"{markdown(['task', 'questions', 'right, %'], lines)}\n\n{provenance(records)}"


def answers() -> str:
    """What is written in conversations: as the base judges it, and how often it repeats itself."""
    records = _read("answers")
    own, lines = [x["reply"] for x in records[0]["answers"]], []
    for r in records:
        replies = [x["reply"] for x in r["answers"]]
        nats = [n for x in r["answers"] for n in x["nats"]]
        lines.append([
            MODELS[r["model"]],
            NAMES[r["policy"]] + (", int8" if r["cache_dtype"] == "int8" else ""),
            "all" if r["tokens"] is None else f"{r['tokens']:,}",
            f"{numpy.exp(statistics.mean(nats)):.2f}",
            f"{statistics.mean(map(_repeated, replies)):.0%}",
            f"{sum(x == y for x, y in zip(replies, own, strict=True))} of {len(own)}",
        ])  # fmt: skip
    head = [*HEAD[:3], "perplexity of the answers", "repeated", "the stock model's, word for word"]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def _repeated(text: str) -> float:
    """The share of an answer's sequences of three words that it has had before."""
    words = text.split()
    triples = [*zip(words, words[1:], words[2:], strict=False)]
    return 1 - len({*triples}) / len(triples) if triples else 0.0


def speed() -> str:
    """Seconds of a prompt and milliseconds of a decoded token, beside the base as it comes."""
    records = _read("speed")
    own = records[0]
    lines = [
        [
            MODELS[r["model"]],
            NAMES[r["policy"]] + (", int8" if r["cache_dtype"] == "int8" else ""),
            f"{r['tokens']:,}",
            f"{r['chunk']:,}",
            f"{r['prompt_s']:.1f} ({r['prompt_s'] / own['prompt_s']:.1f} ×)",
            f"{r['token_ms']:.0f} ({r['token_ms'] / own['token_ms']:.2f} ×)",
        ]
        for r in records
    ]
    head = [*HEAD[:3], "tokens at a time", "prompt, s", "decoded token, ms"]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def kept_kinds() -> str:
    """How often tokens of a kind are kept, beside all tokens, in all layers and in thirds."""
    records = _read("kept")
    layers = 1 + max(r["layer"] for r in records)
    thirds = [range(layers), *(range(n * layers // 3, (n + 1) * layers // 3) for n in range(3))]
    groups = sorted(
        dict.fromkeys((r["group"], r["label"]) for r in records),
        key=lambda pair: (pair[0], list(LABELS).index(pair[1]) if pair[1] in LABELS else 0),
    )
    lines = []
    for group, label in groups:
        cells = []
        for part in thirds:
            inside = [r for r in records if r["layer"] in part and r["group"] == group]
            own = [r for r in inside if r["label"] == label]
            share = sum(r["kept"] for r in own) / sum(r["total"] for r in own)
            mean = sum(r["kept"] for r in inside) / sum(r["total"] for r in inside)
            cells.append(f"{share / mean:.2f} ×")
        total = sum(r["total"] for r in records if (r["group"], r["label"]) == (group, label))
        lines.append([f"{group}: {LABELS.get(label, label)}", f"{total // layers:,}", *cells])
    head = ["tokens", "of them", "all layers", "first third", "middle", "last third"]
    return f"{markdown(head, lines)}\n\n{provenance(records[:1])}"


def real_int8() -> str:
    """Caches in eight bits, each behind the same one in float32 where there is one."""
    exact, records = ten_books("1024"), ten_books("1024-int8")
    whole, lines = _whole(exact), []
    for record in records:
        for other in exact:
            if _setting(other) == _setting(record):
                lines.append(["32", *_line(other, whole)])
        lines.append(["8", *_line(record, whole)])
    return f"{markdown(['bits', *HEAD], lines)}\n\n{provenance(records)}"


def real_seeds() -> str:
    """Adapters trained under the budgets with three seeds, of which the first is kept."""
    exact, others = ten_books("1024"), _records("seeds")
    whole, settings = _whole(exact), {(*_setting(r)[1:], r["cache_dtype"]) for r in others}
    kept = [
        r
        for r in (*exact, *ten_books("1024-int8"))
        if r["model"] in (EVICT, AT_ONCE) and (*_setting(r)[1:], r["cache_dtype"]) in settings
    ]
    records = sorted([*kept, *others], key=lambda r: (r["cache_dtype"], r["tokens"]))
    lines = [[_bits(r), *_line(r, whole)] for r in records]
    return f"{markdown(['bits', *HEAD], lines)}\n\n{provenance(others)}"


def _bits(record: dict) -> str:
    return "8" if record["cache_dtype"] == "int8" else "32"


def harness() -> str:
    """Tasks of lm-evaluation-harness, every token cached: the base, and what adapters change."""
    earliest = _read("harness-rank-4")
    records = _read("harness") + [r for r in earliest if r["model"] != STOCK]
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
    records = _read("harness-own")
    adapters = [m for m in MODELS if (m, "own") in {(r["model"], r["cache"]) for r in records}]
    cells = {(r["task"], r["measure"], r["model"], r["cache"]): r for r in records}
    lines = []
    for task, measure in dict.fromkeys((r["task"], r["measure"]) for r in records):
        base = cells[task, measure, HIDE, ""]
        row = [f"{task.removeprefix('lm-eval:')}, {measure}", _value(base["value"], base)]
        row += [_value(cells[task, measure, x, "own"]["difference"], base, "+") for x in adapters]
        lines.append(row)
    head = ["task, measure", NAMES["whole"], *(MODELS[x] for x in adapters)]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def last_words() -> str:
    """LAMBADA where caches evict: how far from the base with every token cached."""
    records = _read("lambada")
    cells = {(r["model"], r["cache"], r["measure"]): r for r in records}
    caches = {"": "all tokens", "own": NAMES["by-layer"], "tova 64": "TOVA, 64 tokens"}
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
    head = [*HEAD[:2], "last words right, %", "perplexity"]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def multi_token() -> str:
    """Low-rank matrices alone, and what multi-token attention beside them changes, by seed."""
    records = _read("mta")
    cells = {(r["model"], r["task"], r["measure"]): r for r in records}
    stock = (_value(cells[STOCK, *x]["value"], cells[STOCK, *x]) for x in MEASURES)
    names = {"mta": "multi-token attention"}
    lines = [line for seed in range(3) for line in _beside_control(records, names, seed)]
    table = markdown(HEAD_TRAINED, [["stock", "–", *stock], *lines])
    return f"{table}\n\n{provenance([*_trained('lora', 'standard', 'mta'), *records])}"


def multi_token_lower() -> str:
    """The same at a quarter of that rate, and with talking heads: without kernels."""
    names = {"mta": "multi-token attention", "talking-heads": "talking heads"}
    return _of_seeds("lower", names, _read("mta-lower"))


def multi_token_all() -> str:
    """Where every weight is trained, the control's too."""
    records = _read("mta-all")
    return _of_seeds("all", {"mta": "multi-token attention"}, records, "try")


def parallax_lower() -> str:
    """Parallax at a rate of its own."""
    names = {"parallax": "parallax"}
    return _of_seeds("lower", names, _read("parallax"), "try-parallax", seeds=1)


def _of_seeds(
    study: str, names: dict[str, str], records: list[dict], *others: str, seeds: int = 3
) -> str:
    """Mechanisms of a study beside the control of their seed; other trainings are named below."""
    lines = [x for seed in range(seeds) for x in _beside_control(records, names, seed, study)]
    trained = _trained(study, "standard", *names, *others)
    return f"{markdown(HEAD_TRAINED, lines)}\n\n{provenance([*trained, *records])}"


def multi_token_alone() -> str:
    """What the mechanism changes in the base when nothing else is trained, by seed."""
    records = _read("mta-alone")
    cells = {(r["model"], r["task"], r["measure"]): r for r in records}
    lines = [["stock", *(_value(cells[STOCK, *x]["value"], cells[STOCK, *x]) for x in MEASURES)]]
    names = {"mta": "multi-token attention", "talking": "talking heads"}
    for model in dict.fromkeys(r["model"] for r in records if r["model"] != STOCK):
        _, name, seed = model.split("-")
        values = (_value(cells[model, *x]["difference"], cells[model, *x], "+") for x in MEASURES)
        lines.append([f"{names[name]}, seed {seed}", *values])
    table = markdown([HEAD_TRAINED[0], *HEAD_TRAINED[2:]], lines)
    return f"{table}\n\n{provenance([*_trained('alone', 'try', *names), *records])}"


def rivals() -> str:
    """What two other mechanisms change beside the same control."""
    records, names = _read("rivals"), {"dex": "Dex", "parallax": "parallax"}
    lines = _beside_control(records, names, 0)
    return f"{markdown(HEAD_TRAINED, lines)}\n\n{provenance([*_trained('lora', *names), *records])}"


def _trained(study: str, *mechanisms: str) -> list[dict]:
    """Trainings of a study, whose folders are `runs/STUDY-MECHANISM-SEED`."""
    folders = tuple(f"runs/{study}-{name}-" for name in mechanisms)
    return [r for r in _read("mta-training") if r["model"].startswith(folders)]


def _beside_control(
    records: list[dict], names: dict[str, str], seed: int, study: str = "lora"
) -> list[list[str]]:
    """Low-rank matrices alone, and what mechanisms beside them change."""
    bits = {r["model"]: r["ended"]["bits_per_byte"] for r in _read("mta-training")}
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


def real_short() -> str:
    """The whole cache, policies with about an eighth of its bytes, and two in eight bits."""
    records, quantized = ten_books("1024"), ten_books("1024-int8")
    whole = _whole(records)
    settings = {_setting(r): r for r in records}
    lines = [_line(r, whole) for r in (whole, *(settings[key] for key in SHORT))]
    for record in quantized:
        if _setting(record) == TOVA_INT8 or (record["model"], record["policy"]) == LAST_INT8:
            model, policy, *others = _line(record, whole)
            lines.append([model, f"{policy}, int8", *others])
    return markdown(HEAD, lines)


BLOCKS = {
    "real-short": real_short,
    "real-1024": real_1024,
    "real-earlier": real_earlier,
    "real-2048": lambda: real_cache("2048"),
    "real-4096": lambda: real_cache("4096"),
    "real-gemma": lambda: real_cache("gemma"),
    "real-code": lambda: real_cache("code"),
    "real-known": question_known,
    "real-numbers": several_numbers,
    "real-answers": answers,
    "real-speed": speed,
    "real-babilong": stories,
    "real-kept": kept_kinds,
    "real-int8": real_int8,
    "real-seeds": real_seeds,
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
