"""The pictures of what is gained and lost, from the committed results."""

import json
from pathlib import Path

import numpy
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from benchmarks.real.maps import starts
from benchmarks.real.names import EVICT, HIDE, STOCK, bf16_nbytes, read_study
from benchmarks.real.table import ten_books
from benchmarks.small_caches.table import bf16_bytes

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COLOURS = {"standard": "#8a8a8a", "mta": "#0072b2", "selective": "#d55e00"}
LONGEST = 512  # tokens of a text whose maps are averaged
NAMES = {"standard": "standard", "mta": "multi-token", "selective": "selective"}


def gains() -> Figure:
    """Errors, perplexity after short and longer training, and what small caches cost."""
    runs: dict[tuple[str, str], list[dict]] = {}
    numbers = [
        run for run in _results("magic-numbers-cpu.jsonl")
        if run["steps"] == 400 and run["mechanism"] in ("standard", "mta")
    ]  # fmt: skip
    for run in [*_results("compare-cpu.jsonl"), *_results("text-1600-cpu.jsonl"), *numbers]:
        runs.setdefault((run["task"], run["mechanism"]), []).append(run)
    figure = Figure(figsize=(14.4, 2.7), layout="constrained", facecolor="white")
    parts = figure.subplots(1, 6, width_ratios=[2, 2, 2, 3.4, 4, 4.2])
    blocks, numbers, assignment, text, caches, recall = parts
    for axes, task, title in (
        (blocks, "blocks", "find a block of letters"),
        (numbers, "magic-numbers", "find four numbers"),
        (assignment, "assignment", "variable assignment"),
    ):
        kinds = [kind for kind in NAMES if (task, kind) in runs]
        for at, kind in enumerate(kinds):
            mean = 100 * _mean([x["final"]["in-distribution"] for x in runs[task, kind]])
            axes.bar(at, mean, color=COLOURS[kind], width=0.62)
            axes.text(at, mean + 2, f"{mean:.1f} %", ha="center", fontsize=9)
        axes.set_xticks(range(len(kinds)), [NAMES[kind] for kind in kinds], fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.set_ylim(0, 114)
        axes.set_ylabel("error", fontsize=8)
    for at, kind in enumerate(NAMES):
        by_steps = {}
        for run in runs["text", kind]:
            by_steps.setdefault(run["steps"], []).append(run["final"]["held-out"])
        for side, (_, values) in zip((-0.2, 0.2), sorted(by_steps.items()), strict=True):
            shade = 1.0 if side < 0 else 0.55
            mean = _mean(values)
            text.bar(at + side, mean, color=COLOURS[kind], width=0.38, alpha=shade)
            text.text(at + side, mean + 0.08, f"{mean:.2f}", ha="center", fontsize=8)
    text.set_xticks(range(3), NAMES.values(), fontsize=8)
    text.set_title("text, 400 and 1,600 steps", fontsize=9)
    text.set_ylabel("perplexity per byte", fontsize=8)
    text.set_ylim(0, 5.8)
    names = {
        "standard": ("standard, best policy", "#8a8a8a"),
        "local-global": ("local and global layers", "#009e73"),
        "selective + memory loss": ("selective, memory loss", "#d55e00"),
    }
    _under_budgets(caches, "caches-text-cpu.jsonl", "held-out", names)
    caches.set_xticks([0.5, 2, 8, 25], ["0.5", "2", "8", "25"], fontsize=8)
    caches.set_ylabel("perplexity per token", fontsize=8)
    caches.set_title("text (books) under small caches", fontsize=9)
    caches.legend(fontsize=7.5, frameon=False)
    names["selective"] = names.pop("selective + memory loss")
    _under_budgets(recall, "caches-recall-cpu.jsonl", "in-distribution", names, share=True)
    recall.set_xticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"], fontsize=8)
    recall.set_ylabel("answers wrong, %", fontsize=8)
    recall.set_title("recall under small caches", fontsize=9)
    for axes in parts:
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def courses() -> Figure:
    """Where long training goes, by steps and by the time that they take."""
    runs = [run for run in _results("training-cpu.jsonl") if run["kind"] == "long"]
    times = {run["kind"]: run["times_plain"] for run in _results("training-overhead-cpu.jsonl")}
    figure = Figure(figsize=(9, 3), layout="constrained", facecolor="white")
    by_steps, by_time = figure.subplots(1, 2, sharey=True)
    for run in runs:
        name, (steps, values) = run["name"], zip(*run["curve"], strict=True)
        slower = times[name] / times["standard"]
        look = {"color": COLOURS[name], "marker": "o", "markersize": 3.5, "label": NAMES[name]}
        by_steps.plot(steps, values, **look)
        by_time.plot([step * slower for step in steps], values, **look)
    by_steps.set_xlabel("steps", fontsize=9)
    by_time.set_xlabel("time, in steps of standard attention", fontsize=9)
    by_steps.set_ylabel("bits per byte, evaluation books", fontsize=9)
    by_steps.legend(frameon=False, fontsize=9)
    for axes in (by_steps, by_time):
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def learned() -> Figure:
    """The kernels and mixing matrices of a trained model."""
    lines: dict[tuple[int, str], list[dict]] = {}
    for line in _results("learned-cpu.jsonl"):
        lines.setdefault((line["layer"], line["kind"]), []).append(line)
    layer = next(layer for layer, kind in lines if kind == "conv")
    mixing = [at for at in lines if at[1] in ("mix", "post_mix")]
    titles = {"conv": "kernels before", "post_conv": "kernels after", "mix": "before",
              "post_mix": "after"}  # fmt: skip
    columns = max(len(mixing), 2 * len(lines[layer, "conv"]))
    figure = Figure(figsize=(1.5 * columns, 3.2), layout="constrained", facecolor="white")
    top, bottom = figure.subplots(2, columns)
    panels = [("conv", x) for x in lines[layer, "conv"]]
    panels += [("post_conv", x) for x in lines[layer, "post_conv"]]
    for axes, (kind, line) in zip(top, panels, strict=True):
        _signed(axes, line["values"], f"{titles[kind]}, head {line['number']}")
    for axes, at in zip(bottom, mixing, strict=True):
        _signed(axes, lines[at][0]["values"], f"layer {at[0]}, mixing {titles[at[1]]}")
    return figure


def pretrained() -> Figure:
    """What a pretrained model loses and still finds in how many bytes, by policy."""
    records = {32: ten_books("1024"), 8: ten_books("1024-int8")}
    seeds = read_study("cache-seeds")
    whole = next(x for x in records[32] if (x["model"], x["policy"]) == (STOCK, "whole"))

    def smaller(points: list[dict]) -> list[float]:
        return [bf16_nbytes(x) / x["peak_nbytes"] for x in points]

    def rise(x: dict) -> float:
        return 100 * (x["perplexity"] / whole["perplexity"] - 1)

    def other_seeds(x: dict) -> list[dict]:
        same = ("policy", "tokens", "cache_dtype")
        others = seeds if x["model"] == EVICT else []
        return [y for y in others if all(x[name] == y[name] for name in same)]

    series = {
        (32, STOCK, "streaming-llm"): ("StreamingLLM, no training", "#8a8a8a", "s"),
        (32, STOCK, "tova"): ("TOVA, no training", "#0072b2", "^"),
        (8, STOCK, "tova"): ("TOVA, int8", "#0072b2", "^"),
        (32, STOCK, "triattention"): ("TriAttention, no training", "#56b4e9", "v"),
        (32, HIDE, "most-hidden"): ("selectors, one budget", "#e69f00", "o"),
        (32, HIDE, "by-layer"): ("selectors, per-layer budgets", "#d55e00", "D"),
        (32, EVICT, "by-layer"): ("selectors + LoRA", "#009e73", "*"),
        (8, EVICT, "by-layer"): ("selectors + LoRA, int8", "#009e73", "*"),
    }
    figure = Figure(figsize=(11, 3.1), layout="constrained", facecolor="white")
    loss, recall = figure.subplots(1, 2)
    for (bits, *setting), (label, colour, mark) in series.items():
        points = [x for x in records[bits] if [x["model"], x["policy"]] == setting]
        points.sort(key=lambda x: x["peak_nbytes"])
        style = {"color": colour, "marker": mark, "markersize": 10 if mark == "*" else 5}
        style |= {"linewidth": 1.4, "linestyle": "-" if bits == 32 else "--"}
        rises = [_mean([rise(y) for y in (x, *other_seeds(x))]) for x in points]
        loss.plot(smaller(points), rises, label=label, **style)
        with_needles = [x for x in points if "needles" in x]
        shares = [24 * _mean([*x["needles"].values()]) for x in with_needles]
        recall.plot(smaller(with_needles), shares, **style)
    for axes, title in (
        (loss, "perplexity of books, rise in %"),
        (recall, "numbers found in a book, of 24"),
    ):
        axes.set_xscale("log")
        axes.set_xticks([2, 4, 8, 12], ["2", "4", "8", "12"], fontsize=8)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("× smaller than bf16 (peak of the small cache)", fontsize=8)
        axes.set_title(title, fontsize=9)
        axes.tick_params(axis="y", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    loss.set_ylim(0, 15)
    recall.set_ylim(0, 25)
    figure.legend(*loss.get_legend_handles_labels(), fontsize=7.5, frameon=False, handlelength=3,
                  loc="outside right center")  # fmt: skip
    return figure


def equal_bytes() -> Figure:
    """Loss of every method by compression, on questions and on books."""
    figure = Figure(figsize=(11, 3.4), layout="constrained", facecolor="white")
    recall, books = figure.subplots(1, 2)
    _at_equal_bytes(recall, "equal-recall-cpu.jsonl", scale=100)
    _at_equal_bytes(books, "equal-text-cpu.jsonl", scale=1)
    recall.set_title("facts that are requested at the end", fontsize=9)
    recall.set_ylabel("answers wrong, %", fontsize=8)
    books.set_title("books", fontsize=9)
    books.set_ylabel("perplexity per token", fontsize=8)
    books.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _at_equal_bytes(axes, file: str, scale: float) -> None:
    records = _results(file)
    series = {
        ("standard", "TOVA"): ("TOVA, no training", "#0072b2", "^"),
        ("standard", "TriAttention"): ("TriAttention, no training", "#56b4e9", "v"),
        ("standard", "StreamingLLM"): ("StreamingLLM, no training", "#8a8a8a", "s"),
        ("local-global", "StreamingLLM"): ("local and global layers", "#cc79a7", "P"),
        ("gates beside standard", None): ("gates, model frozen", "#e69f00", "o"),
        ("gates, memory loss", None): ("gates, memory loss", "#7a4f00", "p"),
        ("selectors beside standard", "MostHidden"): ("selectors, model frozen", "#d55e00", "D"),
        ("selective, memory loss", "MostHidden"): ("selective, memory loss", "#009e73", "*"),
        ("forgetting", None): ("forgetting, by its error", "#f0e442", "X"),
    }
    for (model, policy), (label, colour, mark) in series.items():
        best = {}  # gates have several policies, of which the best one counts
        for x in records:
            if x["model"] == model and policy in (x["policy"], None):
                value = scale * next(iter(x["final"].values()))
                point = (value, bf16_bytes(x) / x["peak_bytes"])
                key = x["policy"] if x["share"] is None else x["share"]
                best[key] = min(best.get(key, point), point)
        points = sorted((ratio, value) for value, ratio in best.values())
        style = {"color": colour, "marker": mark, "markersize": 9 if mark == "*" else 5}
        axes.plot(*zip(*points, strict=True), label=label, linewidth=1.4, **style)
    axes.set_xscale("log")
    most = max(bf16_bytes(x) / x["peak_bytes"] for x in records)
    ticks = [ratio for ratio in (0.5, 1, 2, 4, 8, 16) if ratio <= 1.05 * most]
    axes.set_xticks(ticks, [f"{ratio:g}" for ratio in ticks], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("× smaller than bf16 (peak of the cache)", fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def averaged_maps() -> Figure:
    """Attention maps before and after the convolutions: all heads, two of them, and what moves."""
    of_layer: dict[int, list[dict]] = {}
    for record in _results("maps-cpu.jsonl"):
        of_layer.setdefault(record["layer"], []).append(record["maps"])
    layers = sorted(of_layer)
    moved = [_over(of_layer[x], "weights", "from_before").tolist() for x in layers]
    most = sorted(((max(x), n, x.index(max(x))) for n, x in enumerate(moved)), reverse=True)[:2]
    figure = Figure(figsize=(12.6, 3.1), layout="constrained", facecolor="white")
    parts = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.15])
    looks = {
        "before": ("softmax of the raw logits", "#8a8a8a", "-"),
        "probabilities": ("probabilities, of convolved and mixed logits", "#56b4e9", "--"),
        "weights": ("weights: these convolved and mixed", "#0072b2", "-"),
    }
    for stage, (label, colour, dash) in looks.items():
        spread = [_over(of_layer[x], stage, "by_distance") for x in layers]
        curves = [sum(spread).mean(0) / len(layers), *(spread[n][head] for _, n, head in most)]
        for axes, curve in zip(parts, curves, strict=False):
            least = numpy.array(starts(LONGEST))
            width = numpy.diff([*least, LONGEST])
            middle = least + (width - 1) / 2
            style = {"color": colour, "linestyle": dash, "linewidth": 1.5, "label": label}
            axes.plot(1 + middle, 100 * curve / width, **style)
    titles = [f"layer {layers[n]}, head {head}" for _, n, head in most]
    for axes, title in zip(parts, ["mean of all heads", *titles], strict=False):
        axes.set_xscale("log")
        axes.set_xticks([1, 2, 4, 11, 33, 129], ["0", "1", "3", "10", "32", "128"], fontsize=8)
        axes.minorticks_off()
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        axes.set_xlabel("distance of the key, tokens", fontsize=9)
        axes.set_title(title, fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    parts[0].set_ylabel("weight of one key, %", fontsize=9)
    image = parts[3].imshow(100 * numpy.array(moved), cmap="Blues", vmin=0, aspect="auto")
    parts[3].set_title("weight that moves, %", fontsize=9)
    parts[3].set_xticks(range(len(moved[0])))
    parts[3].set_yticks(range(len(layers)), layers)
    parts[3].set_xlabel("head", fontsize=9)
    parts[3].set_ylabel("layer", fontsize=9)
    figure.colorbar(image, ax=parts[3]).ax.tick_params(labelsize=8)
    for axes in parts:
        axes.tick_params(labelsize=8)
    figure.legend(*parts[0].get_legend_handles_labels(), fontsize=8.5, frameon=False, ncols=3,
                  loc="outside lower center")  # fmt: skip
    return figure


def _over(maps: list[dict], stage: str, measure: str) -> numpy.ndarray:
    """A measure of every head, mean of the seeds."""
    return numpy.mean([x[stage][measure] for x in maps], axis=0)


def _signed(axes, values: list[list[float]], title: str) -> None:
    axes.imshow(values, cmap="RdBu", norm=Normalize(-0.3, 0.3), interpolation="nearest")
    axes.set_title(title, fontsize=7)
    axes.set_xticks([])
    axes.set_yticks([])


def _under_budgets(axes, file: str, split: str, names: dict, share: bool = False) -> None:
    """The best policy at every budget, against the compression of the cache of one sequence."""
    for kind, (label, colour) in names.items():
        best, searched = {}, []
        for run in _results(file):
            if run["mechanism"] == kind and run["policy"] != "Random":
                ratio = bf16_bytes(run) / run["peak_bytes"]
                point = (run["final"][split] * (100 if share else 1), ratio)
                if "searched" in run["policy"]:
                    searched.append(point)
                else:
                    best[run["tokens"]] = min(best.get(run["tokens"], point), point)
        points = sorted((ratio, value) for value, ratio in best.values())
        axes.plot(*zip(*points, strict=True), "o-", color=colour, label=label, ms=3.5, lw=1.4)
        if searched:
            values, ratios = zip(*searched, strict=True)
            axes.plot(ratios, values, "*", color=colour, label="per-layer budgets", ms=9)
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xlabel("× smaller than bf16 (peak)", fontsize=8)


def _results(name: str) -> list[dict]:
    (path,) = BENCHMARKS.glob(f"*/results/{name}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
