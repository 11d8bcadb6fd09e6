"""The tables of a pretrained model under small caches."""

import statistics
from functools import partial

import numpy

from benchmarks.parts import markdown, provenance
from benchmarks.real import evaluations
from benchmarks.real.names import (
    ALWAYS,
    BY_LAYER,
    EVICT,
    HIDE,
    MODELS,
    POLICIES,
    STOCK,
    bf16_nbytes,
    read_study,
)

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
HEAD = [
    "model",
    "policy",
    "tokens",
    "perplexity",
    "needles found",
    "peak MB",
    "× smaller than bf16",
]
TIMES = ["ms per token", "prompt, s"]
NEEDLES = {1024: 8, 2048: 4, 8192: 4}  # texts at each depth, by their length
SEEDS = (EVICT, "runs/evict-seed-1", "runs/evict-seed-2")
SHORT = (
    (STOCK, "streaming-llm", 128),
    (STOCK, "tova", 128),
    (HIDE, "by-layer", 120),
    (EVICT, "by-layer", 120),
)
TOVA_INT8, LAST_INT8 = (STOCK, "tova", 448), (EVICT, "by-layer")
KERNELS = ("conv", "post_conv")
STEPS = {
    "pre-convolution": "kernels before the softmax",
    "probabilities": "mixing before",
    "post-convolution": "kernels after",
    "weights": "mixing after",
}
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
    """A setting beside the base with its full cache; of ten books with an interval."""
    return [
        MODELS[record["model"]],
        POLICIES[record["policy"]],
        f"{record['tokens']:,}",
        _rise(record, whole),
        _needles(record),
        f"{record['peak_nbytes'] / 1e6:.1f}",
        _compression(record),
    ]


def _compression(record: dict) -> str:
    return f"{bf16_nbytes(record) / record['peak_nbytes']:.1f} ×"


def _times(record: dict) -> list[str]:
    """Milliseconds of a token and seconds of the prompt; × those of transformers' own cache."""
    same = ("model", "policy", "cache_dtype", "length", "chunk")
    timed = [x for x in read_study("speed-rows") if not x["slack"] and not x.get("compiled")]
    alike = [x for x in timed if all(x[key] == record[key] for key in (*same, "tokens"))]
    if not alike:
        return ["–", "–"]
    (own,), (base,) = alike, (x for x in timed if x["policy"] == "own")
    return [
        f"{own['token_ms']:.0f} ({own['token_ms'] / base['token_ms']:.1f} ×)",
        f"{own['prompt_s']:.1f} ({own['prompt_s'] / base['prompt_s']:.1f} ×)",
    ]


def _rise(record: dict, whole: dict) -> str:
    """Rise of perplexity, and its range in 95 % of bootstrap samples of ten books."""
    rises = numpy.array(record["nats"]) - numpy.array(whole["nats"])
    rise = f"{numpy.expm1(rises.mean()):+.1%}"
    if len(rises) < 10 or record is whole:
        return rise
    low, high = numpy.expm1(mean_interval(rises))
    return f"{rise} ({100 * low:.1f} to {100 * high:.1f})"


def mean_interval(values: numpy.ndarray) -> numpy.ndarray:
    """Between which two the mean of 95 % of bootstrap samples lies."""
    draws = numpy.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    return numpy.quantile(values[draws].mean(1), (0.025, 0.975))


def _needles(record: dict) -> str:
    """Number of needles in the answers, or a dash where the study has none."""
    if "needles" not in record:
        return "–"
    asked = {key: len(x) for key, x in record.get("hits", {}).items()}
    counts = [
        (x, asked.get(key, NEEDLES[record["length"]])) for key, x in record["needles"].items()
    ]
    return f"{sum(round(x * n) for x, n in counts)} of {sum(n for _, n in counts)}"


def _whole(records: list[dict]) -> dict:
    """The model as it comes, with every token cached."""
    return next(r for r in records if MODELS[r["model"]] == "base" and r["policy"] == "whole")


def _setting(record: dict) -> tuple[str, str, int]:
    return record["model"], record["policy"], record["tokens"]


def _records(name: str) -> list[dict]:
    """The records of a file, the base first and every model's full cache before its policies."""
    models = list(MODELS)
    return sorted(
        read_study(f"cache-{name}"),
        key=lambda r: (models.index(r["model"]), r["policy"] != "whole", r["policy"], -r["tokens"]),
    )


def ten_books(name: str) -> list[dict]:
    """Records of ten books, with the needles of the same settings in another file."""
    needles = {_setting(r): r["needles"] for r in _records(name)}
    return [
        r if "needles" in r or _setting(r) not in needles else r | {"needles": needles[_setting(r)]}
        for r in _records(f"{name}-ten")
    ]


def real_cache(name: str) -> str:
    """Perplexity, needles and bytes of every policy, beside the base with its full cache."""
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


def needles_alone(name: str) -> str:
    """Needles of every policy, without perplexity."""
    records = _records(name)
    lines = [
        [MODELS[r["model"]], POLICIES[r["policy"]], f"{r['tokens']:,}", _needles(r)]
        for r in records
    ]
    return f"{markdown(HEAD[:3] + HEAD[4:5], lines)}\n\n{provenance(records)}"


