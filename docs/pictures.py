"""Draw the pictures of the documentation: `python -m docs.pictures [FOLDER]`.

The inputs of the maps are small and made by hand so that the effect can be read; every map comes
from the operators themselves. What is gained comes from the committed results, in
`result_pictures.py`.
"""

import sys
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from docs import result_pictures
from heedful import Summaries, differential_attention, grouped_attention, selective_attention
from heedful.ops.common.terms import Terms
from heedful.ops.grouped import (
    cif_groups,
    fixed_groups,
    sentence_groups,
    sliding_groups,
)
from heedful.ops.grouped.reference import memberships
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.reference import correlate, multi_token_attention_map
from heedful.ops.selective.reference import selection
from heedful.ops.visibility import Visibility
from heedful_lab.commands.compare.figures import svg

GREY = "#e9e9e9"


def main(folder: Path) -> None:
    """Write every picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in (
        ("multi-token", multi_token),
        ("selective", selective),
        ("differential", differential),
        ("groups", groups),
        ("grouped", grouped),
        ("gains", result_pictures.gains),
        ("courses", result_pictures.courses),
        ("learned", result_pictures.learned),
        ("pretrained", result_pictures.pretrained),
        ("equal-bytes", result_pictures.equal_bytes),
        ("averaged-maps", result_pictures.averaged_maps),
    ):
        (folder / f"{name}.svg").write_bytes(svg(draw()))


def multi_token() -> Figure:
    """Two query tokens that must match two neighbouring keys."""
    text = "red car . blue bus . red bus . blue car . red bus"
    words = text.split()
    kinds = sorted(set(words))
    x = torch.stack([torch.eye(len(kinds))[kinds.index(word)] for word in words])
    q, k = 4 * x[None, None], x[None, None].clone()
    k[..., -2:, :] = 0  # the question's own two tokens are no answer
    k[..., [i for i, word in enumerate(words) if word == "."], :] = 0
    conv = torch.zeros(1, 2, 3)
    conv[0, 1, 1] = conv[0, 0, 0] = 1
    terms = Terms(Visibility(), 1.0)
    visible_mask = terms.visibility.dense(len(words), len(words), q.device)[:, None]
    logits = (q @ k.mT).masked_fill(~visible_mask, 0)
    steps = {
        "logits": logits,
        "after the convolution": correlate(logits, conv),
        "weights without it": multi_token_attention_map(q, k, Parameters(), terms),
        "weights with it": multi_token_attention_map(q, k, Parameters(conv), terms),
    }
    figure = Figure(figsize=(7.6, 4.0), layout="constrained", facecolor="white")
    grid = figure.subplot_mosaic(
        [["kernel", name] for name in steps], width_ratios=[1, 5], empty_sentinel=None
    )
    axes = grid.pop("kernel")
    _cells(axes, conv[0], 2.2, ["previous\nquery", "this\nquery"], ["−1", "0", "+1"])
    axes.set_title("kernel", fontsize=10)
    axes.set_xlabel("key offset", fontsize=9)
    axes.set_aspect("equal")
    for number, (name, axes) in enumerate(grid.items()):
        newest = steps[name][0, 0, -2:]
        visible = visible_mask[0, 0, -2:]
        _cells(axes, newest, 10 if number < 2 else 1.2, words[-2:], words, visible)
        axes.set_title(name, fontsize=10, loc="left", pad=3)
        if number < 3:
            axes.set_xticklabels([])
    return figure


def selective() -> Figure:
    """A later assignment hides the value that it overwrites."""
    tokens = ["BOS", "y=", "7;", "x=", "1;", "x=", "3;", "z=", "5;", "x="]
    count = len(tokens)
    of = dict(zip(range(1, count), "yyxxxxzzx", strict=True))  # the name each token belongs to
    # Two directions per name, one for the name itself and one for its values.
    selector_q, selector_k = torch.zeros(1, 1, count, 6), torch.zeros(1, 1, count, 6)
    q, k = torch.zeros(1, 1, count, 6), torch.zeros(1, 1, count, 6)
    for token, name in of.items():
        value = tokens[token].endswith(";")
        place = 2 * "xyz".index(name) + value
        selector_q[..., token, place] = 6 if value else 2
        selector_k[..., token, place] = 1
        k[..., token, place] = float(value)
    q[..., -1, 1] = 6  # the last token asks for values of x

    def weights(*selector: torch.Tensor) -> torch.Tensor:
        every = torch.eye(count)[None, None]  # values that show the map itself
        options = {"selector_q": selector[0], "selector_k": selector[1], "scale": 1.0}
        return selective_attention(q, k, every, impl="reference", **options).output[0, 0]

    s = selection(selector_q, selector_k, True, Visibility(), 1.0)[0, 0]
    f = s.cumsum(0) - s
    figure = Figure(figsize=(7.6, 5.4), layout="constrained", facecolor="white")
    grid = figure.subplot_mosaic([["s", "f"], ["w", "w"]], height_ratios=[7, 1.6])
    visible = torch.ones(count, count).tril().bool()
    for name, title, values_shown in (
        ("s", "S: what each token hides", s),
        ("f", "F: what is hidden from each token", f),
    ):
        axes = grid[name]
        _cells(axes, values_shown, 6, tokens if name == "s" else None, tokens, visible, text=False)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("key", fontsize=9)
        axes.set_ylabel("token" if name == "s" else "query", fontsize=9)
    bar = figure.colorbar(axes.images[0], ax=[grid["s"], grid["f"]], aspect=30, pad=0.01)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)
    plain = weights(torch.zeros_like(selector_q), selector_k)[-1]
    hidden = weights(selector_q, selector_k)[-1]
    rows = torch.stack([plain, hidden])
    _cells(grid["w"], rows, 1.2, ["without F", "with F"], tokens)
    grid["w"].set_title("weights of the last “x=”", fontsize=10, loc="left", pad=3)
    return figure


def differential() -> Figure:
    """Two maps with the same noise; their difference."""
    torch.manual_seed(3)
    count = 12
    noise = 1.2 * torch.randn(count, count)
    signal = torch.zeros(count, count)
    for query in range(3, count):
        signal[query, max(0, query - 3 - query % 3)] = 3.5
    # Queries that are unit vectors read the logits off the keys' columns.
    q = torch.eye(count)[None, None].repeat(1, 2, 1, 1)
    k = torch.stack([(noise + signal).T, noise.T])[None]
    every = torch.eye(count)[None, None]

    def weights(lam: float) -> torch.Tensor:
        return differential_attention(q, k, every, lam=torch.tensor(lam), scale=1.0)[0, 0]

    first = weights(0.0)
    second = first - weights(1.0)
    figure = Figure(figsize=(7.6, 2.9), layout="constrained", facecolor="white")
    visible = torch.ones(count, count).tril().bool()
    for axes, (title, values) in zip(
        figure.subplots(1, 3),
        {
            "first map": first,
            "second map": second,
            "first − 0.8 × second": weights(0.8),
        }.items(),
        strict=True,
    ):
        _cells(axes, values, 1, None, None, visible, text=False, signed=True)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("key", fontsize=9)
        axes.set_ylabel("query" if title == "first map" else "", fontsize=9)
    bar = figure.colorbar(axes.images[0], ax=figure.axes, aspect=25, pad=0.01)
    bar.ax.tick_params(labelsize=8, length=2)
    bar.outline.set_visible(False)
    return figure


def groups() -> Figure:
    """The shares of one sequence of tokens under the four groupings."""
    text = "the dog ran . it saw a cat on a wall . the cat hid ."
    words = text.split()
    count = len(words)
    ids = torch.tensor([[word == "." for word in words]]).long()
    alpha = {"the": 0.1, "a": 0.1, "on": 0.15, "it": 0.3, ".": 0.3, "dog": 0.45, "cat": 0.5}
    weights = torch.tensor([[alpha.get(word, 0.4) for word in words]])
    maps = {
        "fixed\nsize 4": fixed_groups(4, count),
        "sliding\nsize 4, stride 2": sliding_groups(4, 2, count),
        "sentence\ncloses at “.”": sentence_groups(ids, (1,)),
        "cif\nweights fill a group": cif_groups(weights),
    }
    lanes = [2 if "sliding" in x or "cif" in x else 1 for x in maps]
    figure = Figure(figsize=(7.6, 3.3), layout="constrained", facecolor="white")
    figure.get_layout_engine().set(hspace=0.06)
    all_axes = figure.subplots(len(maps), 1, sharex=True, height_ratios=lanes)
    for axes, (name, grouping), height in zip(all_axes, maps.items(), lanes, strict=True):
        for number, shares in enumerate(memberships(grouping)[0].T):
            odd = number // height % 2
            colours, deepest = colormaps["Oranges" if odd else "Purples"], 0.4 if odd else 0.5
            lane = number % height
            members = shares.nonzero()[:, 0].tolist()
            for token in members:
                share = shares[token].item()
                face = colours(deepest * share)
                axes.add_patch(Rectangle((token - 0.5, lane), 1, 0.84, facecolor=face))
                label = "1" if share > 0.995 else f"{share:.2f}"
                axes.text(token, lane + 0.44, label, fontsize=8, ha="center", va="center")
            line = "-" if grouping.complete[0, number] else (0, (2, 2))
            box = {"fill": False, "edgecolor": "#444444", "linewidth": 1, "linestyle": line}
            start, end = members[0] - 0.47, members[-1] + 0.47
            axes.add_patch(Rectangle((start, lane), end - start, 0.84, **box))
        axes.set_ylim(height - 0.06, -0.1)
        axes.set_xlim(-0.6, count - 0.4)
        axes.set_yticks([height / 2 - 0.08], [name], fontsize=9)
        axes.tick_params(length=0, labeltop=axes is all_axes[0], labelbottom=False)
        axes.set_xticks(range(count), words, fontsize=10)
        for side in axes.spines.values():
            side.set_visible(False)
    return figure


def grouped() -> Figure:
    """Which keys each query sees one by one, which in summaries, and which not at all."""
    count, size, window = 18, 4, 3
    grouping = fixed_groups(size, count)
    # Values that tell which token or summary they are of.
    every = torch.eye(count + grouping.count)[None, None]
    alike = torch.zeros(1, 1, count, 1), torch.zeros(1, 1, grouping.count, 1)
    summaries = Summaries(alike[1], every[:, :, count:])
    figure = Figure(figsize=(7.6, 4.3), layout="constrained", facecolor="white")
    near, far = colormaps["Purples"](0.72), colormaps["Oranges"](0.42)
    for axes, causal in zip(figure.subplots(1, 2), (True, False), strict=True):
        weights = grouped_attention(
            alike[0], alike[0], every[:, :, :count], groups=grouping, summaries=summaries,
            window=window, visibility=Visibility(causal=causal),
        )[0, 0]  # fmt: skip
        for query, row in enumerate(weights > 0):
            for thing in row.nonzero()[:, 0].tolist():
                if thing < count:
                    start, tokens, face = thing, 1, near
                else:
                    start = grouping.start[0, thing - count].item()
                    tokens, face = grouping.end[0, thing - count].item() - start + 1, far
                place = (start - 0.44, query - 0.4)
                axes.add_patch(Rectangle(place, tokens - 0.12, 0.8, facecolor=face))
        axes.set_facecolor("#f2f2f2")
        for border in range(size, count, size):
            axes.axvline(border - 0.5, color="white", linewidth=1.5, zorder=0)
        axes.set_xlim(-0.6, count - 0.4)
        axes.set_ylim(count - 0.4, -0.6)
        axes.set_aspect("equal")
        axes.set_xticks(range(0, count, size))
        axes.set_yticks(range(0, count, size))
        axes.tick_params(length=0, labelsize=9)
        axes.set_title("decoder" if causal else "encoder", fontsize=10)
        axes.set_xlabel("key", fontsize=9)
        axes.set_ylabel("query" if causal else "", fontsize=9)
        for side in axes.spines.values():
            side.set_color("#bbbbbb")
    handles = [
        Patch(facecolor=near, label="one by one"),
        Patch(facecolor=far, label="by its group's summary"),
        Patch(facecolor="#f2f2f2", edgecolor="#bbbbbb", label="not at all"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    return figure


def _cells(axes, matrix, top, rows, columns, visible=None, text=True, signed=False) -> None:
    """A map as cells, orange below zero and purple above; unseen cells are grey."""
    matrix = matrix.detach().clone()
    if visible is not None:
        matrix[~visible] = float("nan")
    colours, low = ("PuOr", -top) if signed else ("Purples", 0)
    norm = Normalize(low, top)
    axes.imshow(matrix, cmap=colours, norm=norm, aspect="auto", interpolation="none")
    axes.set_facecolor(GREY)
    axes.tick_params(length=0, pad=3, labelsize=9)
    size = 9 if max(matrix.shape) < 16 else 8
    axes.set_xticks(range(matrix.shape[1]), columns or [""] * matrix.shape[1], fontsize=size)
    axes.set_yticks(range(matrix.shape[0]), rows or [""] * matrix.shape[0], fontsize=size)
    for side in axes.spines.values():
        side.set_color("#bbbbbb")
    if text:
        for row, values in enumerate(matrix.tolist()):
            for column, value in enumerate(values):
                if abs(value) >= 0.015:
                    label = f"{value:.2f}".rstrip("0").rstrip(".")
                    style = {"ha": "center", "va": "center", "fontsize": 8.5}
                    shade = "white" if value > 0.6 * top else "#222222"
                    axes.text(column, row, label, color=shade, **style)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures")
