"""The pictures of a report: learning curves, lengths, kernels and attention maps, each as SVG.

Every function returns one picture of the width of a phone, so that a page may set two of them side
by side on a laptop and one below the other on a phone, with legible labels on both.
"""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from heedful.checks import UserError
from heedful_lab.commands.compare.findings import BASELINE, number
from heedful_lab.records import METRICS, SHARES, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = ("#333333", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, safe for colour-blind readers; the first is the baseline's."""

DASHES = ("-", "--", "-.", ":")
WIDTH = 4.8
_LABELS = 48  # tokens on an axis beyond which their labels are illegible
_POINTS = 150  # points of a training-loss line; more only make the page heavier


class KernelExhibit(NamedTuple):
    """The convolution kernels of a layer, one per head.

    Arguments:
        layer: index of the layer.
        kind: `"pre"` or `"post"`: before or after the softmax.
        kernels: `[H, c_q, c_k]`; the last row is the current query, the centre the same key.
    """

    task: str
    mechanism: str
    layer: int
    kind: Literal["pre", "post"]
    kernels: ArrayLike


class MixExhibit(NamedTuple):
    """Mixing of a layer's heads: `matrix` is `[H, H]`, indexed `[out, in]`."""

    task: str
    mechanism: str
    layer: int
    matrix: ArrayLike
    kind: Literal["pre", "post"] = "pre"


class MapExhibit(NamedTuple):
    """The attention weights of one head on one sample.

    Arguments:
        layer, head: which head of which layer.
        tokens: the text of each token.
        weights: `[T, T]`, query by key.
        rows: the queries to show; None shows all.
        unit: what `head` counts: heads, or pairs of them that share a map.
    """

    task: str
    mechanism: str
    layer: int
    head: int
    tokens: Sequence[str]
    weights: ArrayLike
    rows: Sequence[int] | None = None
    unit: str = "head"


class HidingExhibit(NamedTuple):
    """Masking of tokens by each other, in one layer of selective attention on one sample.

    Arguments:
        layer: index of the layer.
        tokens: the text of each token.
        hiding: `[T, T]`: how much token p (row) hides token j (column) from later ones, >= 0.
        accumulated: `[T]`: F at the end, what is subtracted from every later logit of the token.
    """

    task: str
    mechanism: str
    layer: int
    tokens: Sequence[str]
    hiding: ArrayLike
    accumulated: ArrayLike


Exhibit = KernelExhibit | MixExhibit | MapExhibit | HidingExhibit


def array(name: str, value: ArrayLike, *shape: int | None) -> np.ndarray:
    """`value` as a float array of this shape (None: any size); raises naming `name`."""
    values = np.asarray(value, dtype=float)
    fits = values.ndim == len(shape) and all(
        size > 0 and want in (None, size) for size, want in zip(values.shape, shape, strict=False)
    )
    if not fits:
        want = ", ".join("any" if size is None else str(size) for size in shape)
        raise UserError(f"{name} must have the shape [{want}], got {list(values.shape)}")
    return values


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


def curves(
    records: Sequence[Record],
    colour: dict[str, tuple[str, str]],
    *,
    loss: bool = False,
    since: int = 0,
) -> "Figure | None":
    """Learning curves of one task: a thin line per seed and the mean over seeds as a thick one.

    The mean takes the steps that all seeds have. Perplexity is drawn on a logarithmic axis where it
    spans more than a factor of three. `loss` draws the training loss instead, averaged over
    stretches of steps where there are very many points. `since` is the first step to draw. None
    where there is nothing to draw.
    """
    metric = "loss" if loss else records[0].metric
    lines = {
        name: [
            [
                (step, y)
                for step, y in (thin(r.loss_curve) if loss else r.curve)
                if step >= since and math.isfinite(y)
            ]
            for r in records
            if r.mechanism == name
        ]
        for name in dict.fromkeys(r.mechanism for r in records)
    }
    heights = [y for seeds in lines.values() for seed in seeds for _, y in seed]
    if not heights:
        return None
    percent = 100 if metric in SHARES else 1
    figure, axes = new_axes(3.4)
    for name, seeds in lines.items():
        shade, dash = colour[name]
        seeds = [dict(seed) for seed in seeds if seed]
        for seed in seeds:
            _line(axes, seed, percent, color=shade, linewidth=0.8, alpha=0.4)
        shared = sorted(set.intersection(*map(set, seeds))) if seeds else []
        mean = {step: float(np.mean([seed[step] for seed in seeds])) for step in shared}
        _line(axes, mean, percent, color=shade, linewidth=2, linestyle=dash, label=label_of(name))
    if metric == "perplexity" and min(heights) > 0 and max(heights) > 3 * min(heights):
        from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = axes.get_ylim()
        axes.set_ylim(0 if percent == 100 or min(heights) < high / 2 else low, high)
    unit = ", %" if percent == 100 else ""
    axes.set_ylabel("training loss" if loss else f"{METRICS[metric]} on the evaluation set{unit}")
    axes.set_xlabel("step")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    add_legend(figure, axes)
    return figure


def thin(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most some hundred points of a curve, each the mean of the points it stands for."""
    size = math.ceil(len(curve) / _POINTS) or 1
    parts = [curve[i : i + size] for i in range(0, len(curve), size)]
    return [(part[-1][0], float(np.mean([y for _, y in part]))) for part in parts]


def splits(records: Sequence[Record], colour: dict[str, tuple[str, str]]) -> "Figure | None":
    """One task beyond its training distribution: means as bars, seeds as dots, per split.

    None where every run has a single split.
    """
    names = list(dict.fromkeys(split for r in records for split in r.splits))
    mechanisms = list(dict.fromkeys(r.mechanism for r in records))
    if len(names) < 2:
        return None
    metric = records[0].metric
    percent = 100 if metric in SHARES else 1
    figure, axes = new_axes(0.9 + 0.2 * len(names) * (len(mechanisms) + 1))
    tall = 0.8 / len(mechanisms)
    longest = max((v for r in records for v in r.splits.values() if math.isfinite(v)), default=1)
    for i, name in enumerate(mechanisms):
        shade, label = colour[name][0], label_of(name)
        for at, split in enumerate(names):
            values = [r.splits[split] for r in records if r.mechanism == name and split in r.splits]
            if not values:
                continue
            y, mean = at - 0.4 + (i + 0.5) * tall, float(np.mean(values))
            edge = 0.0
            if math.isfinite(mean):
                axes.barh(y, percent * mean, tall * 0.85, color=shade, alpha=0.75, label=label)
                label = None
                if len(values) > 1:
                    dots = {"s": 9, "color": "white", "edgecolors": shade, "linewidths": 0.8}
                    axes.scatter([percent * v for v in values], [y] * len(values), **dots, zorder=3)
                edge = percent * max(mean, *values)
            axes.text(
                edge + 0.02 * percent * longest, y, number(metric, mean), va="center", fontsize=7
            )
    axes.set_yticks(range(len(names)), [label_of(split) for split in names])
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(0, 1.2 * percent * (longest or 1))
    if percent == 100:
        axes.set_xticks([x for x in (0, 20, 40, 60, 80, 100) if x <= 1.2 * 100 * longest])
    axes.set_xlabel(f"{METRICS[metric]}{', %' if percent == 100 else ''}")
    add_legend(figure, axes)
    return figure


def kernels(exhibit: KernelExhibit, scale: float) -> "Figure":
    """The kernels of a layer, one panel per head, colours from -`scale` to `scale`."""
    weight = array("kernels", exhibit.kernels, None, None, None)
    heads, rows, columns = weight.shape
    across = min(heads, 4 if columns <= 15 else 2)
    down = math.ceil(heads / across)
    cell = (WIDTH - 0.9) / across
    height = max(0.5, cell * rows / columns)
    figure, grid = new_grid(down * (height + 0.28) + 1.0, down, across)
    middle = (columns - 1) // 2
    for head, axes in enumerate(grid.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        image = axes.imshow(weight[head], cmap="RdBu_r", vmin=-scale, vmax=scale, aspect="auto")
        axes.set_title(f"head {head}", fontsize=8, pad=2)
        axes.tick_params(length=2, pad=1.5, labelsize=7)
        axes.set_yticks(_some(rows), [str(rows - 1 - r) for r in _some(rows)])
        marks = sorted({0, middle, columns - 1})
        texts = [f"{c - middle:+d}".replace("-", "−") if c != middle else "0" for c in marks]
        sides = ["left", "center", "right"] if len(marks) == 3 else ["center"] * len(marks)
        for label, side in zip(axes.set_xticks(marks, texts), sides, strict=False):
            label.label1.set_horizontalalignment(side)
        if head % across:
            axes.set_yticklabels([])
        if head + across < heads:
            axes.set_xticklabels([])
        else:
            axes.set_xlabel("key offset", fontsize=8)
    figure.supylabel("queries back", fontsize=8)
    add_colour_bar(figure, image, grid)
    return figure


def mixing(exhibit: MixExhibit) -> "Figure":
    """A head-mixing matrix, output heads down and input heads across."""
    weight = array("matrix", exhibit.matrix, None, None)
    scale = float(np.abs(weight).max()) or 1.0
    figure, axes = new_axes(4.2)
    image = axes.imshow(weight, cmap="RdBu_r", vmin=-scale, vmax=scale)
    if len(weight) <= 8:
        for (out, into), value in np.ndenumerate(weight):
            shade = "white" if abs(value) > 0.6 * scale else "black"
            axes.text(into, out, f"{value:.2f}", ha="center", va="center", color=shade, fontsize=8)
    axes.set_xticks(_some(weight.shape[1]))
    axes.set_yticks(_some(weight.shape[0]))
    axes.set_xlabel("from head")
    axes.set_ylabel("to head")
    add_colour_bar(figure, image, axes)
    return figure


def attention_map(exhibit: MapExhibit) -> "Figure":
    """An attention map, queries down and keys across, labelled by tokens where they fit.

    Weights below zero, which a convolution after the softmax can give, get a diverging colour map.
    """
    from matplotlib.colors import Normalize, PowerNorm

    count = len(exhibit.tokens)
    weight = array("weights", exhibit.weights, count, count).copy()
    weight[np.triu(weight == 0, k=1)] = np.nan  # the future shows grey, apart from small weights
    rows = list(range(count)) if exhibit.rows is None else list(exhibit.rows)
    if not rows or any(not 0 <= row < count for row in rows):
        raise UserError(f"rows must be positions from 0 to {count - 1}, got {exhibit.rows!r}")
    values = weight[rows]
    top = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    signed = bool((values < 0).any())
    norm = Normalize(-top or -1, top or 1) if signed else PowerNorm(0.5, 0, top or 1)
    height = min(4.4, max(0.5, 4.0 * len(rows) / count)) + 1.3
    figure, axes = new_axes(height)
    image = axes.imshow(values, cmap="RdBu_r" if signed else "Blues", norm=norm, aspect="auto")
    labels = [label_of(visible(token)) for token in exhibit.tokens]
    size = min(8.0, 72 * 3.6 / max(count, 1))
    if count <= _LABELS:
        turn = 90 if max(map(len, labels)) > 1 else 0
        axes.set_xticks(range(count), labels, rotation=turn, fontsize=size)
    if len(rows) <= _LABELS:
        down = min(8.0, 72 * (height - 1.3) / len(rows))
        axes.set_yticks(range(len(rows)), [labels[row] for row in rows], fontsize=max(down, 5))
    elif exhibit.rows is not None:
        axes.set_yticks(_some(len(rows)), [str(rows[i]) for i in _some(len(rows))])
    axes.tick_params(length=0, pad=2)
    axes.set_facecolor("#e9e9e9")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    add_colour_bar(figure, image, axes)
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


def _line(axes, points: dict[int, float], percent: float, **style) -> None:
    marker = "o" if len(points) == 1 else None  # a line of one point would not show
    axes.plot(list(points), [percent * y for y in points.values()], marker=marker, **style)


def add_legend(figure: "Figure", axes) -> None:
    """Name the lines below the panel."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=min(3, len(labels)),
            frameon=False,
            fontsize=8,
            handlelength=2.6,
        )


def add_colour_bar(figure: "Figure", image, axes) -> None:
    """Say below the panels what the colours of an image mean."""
    bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40, pad=0.02)
    bar.ax.tick_params(labelsize=7, length=2)
    bar.ax.locator_params(nbins=5)
    bar.outline.set_visible(False)


def _some(count: int) -> list[int]:
    """Tick positions: all of a few, evenly chosen ones of many, the last always."""
    step = math.ceil(count / 8)
    return sorted(range(count - 1, -1, -step))


def label_of(text: str) -> str:
    """A label no longer than fits, free of characters that the font of the figures lacks."""
    from matplotlib.font_manager import findfont, get_font

    has = get_font(findfont("DejaVu Sans")).get_char_index
    text = "".join(char if has(ord(char)) else "□" for char in text)
    text = text if len(text) <= 18 else text[:17] + "…"
    return text.replace("$", r"\$")  # a dollar sign is no formula