def several_numbers() -> str:
    """Several numbers in a text, one of them queried: beside the base with its full cache."""
    records = _records("numbers")
    base, lines = numpy.concatenate([*_whole(records)["hits"].values()]), []
    for r in records:
        changes = 100 * (numpy.concatenate([*r["hits"].values()]) - base.astype(int))
        low, high = mean_interval(changes)
        beside = f"{changes.mean():+.1f} ({low:+.1f} to {high:+.1f})" if changes.any() else "+0.0"
        size = _compression(r)
        tokens = f"{r['tokens']:,}"
        lines.append([MODELS[r["model"]], POLICIES[r["policy"]], tokens, _needles(r), beside, size])
    head = [*HEAD[:3], HEAD[4], "points beside the full cache", HEAD[6]]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def answers() -> str:
    """Answers in conversations: as the base judges them, and how often they repeat themselves."""
    records = read_study("answers")
    own, lines = [x["reply"] for x in records[0]["answers"]], []
    for r in records:
        replies = [x["reply"] for x in r["answers"]]
        nats = [n for x in r["answers"] for n in x["nats"]]
        lines.append([
            MODELS[r["model"]],
            POLICIES[r["policy"]]
            + (", int8" if r["cache_dtype"] == "int8" else "")
            + (", compiled" if r.get("compiled") else ""),
            "all" if r["tokens"] is None else f"{r['tokens']:,}",
            f"{numpy.exp(statistics.mean(nats)):.2f}",
            f"{statistics.mean(map(_repeated, replies)):.0%}",
            f"{sum(x == y for x, y in zip(replies, own, strict=True))} of {len(own)}",
        ])  # fmt: skip
    head = [*HEAD[:3], "perplexity of the answers", "repeated", "the base model's, word for word"]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def _repeated(text: str) -> float:
    """The share of an answer's sequences of three words that it has had before."""
    words = text.split()
    triples = [*zip(words, words[1:], words[2:], strict=False)]
    return 1 - len({*triples}) / len(triples) if triples else 0.0


def speed(study: str) -> str:
    """Seconds of a prompt and milliseconds of a decoded token, beside the base as it comes."""
    records = read_study(study)
    own = records[0]
    lines = [
        [
            MODELS[r["model"]],
            POLICIES[r["policy"]]
            + (", int8" if r["cache_dtype"] == "int8" else "")
            + (", compiled" if r.get("compiled") else ""),
            f"{r['tokens']:,}" + (f", slack {r['slack']}" if r.get("slack") else ""),
            f"{r['chunk']:,}",
            f"{r['prompt_s']:.1f} ({r['prompt_s'] / own['prompt_s']:.1f} ×)",
            f"{r['token_ms']:.0f} ({r['token_ms'] / own['token_ms']:.2f} ×)",
            f"{r['bf16_nbytes'] / r['nbytes']:.1f} ×" if r["nbytes"] else "–",
        ]
        for r in records
    ]
    head = [*HEAD[:3], "tokens at a time", "prompt, s", "decoded token, ms", HEAD[-1]]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def batches() -> str:
    """Tokens per second of many requests, beside transformers' own cache of the same bytes."""
    records = read_study("batches")
    owns = {r["beside"]: r for r in records if r["policy"] == "own"}
    lines = [
        [
            MODELS[r["model"]],
            POLICIES[r["policy"]],
            f"{r['tokens']:,}" + (f", slack {r['slack']}" if r["slack"] else ""),
            str(r["requests"]),
            f"{r['nbytes'] / 1e6:.0f}",
            f"{r['step_ms']:.0f}",
            f"{r['tokens_per_second']:.0f} "
            f"({r['tokens_per_second'] / owns[r['beside']]['tokens_per_second']:.1f} ×)",
        ]
        for r in records
    ]
    head = [*HEAD[:3], "requests", "cache, MB", "ms per step", "tokens per second of all"]
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def kept_kinds() -> str:
    """Rate at which tokens of a kind are kept, beside all tokens, in all layers and in thirds."""
    records = read_study("kept")
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


def averaged_maps() -> str:
    """Shift of attention weights by multi-token attention, step by step; mean of the seeds."""
    records, lines = read_study("maps"), []
    layers = [[n] for n in sorted({r["layer"] for r in records})]
    for part in (*layers, [n for (n,) in layers]):
        own = [r for r in records if r["layer"] in part]

        def mean(stage: str, measure: str, own: list[dict] = own) -> float:
            return statistics.mean(x for r in own for x in r["maps"][stage][measure])

        heads = numpy.array([r["maps"]["weights"]["from_before"] for r in own])
        heads = heads.reshape(-1, len(part), heads.shape[1]).mean(0)  # over the seeds
        largest = max(x for r in own for name in KERNELS for x in r["learned"][name])
        lines.append([
            str(*part) if len(part) == 1 else "all of these",
            f"{largest:.4f}",
            *(f"{mean(stage, 'from_former'):.1%}" for stage in STEPS),
            f"{mean('weights', 'from_before'):.1%} ({heads.min():.1%} to {heads.max():.1%})",
            f"{mean('before', 'first'):.1%}, {mean('weights', 'first'):.1%}",
            f"{mean('before', 'entropy'):.2f}, {mean('weights', 'entropy'):.2f}",
        ])  # fmt: skip
    head = ["layer", "largest change of a kernel", *STEPS.values(), "all (heads)",
            "first token, before and after", "entropy, before and after"]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{provenance(records)}"


