"""A picture of benchmark records: how many times SDPA's time each case takes, over the tokens."""

import io
from collections.abc import Sequence
from pathlib import Path

from heedful.files import write_whole
from heedful_lab.commands.bench.options import sizes

_LOOKS = {  # line and marker by implementation; the colour is the mechanism's
    "reference": (":", ""),
    "tiled": ("-", "o"),
    "composed": ("-", "D"),
    "fused": ("-", "s"),
    "x-transformers": ("-.", "x"),
    "flex": ("-.", "^"),
    "liger": ("-.", "v"),
}


def plot(records: Sequence[dict], path: Path) -> None:
    """Write one panel per pass to `path` (the format of its suffix); both axes are logarithmic.

    The title gives batch, heads, precision and layout.
    """
    from matplotlib.figure import Figure

    passes = list(dict.fromkeys(r["pass"] for r in records))
    mechanisms = list(dict.fromkeys(r["mechanism"] for r in records if r["mechanism"] != "sdpa"))
    figure = Figure(figsize=(1 + 4.2 * len(passes), 4.6), layout="constrained")
    panels = figure.subplots(1, len(passes), sharey=True, squeeze=False)[0]
    for panel, passed in zip(panels, passes, strict=True):
        panel.axhline(1, color="black", linewidth=1, label="SDPA")
        for number, mechanism in enumerate(mechanisms):
            these = [r for r in records if r["pass"] == passed and r["mechanism"] == mechanism]
            for impl in dict.fromkeys(r["impl"] for r in these):
                points = sorted((r["tokens"], r["sdpa_ratio"]) for r in these if r["impl"] == impl)
                line, marker = _LOOKS[impl]
                panel.plot(
                    *zip(*points, strict=True),
                    color=f"C{number}",
                    linestyle=line,
                    marker=marker,
                    label=f"{mechanism}, {impl}",
                )
        panel.set(xscale="log", yscale="log", title=passed, xlabel="tokens")
        lengths = sorted({r["tokens"] for r in records})
        panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    figure.suptitle(sizes(records[0]["config"]), fontsize="small")
    panels[0].set_ylabel("time / SDPA's time")
    ticks = [1, 2, 5, 10, 20, 50, 100]
    low, high = panels[0].get_ylim()
    panels[0].set_yticks([t for t in ticks if low <= t <= high])
    panels[0].set_yticklabels([f"{t} ×" for t in ticks if low <= t <= high])
    handles: dict[str, object] = {}
    for panel in panels:
        lines, labels = panel.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip("."))
    write_whole(path, buffer.getvalue())
