"""One self-contained HTML page about an evaluation: a table, heat maps, curves and replies."""

import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from heedful.checks import UserError
from heedful.files import write_whole
from heedful_lab.commands.compare import figures
from heedful_lab.commands.evaluate.numbers import (
    RULE,
    evaluated_table,
    harness_table,
    labels,
    summed_up,
    wilson,
)
from heedful_lab.records import Sample
from heedful_lab.records.page import PAGE, picture, side_by_side
from heedful_lab.records.tables import format_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "report.html"
_REPLIES = 3  # right and wrong ones that are shown of each task and model
_LONGEST = 120  # characters of a reply that are shown


def write_evaluation(
    folder: str | Path,
    samples: Sequence[Sample],
    harness: dict[str, dict[str, dict[str, float]]],
    about: Mapping,
) -> Path:
    """Write `report.html` into `folder` and return its path.

    Arguments:
        folder: where to write; made if absent.
        samples: the answers.
        harness: what lm-evaluation-harness found.
        about: configuration and environment.

    Raises:
        ValueError: there is neither a sample nor anything of the harness.
    """
    if not samples and not harness:
        raise UserError("samples must hold at least one answer, got none; evaluate a model first")
    lines = summed_up(samples, about.get("config", {}).get("seed", 0))
    note = f"<p class='note'>{html.escape(RULE)}</p>"
    sections = [
        ("Results", _wide(evaluated_table(lines, "html")) + note if lines else ""),
        ("lm-evaluation-harness", _wide(harness_table(harness, "html"))),
        ("Needles: depth and length", _heat_maps(samples, "needles")),
        ("Stories: kind and length", _heat_maps(samples, "babilong")),
        ("Perplexity by position", _positions(samples)),
        ("Replies", _replies(samples)),
        ("How it was run", _how(about)),
    ]
    body = "\n".join(
        f"<section><h2>{html.escape(title)}</h2>\n{text}</section>"
        for title, text in sections
        if text
    )
    models = list(dict.fromkeys([*(x.model for x in samples), *harness]))
    tasks = list(dict.fromkeys(x.task for x in samples)) + ["lm-evaluation-harness"] * bool(harness)
    title = f"Models evaluated: {', '.join(labels((x, '') for x in models).values())}"
    page = PAGE.substitute(
        title=html.escape(title), lead=html.escape(_lead(samples, tasks, about)), body=body,
        style="", script="",
    )  # fmt: skip
    path = Path(folder) / NAME
    write_whole(path, page)
    return path


def overview(
    samples: Sequence[Sample], harness: dict[str, dict[str, dict[str, float]]], seed: int
) -> str:
    """The tables of an evaluation for a terminal."""
    lines = summed_up(samples, seed)
    tables = [evaluated_table(lines), harness_table(harness)] if lines else [harness_table(harness)]
    return "\n\n".join(filter(None, [*tables, RULE if lines else ""]))


def _wide(table: str) -> str:
    return table and f"<div class='wide'>{table}</div>"


def _lead(samples: Sequence[Sample], tasks: list[str], about: Mapping) -> str:
    caches = [x for x in dict.fromkeys(x.cache for x in samples) if x]
    text = f"{len(samples):,} answers on {', '.join(tasks)}"
    if caches:
        text += f", with full caches and under {', '.join(caches)}"
    where = about.get("environment", {})
    for word in ("machine", "commit", "date"):
        if where.get(word):
            text += f", {'commit ' if word == 'commit' else ''}{where[word]}"
    return text + "."