def real_int8() -> str:
    """Int8 caches, each behind the same one in float32 where there is one."""
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
        if r["model"] == EVICT and (*_setting(r)[1:], r["cache_dtype"]) in settings
    ]
    records = sorted([*kept, *others], key=lambda r: (r["cache_dtype"], r["tokens"]))
    lines = [[_bits(r), *_line(r, whole)] for r in records]
    return f"{markdown(['bits', *HEAD], lines)}\n\n{provenance(others)}"


def real_heads() -> str:
    """Budgets of key heads, behind those of layers for the same adapter and as many bytes."""
    records, whole = _records("heads"), _whole(ten_books("1024"))
    layers = [*ten_books("1024"), *ten_books("1024-int8"), *_records("seeds")]
    lines, sizes = [], sorted({(_bits(r), _about(r)) for r in records}, reverse=True)
    for bits, tokens in sizes:
        for adapter in dict.fromkeys(BY_LAYER.values()):
            own = [r for r in records if BY_LAYER[r["model"]] == adapter]
            own = [r for r in own if (_bits(r), _about(r)) == (bits, tokens)]
            setting = adapter, "by-layer", tokens
            before = [r for r in layers if _setting(r) == setting and _bits(r) == bits]
            for r in (*before, *own) if own else ():
                model, policy, *others = _line(r, whole)
                policy += ", searched for as many tokens" if _searched(r) else ""
                lines.append([bits, model, policy, *others])
    return f"{markdown(['bits', *HEAD], lines)}\n\n{provenance(records)}"


def _searched(record: dict) -> bool:
    """Test whether its key heads' budgets were searched for as many tokens as in their use."""
    return "-400" in record["model"]


def _about(record: dict) -> int:
    """With how many tokens per layer it is compared, of about as many bytes."""
    return 400 if _searched(record) else {181: 184}.get(record["tokens"], record["tokens"])


def _bits(record: dict) -> str:
    return "8" if record["cache_dtype"] == "int8" else "32"


def real_short() -> str:
    """The full cache, policies with about an eighth of its tokens, and some in int8, with times."""
    records, quantized = ten_books("1024"), ten_books("1024-int8")
    whole, others = _whole(records), _records("seeds")
    settings = {_setting(r): r for r in records}
    rows = [whole, *(settings[key] for key in SHORT)]
    rows += [r for r in quantized if _setting(r) == TOVA_INT8 or _setting(r)[:2] == LAST_INT8]
    lines = []
    for r in rows:
        model, policy, *cells = _line(r, whole)
        key = (r["policy"], r["tokens"], r["cache_dtype"])
        seeds = [x for x in others if (x["policy"], x["tokens"], x["cache_dtype"]) == key]
        if r["model"] == EVICT and len(seeds) == len(SEEDS) - 1:
            cells[1] = _mean_rise([r, *seeds], whole)
            cells[2] = _needles(r)
        policy += ", int8" if r["cache_dtype"] == "int8" else ""
        lines.append([model, policy, *cells, *_times(r)])
    return markdown([*HEAD, *TIMES], lines)


def _mean_rise(records: list[dict], whole: dict) -> str:
    """The mean rise of perplexity of three seeds, and each of them."""
    rises = [
        numpy.expm1((numpy.array(r["nats"]) - numpy.array(whole["nats"])).mean()) for r in records
    ]
    each = ", ".join(f"{100 * x:.1f}" for x in rises)
    return f"{statistics.mean(rises):+.1%} (seeds: {each})"


BLOCKS = {
    "real-short": real_short,
    "real-1024": real_1024,
    "real-earlier": real_earlier,
    "real-2048": lambda: real_cache("2048"),
    "real-4096": lambda: real_cache("4096"),
    "real-8192": lambda: real_cache("8192"),
    "real-batches": batches,
    "real-gemma": lambda: real_cache("gemma"),
    "real-code": lambda: real_cache("code"),
    "real-8192-needles": lambda: needles_alone("8192-needles"),
    "real-known": lambda: needles_alone("known"),
    "real-numbers": several_numbers,
    "real-answers": answers,
    "real-speed-rows": partial(speed, "speed-rows"),
    "real-speed-8192": partial(speed, "speed-8192"),
    "real-kept": kept_kinds,
    "real-int8": real_int8,
    "real-seeds": real_seeds,
    "real-heads": real_heads,
    "real-maps": averaged_maps,
} | evaluations.BLOCKS
