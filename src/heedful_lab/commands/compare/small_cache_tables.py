"""Small KV caches on a page: quality against compression, and what is cached when."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from heedful_lab.commands.compare import figures
from heedful_lab.commands.compare.findings import BASELINE, number
from heedful_lab.records import METRICS, SHARES
from heedful_lab.records.budgeted import WHOLE, UnderBudget

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POLICY_COLOURS = {
    "MostHidden": "#D55E00",
    "StreamingLLM": "#0072B2",
    "TOVA": "#009E73",
    "H2O": "#CC79A7",
    "SnapKV": "#E69F00",
    "Random": "#777777",
}


class CacheExhibit(NamedTuple):
    """Cached tokens of one sequence after each of them.

    Arguments:
        policy, budget: the eviction policy, and how many tokens a layer could hold.
        layers: by layer index `[T, T]`, true at `[t, j]` where token j was cached after token t.
    """

    task: str
    mechanism: str
    policy: str
    budget: int
    layers: Mapping[int, ArrayLike]


def pictures(scored: Sequence[UnderBudget]) -> list[tuple["Figure", str]]:
    """Quality against compression: one picture per task, split and mechanism, with its caption."""
    drawings = []
    for task in dict.fromkeys(x.task for x in scored):
        those = [x for x in scored if x.task == task]
        for split in those[0].final:
            values = [x.final[split] for x in those if np.isfinite(x.final[split])]
            reach = (min(values), max(values))
            for mechanism in dict.fromkeys(x.mechanism for x in those):
                own = [x for x in those if x.mechanism == mechanism]
                if len({x.policy for x in own}) > 1:
                    text = (
                        f"{task}, {split}: {METRICS[own[0].metric]} of {mechanism} against the "
                        "compression of its KV cache: bytes of a full cache of the same tokens in "
                        "bf16, divided by the peak of this one. Lines: eviction policies "
                        "under the same protection; square: the full cache; dashed: standard "
                        "attention with its full cache; star: the hybrid of local and "
                        "global layers."
                    )
                    drawings.append((_bytes_curves(those, own, split, reach), text))
    return drawings


def _bytes_curves(
    everything: list[UnderBudget], own: list[UnderBudget], split: str, reach: tuple[float, float]
) -> "Figure":
    figure, axes = figures.new_axes(3.4)
    percent = 100 if own[0].metric in SHARES else 1
    whole = _mean(own, WHOLE, split)
    for policy in dict.fromkeys(x.policy for x in own if x.policy != WHOLE):
        points = _mean(own, policy, split) | whole
        xs = sorted(points)
        axes.plot(
            xs, [percent * points[x] for x in xs], marker="o", ms=3.5, lw=1.3,
            color=POLICY_COLOURS.get(policy, "black"), label=policy,
        )  # fmt: skip
    for x, y in whole.items():
        axes.plot(x, percent * y, "s", ms=6, color="black", mfc="white", zorder=4)
    for y in _mean([x for x in everything if x.mechanism == BASELINE], WHOLE, split).values():
        axes.axhline(percent * y, ls="--", lw=0.9, color="#333333")
    hybrid = [x for x in everything if x.mechanism.startswith("local-global")]
    for x, y in _mean(hybrid, WHOLE, split).items():
        axes.plot(x, percent * y, "*", ms=10, color="black", mfc="#56B4E9", zorder=5)
    low, high = (percent * y for y in reach)
    room = 0.05 * ((high - low) or 1.0)  # all may be the same
    axes.set_ylim(low - room, high + room)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("× smaller than bf16 (peak of one sequence)")
    axes.set_ylabel(f"{METRICS[own[0].metric]}{', %' if percent == 100 else ''}")
    axes.set_title(own[0].mechanism, fontsize=9)
    figures.add_legend(figure, axes)
    return figure


def _mean(scored: Iterable[UnderBudget], policy: str, split: str) -> dict[float, float]:
    """By compression, the mean over seeds."""
    scores: dict[float, list[float]] = {}
    for x in scored:
        if x.policy == policy:
            scores.setdefault(x.compression, []).append(x.final[split])
    return {ratio: float(np.mean(values)) for ratio, values in scores.items()}


def tables(scored: Sequence[UnderBudget], markdown: bool = False) -> str:
    """One table per task and split: rows are models with a policy, columns are budgets."""
    parts = []
    for task in dict.fromkeys(x.task for x in scored):
        those = [x for x in scored if x.task == task]
        columns = sorted({x.tokens for x in those if x.policy != WHOLE}, reverse=True)
        for split in those[0].final:
            head = ["model", "eviction", "full cache", *(f"{n} tokens" for n in columns)]
            body = [
                row
                for mechanism in dict.fromkeys(x.mechanism for x in those)
                for row in _table_rows(
                    [x for x in those if x.mechanism == mechanism], split, columns
                )
            ]
            title = f"{task}, {split}: {METRICS[those[0].metric]}, and × smaller than bf16"
            parts.append(_markdown(title, head, body) if markdown else _html(title, head, body))
    return "\n\n".join(parts) if markdown else "".join(parts)


def _table_rows(own: list[UnderBudget], split: str, columns: list[int]) -> list[list[str]]:
    def cell(policy: str, tokens: int | None = None) -> str:
        matches = [x for x in own if x.policy == policy and tokens in (None, x.tokens)]
        if not matches:
            return "–"
        text = number(matches[0].metric, float(np.mean([x.final[split] for x in matches])))
        return f"{text} ({matches[0].compression:.1f} ×)"

    policies = [x for x in dict.fromkeys(x.policy for x in own) if x != WHOLE] or ["–"]
    return [
        [own[0].mechanism, policy, cell(WHOLE), *(cell(policy, n) for n in columns)]
        for policy in policies
    ]


def _markdown(title: str, head: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]
    return f"{title}:\n\n" + "\n".join(lines)


def _html(title: str, head: list[str], body: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in cells) + "</tr>"

    return (
        f"<h3>{html.escape(title)}</h3><div class='wide'><table>{row(head, 'th')}"
        f"{''.join(row(cells, 'td') for cells in body)}</table></div>"
    )


def cache_picture(exhibit: CacheExhibit) -> tuple["Figure", str]:
    """Time downwards, the sequence's tokens across: dark where a token is still cached."""
    layers = list(exhibit.layers.items())
    across = min(len(layers), 2)
    down = -(-len(layers) // across)
    side = figures.WIDTH / across
    figure, grid = figures.new_grid(down * side + 0.4, down, across)
    for axes, (index, map_) in zip(grid.flat, layers, strict=False):
        weights = figures.array("layers", map_, None, None)
        later = np.triu(np.ones_like(weights), 1)
        axes.imshow(
            1 - 0.85 * weights - 0.06 * (1 - weights) * (1 - later), cmap="gray", vmin=0, vmax=1
        )
        count = int(weights[-1].sum())
        axes.set_title(f"layer {index}: {count} of {len(weights)} at the end", fontsize=8, pad=3)
        axes.tick_params(labelsize=7, length=2)
        axes.set_xlabel("token", fontsize=8)
    for axes in grid.flat[len(layers) :]:
        axes.set_visible(False)
    grid.flat[0].set_ylabel("after token", fontsize=8)
    text = (
        f"{exhibit.task}, {exhibit.mechanism}: what each layer's cache holds in the course of a "
        f"sequence under {exhibit.policy} with {exhibit.budget} tokens. Dark: cached; light: "
        "evicted."
    )
    return figure, text