def _heat_maps(samples: Sequence[Sample], task: str) -> str:
    """One picture per model and cache: shares of right answers, one panel per number of needles."""
    own = [x for x in samples if x.task == task]
    down, panel = ("depth", "needles") if task == "needles" else ("kind", None)
    pictures = []
    for entry, name in labels(x.entry for x in own).items():
        those = [x for x in own if x.entry == entry]
        least = min(Counter(str(x.cell) for x in those).values())
        low, high = wilson(least // 2, least)
        text = (
            f"{name}: right answers in percent by {down} and tokens of the prompt; "
            f"{least} samples in each cell, whose 95 % intervals are up to "
            f"{100 * (high - low) / 2:.0f} points to each side."
        )
        pictures.append(picture(figures.svg(heat_map(those, down, panel)), text))
    return side_by_side(pictures)


def shares(samples: Sequence[Sample], down: str) -> tuple[list, list, np.ndarray]:
    """Shares of right answers by a cell's `down` and by its length.

    Returns:
        the values down, the lengths, and the shares `[down, lengths]`, nan where there are none.
    """
    cells: dict[tuple, list[float]] = {}
    for x in samples:
        cells.setdefault((x.cell[down], x.cell["length"]), []).append(x.values["right"])
    rows, columns = (sorted(set(x)) for x in zip(*cells, strict=True))
    matrix = np.full((len(rows), len(columns)), np.nan)
    for (row, column), right in cells.items():
        matrix[rows.index(row), columns.index(column)] = np.mean(right)
    return rows, columns, matrix


def heat_map(samples: Sequence[Sample], down: str, panel: str | None) -> "Figure":
    """Shares of right answers as colours and numbers, one panel for each value of `panel`."""
    parts = [None] if panel is None else sorted({x.cell[panel] for x in samples})
    across = min(len(parts), 3)
    rows = -(-len(parts) // across)
    height = rows * (0.55 + 0.26 * len({x.cell[down] for x in samples})) + 1.0
    figure, grid = figures.new_grid(height, rows, across)
    for axes in grid.flat[len(parts) :]:
        axes.set_visible(False)
    for axes, part in zip(grid.flat, parts, strict=False):
        own = samples if panel is None else [x for x in samples if x.cell[panel] == part]
        names, lengths, matrix = shares(own, down)
        image = axes.imshow(100 * matrix, cmap="viridis", vmin=0, vmax=100, aspect="auto")
        for (i, j), value in np.ndenumerate(matrix):
            if np.isfinite(value) and matrix.shape[1] <= 8:
                text = {"ha": "center", "va": "center", "fontsize": 7}
                axes.text(j, i, f"{100 * value:.0f}", color="k" if value > 0.6 else "w", **text)
        in_thousands = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
        axes.set_xticks(range(len(lengths)), in_thousands)
        axes.set_yticks(range(len(names)), [f"{x:.0%}" if down == "depth" else x for x in names])
        axes.tick_params(labelsize=7, length=0)
        axes.set_xlabel("tokens", fontsize=8)
        axes.label_outer()
        if part is not None:
            axes.set_title(f"{part} {panel if part != 1 else panel.rstrip('s')}", fontsize=8)
    figure.supylabel(down, fontsize=8)
    figures.add_colour_bar(figure, image, list(grid.flat))
    return figure


def _positions(samples: Sequence[Sample]) -> str:
    own = [x for x in samples if x.task == "perplexity"]
    pictures = []
    for domain in dict.fromkeys(x.cell["domain"] for x in own):
        those = [x for x in own if x.cell["domain"] == domain]
        text = (
            f"{domain}: perplexity of tokens with so many tokens before them in the window, all "
            "windows together. A line that goes on falling uses long-range context."
        )
        pictures.append(picture(figures.svg(position_curves(those)), text))
    return side_by_side(pictures)


def by_position(samples: Sequence[Sample]) -> dict[int, float]:
    """Perplexity by tokens of context, each point that of so many tokens up to twice as many."""
    longest = max(len(x.curve["nats"]) for x in samples)
    nats, tokens = np.zeros(longest), np.zeros(longest)
    for x in samples:
        nats[: len(x.curve["nats"])] += x.curve["nats"]
        tokens[: len(x.curve["tokens"])] += x.curve["tokens"]
    with np.errstate(over="ignore"):
        return {2**i: float(np.exp(nats[i] / tokens[i])) for i in range(longest)}


def position_curves(samples: Sequence[Sample]) -> "Figure":
    """Perplexity by tokens of context, a line per model and cache."""
    figure, axes = figures.new_axes(3.4)
    entries = labels(x.entry for x in samples)
    styles = figures.colours([str(number) for number in range(1, len(entries))])
    for name, (shade, dash) in zip(entries.values(), styles.values(), strict=True):
        points = by_position([x for x in samples if entries[x.entry] == name])
        axes.plot(
            list(points), list(points.values()), marker="o", ms=3, lw=1.6, color=shade, ls=dash,
            label=figures.label_of(name),
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("tokens before, at least")
    axes.set_ylabel("perplexity")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    figures.add_legend(figure, axes)
    return figure


def _replies(samples: Sequence[Sample]) -> str:
    """The first right and wrong replies of each task and model."""
    names, parts = labels(x.entry for x in samples), []
    for task in dict.fromkeys(x.task for x in samples if x.reply is not None):
        rows, shown = [], Counter()
        for x in samples:
            right = x.values.get("right")
            shown[x.entry, right] += x.task == task
            if x.task == task and shown[x.entry, right] <= _REPLIES:
                written = (_visible_text(text or "") for text in (x.expected, x.reply))
                rows.append((names[x.entry], x.key, "✓" if right else "✗", *written))
        head = ("model", "sample", "", "expected", "written")
        table = format_table(head, rows, "html", words=5)
        parts.append(f"<h3>{html.escape(task)}</h3><div class='wide written'>{table}</div>")
    note = "The first few that are right and that are wrong; all stand in samples.jsonl."
    inner = "".join(parts)
    return inner and (
        f"<details><summary>What was written</summary><p class='note'>{note}</p>{inner}</details>"
    )


def _visible_text(text: str) -> str:
    text = "".join(
        c if c.isprintable() else figures.visible(c) if c.isascii() else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def _how(about: Mapping) -> str:
    settings = {key: value for key, value in about.items() if key != "lm_eval"}
    text = html.escape(json.dumps(settings, indent=2, default=str, ensure_ascii=False))
    return f"<details><summary>Configuration and environment</summary><pre>{text}</pre></details>"
