"""The pictures of a report: curves, lengths, kernels, attention maps and caches, each as SVG.

Every function returns one picture of the width of a phone, so that a page may set two of them side
by side on a laptop and one below the other on a phone, with legible labels on both.
"""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from heedful_lab.commands.compare.findings import BASELINE
from heedful_lab.records import METRICS, SHARES, WHOLE, Record, UnderBudget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#333333", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, safe for colour-blind readers; the first is the baseline's."""

DASHES = ("-", "--", "-.", ":")
WIDTH = 4.8
_LABELS = 48  # tokens on an axis beyond which their labels are illegible


def visible(token: str) -> str:
    """A token with its white space and non-printing characters as visible glyphs."""
    if not token:
        return "∅"
    glyphs = {" ": "␣", "\n": "↵", "\r": "↲", "\t": "⇥"}
    return "".join(
        glyphs.get(char, char if char.isprintable() else f"\\u{ord(char):04x}") for char in token
    )


def svg(figure: "Figure") -> bytes:
    """The figure as SVG, the same bytes for the same figure; letters become outlines."""
    import matplotlib

    out = io.BytesIO()
    # Outlines, since a reader's machine may lack the font the labels were laid out with.
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "heedful"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def colours(mechanisms: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and dash of each mechanism: colours differ first, dashes also once they run out."""
    others = [name for name in dict.fromkeys(mechanisms) if name != BASELINE]
    rest = PALETTE[1:]
    styles = {
        name: (rest[i % len(rest)], DASHES[(i + 1 + i // len(rest)) % len(DASHES)])
        for i, name in enumerate(others)
    }
    return {BASELINE: (PALETTE[0], DASHES[0]), **styles}


def curves(records: Sequence[Record], colour: dict[str, tuple[str, str]]) -> "Figure | None":
    """Learning curves of one task: a thin line per seed and the mean over seeds as a thick one.

    The mean takes the steps that all seeds have. A perplexity's axis ends where most of its early
    fall is over, which would make the ends look like one line. None if there is nothing to draw.
    """
    metric = records[0].metric
    percent = 100 if metric in SHARES else 1
    lines: dict[str, list[dict[int, float]]] = {}
    for record in records:
        points = {step: percent * y for step, y in record.curve if math.isfinite(y)}
        lines.setdefault(record.mechanism, []).extend([points] if points else [])
    drawn = [points for seeds in lines.values() for points in seeds]
    if not drawn:
        return None
    figure, axes = new_axes(3.4)
    for name, seeds in lines.items():
        shade, dash = colour[name]
        for seed in seeds:
            _line(axes, seed, color=shade, linewidth=0.8, alpha=0.4)
        shared = sorted(set.intersection(*map(set, seeds))) if seeds else []
        mean = {step: float(np.mean([seed[step] for seed in seeds])) for step in shared}
        _line(axes, mean, color=shade, linewidth=2, linestyle=dash, label=label_of(name))
    low, high = axes.get_ylim()
    if metric == "perplexity":
        half = max(map(max, drawn)) / 2
        late = [y for points in drawn for step, y in points.items() if step >= half]
        axes.set_ylim(0.95 * min(late), min(high, 1.5 * max(late)))
    else:
        least = min(min(points.values()) for points in drawn)
        axes.set_ylim(0 if percent == 100 or least < high / 2 else low, high)
    axes.set_ylabel(f"{METRICS[metric]} on the evaluation set{', %' if percent == 100 else ''}")
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    add_legend(figure, axes)
    return figure


def kernels(weights: ArrayLike) -> "Figure":
    """The kernels of a layer `[H, c_q, c_k]`, one panel per head, all on one scale of colours."""
    weight = np.asarray(weights, dtype=float)
    heads, rows, columns = weight.shape
    across = min(heads, 4 if columns <= 15 else 2)
    down = math.ceil(heads / across)
    height = max(0.5, (WIDTH - 0.9) / across * rows / columns)
    figure, grid = new_grid(down * (height + 0.28) + 1.0, down, across)
    left, scale = -((columns - 1) // 2) - 0.5, float(np.abs(weight).max()) or 1.0
    for head, axes in enumerate(grid.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        image = axes.imshow(
            weight[head], cmap="RdBu_r", vmin=-scale, vmax=scale, aspect="auto",
            extent=(left, left + columns, -0.5, rows - 0.5),
        )  # fmt: skip
        axes.set_title(f"head {head}", fontsize=8, pad=2)
        axes.tick_params(length=2, pad=1.5, labelsize=7)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True, nbins=5)
        axes.set_xlabel("key offset", fontsize=8)
        axes.label_outer()
    figure.supylabel("queries back", fontsize=8)
    add_colour_bar(figure, image, grid)
    return figure


def attention_map(tokens: Sequence[str], weights: ArrayLike) -> "Figure":
    """An attention map, queries down and keys across, labelled by tokens where they fit.

    Weights below zero, which a convolution after the softmax can give, get a diverging colour map.
    """
    from matplotlib.colors import Normalize, PowerNorm

    weight = np.array(weights, dtype=float)
    weight[np.triu(weight == 0, k=1)] = np.nan  # the future shows grey, apart from small weights
    top = float(np.nanmax(np.abs(weight))) if np.isfinite(weight).any() else 1.0
    signed = bool((weight < 0).any())
    norm = Normalize(-top or -1, top or 1) if signed else PowerNorm(0.5, 0, top or 1)
    figure, axes = new_axes(5.3)
    image = axes.imshow(weight, cmap="RdBu_r" if signed else "Blues", norm=norm, aspect="auto")
    if len(tokens) <= _LABELS:
        labels = [label_of(visible(token)) for token in tokens]
        size = min(8.0, 72 * 3.6 / len(tokens))
        turn = 90 if max(map(len, labels)) > 1 else 0
        axes.set_xticks(range(len(tokens)), labels, rotation=turn, fontsize=size)
        axes.set_yticks(range(len(tokens)), labels, fontsize=max(size, 5))
    axes.tick_params(length=0, pad=2)
    axes.set_facecolor("#e9e9e9")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    add_colour_bar(figure, image, axes)
    return figure


def under_budgets(scored: Sequence[UnderBudget], mechanism: str, split: str) -> "Figure":
    """Quality against compression of one mechanism on one task, a line for each policy."""
    own = [x for x in scored if x.mechanism == mechanism]
    percent = 100 if own[0].metric in SHARES else 1
    figure, axes = new_axes(3.4)
    whole = _mean(own, WHOLE, split)
    policies = dict.fromkeys(x.policy for x in scored if x.policy != WHOLE)
    for policy, shade in zip(policies, [*PALETTE[1:]] * len(policies), strict=False):
        points = _mean(own, policy, split)
        if points:
            points = dict(sorted((points | whole).items()))
            _line(
                axes, {x: percent * y for x, y in points.items()}, marker="o", ms=3.5, lw=1.3,
                color=shade, label=policy,
            )  # fmt: skip
    for x, y in whole.items():
        axes.plot(x, percent * y, "s", ms=6, color="black", mfc="white", zorder=4)
    for y in _mean([x for x in scored if x.mechanism == BASELINE], WHOLE, split).values():
        axes.axhline(percent * y, ls="--", lw=0.9, color=PALETTE[0])
    hybrid = [x for x in scored if x.mechanism.startswith("local-global")]
    for x, y in _mean(hybrid, WHOLE, split).items():
        axes.plot(x, percent * y, "*", ms=10, color="black", mfc=PALETTE[-1], zorder=5)
    values = [percent * x.final[split] for x in scored if math.isfinite(x.final[split])]
    room = 0.05 * ((max(values) - min(values)) or 1.0)  # all may be the same
    axes.set_ylim(min(values) - room, max(values) + room)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("× smaller than bf16 (peak of one sequence)")
    axes.set_ylabel(f"{METRICS[own[0].metric]}{', %' if percent == 100 else ''}")
    axes.set_title(mechanism, fontsize=9)
    add_legend(figure, axes)
    return figure


def _mean(scored: Iterable[UnderBudget], policy: str, split: str) -> dict[float, float]:
    """By compression, the mean over seeds."""
    scores: dict[float, list[float]] = {}
    for x in scored:
        if x.policy == policy:
            scores.setdefault(x.compression, []).append(x.final[split])
    return {ratio: float(np.mean(values)) for ratio, values in scores.items()}


def cached(layers: Mapping[int, ArrayLike]) -> "Figure":
    """Time downwards, a sequence's tokens across: dark where a layer's token is still cached."""
    across = min(len(layers), 2)
    down = -(-len(layers) // across)
    figure, grid = new_grid(down * WIDTH / across + 0.4, down, across)
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    for axes, (index, map_) in zip(grid.flat, layers.items(), strict=False):
        weights = np.asarray(map_, dtype=float)
        read = np.tril(np.ones_like(weights))
        shade = 1 - 0.85 * weights - 0.06 * (1 - weights) * read
        axes.imshow(shade, cmap="gray", vmin=0, vmax=1)
        count = int(weights[-1].sum())
        axes.set_title(f"layer {index}: {count} of {len(weights)} at the end", fontsize=8, pad=3)
        axes.tick_params(labelsize=7, length=2)
        axes.set_xlabel("token", fontsize=8)
    grid.flat[0].set_ylabel("after token", fontsize=8)
    return figure


def new_grid(height: float, down: int, across: int):
    """A figure of its own, which needs no window and leaves matplotlib's global state alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False)


def new_axes(height: float):
    """A figure of one panel."""
    figure, grid = new_grid(height, 1, 1)
    axes = grid[0, 0]
    axes.tick_params(labelsize=8)
    axes.xaxis.label.set_size(9)
    axes.yaxis.label.set_size(9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _line(axes, points: dict[float, float], **style) -> None:
    marker = {"marker": "o"} if len(points) == 1 else {}  # a line of one point would not show
    axes.plot(list(points), list(points.values()), **(marker | style))


def add_legend(figure: "Figure", axes) -> None:
    """Name the lines below the panel."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(3, len(labels)), frameon=False,
            fontsize=8, handlelength=2.6,
        )  # fmt: skip


def add_colour_bar(figure: "Figure", image, axes) -> None:
    """Say below the panels what the colours of an image mean."""
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.ax.locator_params(nbins=5)
    bar.outline.set_visible(False)


def label_of(text: str) -> str:
    """A label no longer than fits, free of characters that the font of the figures lacks."""
    from matplotlib.font_manager import findfont, get_font

    has = get_font(findfont("DejaVu Sans")).get_char_index
    text = "".join(char if has(ord(char)) else "□" for char in text)
    text = text if len(text) <= 18 else text[:17] + "…"
    return text.replace("$", r"\$")  # a dollar sign is no formula
