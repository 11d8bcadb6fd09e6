"""One self-contained HTML page about a comparison: what was found, at what cost, in pictures."""

import html
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from heedful.checks import UserError
from heedful.files import write_whole
from heedful_lab.commands.compare import figures
from heedful_lab.commands.compare import small_cache_tables as budgets
from heedful_lab.commands.compare.figures import (
    Exhibit,
    HidingExhibit,
    KernelExhibit,
    MapExhibit,
    MixExhibit,
    array,
    visible,
)
from heedful_lab.commands.compare.findings import (
    BASELINE,
    RULE,
    Row,
    TextExhibit,
    better,
    configurations,
    findings,
    further,
    memory_label,
    number,
    plain,
    summarise,
    table,
    text_tables,
)
from heedful_lab.commands.compare.small_cache_tables import CacheExhibit
from heedful_lab.commands.inspect.patterns import kernel_pattern
from heedful_lab.records import METRICS, Record
from heedful_lab.records.budgeted import UnderBudget
from heedful_lab.records.page import PAGE, picture, side_by_side

_ORDER = (HidingExhibit, MapExhibit, KernelExhibit, MixExhibit)
_STRONGEST = 12  # hidings listed below a sample
_GONE = 0.01  # a hidden token is struck through where less than this of its weight is left


def write_report(
    folder: str | Path,
    records: Sequence[Record],
    exhibits: Sequence[Exhibit] = (),
    config: Mapping | None = None,
    budgeted: Sequence[UnderBudget] = (),
    caches: Sequence[CacheExhibit] = (),
    texts: Sequence[TextExhibit] = (),
) -> Path:
    """Write `report.html` into `folder` and return its path.

    The page is one file that loads nothing from anywhere. It replaces an earlier one only when it
    is whole.

    Arguments:
        folder: where to write; made if absent.
        records: the finished runs.
        exhibits: kernels, head mixing, attention maps and hidden tokens to show per task.
        config: the configuration of the comparison, shown as it is.
        budgeted: scores under small KV caches.
        caches: what small caches held in the course of a sequence.
        texts: what encoder-decoders make of evaluation sources.

    Raises:
        ValueError: without records, or if an exhibit's arrays do not fit each other.
    """
    records = list(records)
    if not records:
        raise UserError("records must hold at least one finished run, got none; train first")
    exhibits = list(exhibits)
    for exhibit in exhibits:
        if not isinstance(exhibit, _ORDER):
            raise UserError(
                f"exhibits must hold {', '.join(kind.__name__ for kind in _ORDER)}, got "
                f"{type(exhibit).__name__}"
            )
    small = _small_caches(budgeted, caches)
    page = _page(records, exhibits, config or {}, small, list(texts))
    path = Path(folder) / "report.html"
    write_whole(path, page)
    return path


def _page(
    records: list[Record],
    exhibits: list[Exhibit],
    config: Mapping,
    small_caches: str,
    texts: list[TextExhibit],
) -> str:
    rows = summarise(records)
    tasks = list(dict.fromkeys(r.task for r in records))
    map_tasks = list(dict.fromkeys(e.task for e in exhibits))
    colour = figures.colours([item.mechanism for item in (*records, *exhibits)])
    sentences = "".join(
        f"<li><b>{html.escape(task)}</b>{html.escape(text.removeprefix(task))}</li>"
        for task, text in zip(tasks, findings(rows), strict=True)
    )
    sections = [
        ("What it shows", f"<ul>{sentences}</ul><p class='note'>{html.escape(RULE)}</p>"),
        ("Results", _results(rows, configurations(records)) + _further(records)),
        ("Learning curves", _learning_curves(records, tasks, colour)),
        ("Beyond the training distribution", _splits(records, tasks, colour)),
        ("Cost", _cost(rows, colour)),
        ("Under small KV caches", small_caches),
        *(
            (f"Inside: {task}", _gallery([e for e in exhibits if e.task == task], exhibits))
            for task in map_tasks
        ),
        *(
            (f"Written: {task}", text_tables([e for e in texts if e.task == task]))
            for task in dict.fromkeys(e.task for e in texts)
        ),
        ("How it was run", _how(records, config)),
    ]
    body = "\n".join(
        f"<section><h2>{html.escape(title)}</h2>\n{text}</section>"
        for title, text in sections
        if text
    )
    title = html.escape(f"Attention compared: {', '.join(tasks)}")
    lead = _lead(records, rows)
    return PAGE.substitute(title=title, lead=lead, body=body, style="", script="")


def _lead(records: list[Record], rows: list[Row]) -> str:
    def several(values) -> str:
        values = sorted(set(values))
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

    def values_of(key: str) -> list[str]:
        return sorted({str(r.environment[key]) for r in records if r.environment.get(key)})

    mechanisms = list(dict.fromkeys(r.mechanism for r in records))
    tasks = list(dict.fromkeys(r.task for r in records))
    text = (
        f"{len(records)} training run{'s' * (len(records) > 1)}: {', '.join(mechanisms)} on "
        f"{', '.join(tasks)}, {several(len(row.seeds) for row in rows)} "
        f"seed{'s' * any(len(row.seeds) > 1 for row in rows)} each, "
        f"{several(r.steps for r in records)} steps of {several(r.batch for r in records)} rows, "
        f"models of {several(r.parameters for r in records)} parameters"
    )
    if machines := values_of("machine"):
        text += f", on {', '.join(machines)}"
    if commits := values_of("commit"):
        text += f", commit {', '.join(commit[:12] for commit in commits)}"
    if dates := values_of("date"):
        text += f", {dates[0]}" if len(dates) == 1 else f", {dates[0]} to {dates[-1]}"
    return html.escape(text) + "."


def _results(rows: list[Row], more: list[str]) -> str:
    process = "that of the whole process, with interpreter and libraries"
    kind = {"process peak MiB": process, "GPU peak MiB": "what torch had allocated on the GPU"}
    note = (
        "Mean ± sample standard deviation over seeds at the end of training, on the evaluation "
        f"set; {better(rows)}. “× standard” is the ratio of the means. Tokens per second: median "
        f"of the seeds; memory: the highest, {kind.get(memory_label(rows), 'by device')}."
    )
    note = " ".join([note, *more])
    # Cost stands once more below, so a narrow screen leaves it out here.
    note = f"<p class='note'>{html.escape(note)}</p>"
    return f"<div class='wide results'>{table(rows, 'html')}</div>{note}"


def _further(records: list[Record]) -> str:
    tables = "".join(f"<div class='wide'>{table}</div>" for table in further(records, "html"))
    note = "What was recorded beside it, of the same models on the same evaluation set."
    return f"<p class='note'>{note}</p>{tables}" if tables else ""


def _learning_curves(records: list[Record], tasks: list[str], colour: dict) -> str:
    pictures = []
    for task in tasks:
        runs = [r for r in records if r.task == task]
        what = f"{METRICS[runs[0].metric]} on the evaluation set"
        half = max(r.steps for r in runs) // 2
        curves = [
            (what, figures.curves(runs, colour)),
            ("training loss", figures.curves(runs, colour, loss=True)),
        ]
        if runs[0].metric == "perplexity":
            # The fall at the beginning is so deep that the end looks like one line.
            curves.insert(1, (f"{what}, second half", figures.curves(runs, colour, since=half)))
        lines = "" if len({r.seed for r in runs}) == 1 else " Thin: seeds; thick: mean."
        for title, figure in curves:
            if figure is not None:
                pictures.append(picture(figures.svg(figure), f"{task}: {title}.{lines}"))
    return side_by_side(pictures)


def _splits(records: list[Record], tasks: list[str], colour: dict) -> str:
    pictures = []
    for task in tasks:
        figure = figures.splits([r for r in records if r.task == task], colour)
        if figure is not None:
            text = f"{task}: evaluation splits at the end of training. Bars: means; dots: seeds."
            pictures.append(picture(figures.svg(figure), text))
    return side_by_side(pictures)


def _small_caches(scored: Sequence[UnderBudget], caches: Sequence[CacheExhibit]) -> str:
    scores = [picture(figures.svg(figure), text) for figure, text in budgets.pictures(scored)]
    cached = [
        picture(figures.svg(figure), text, "as-it-is")
        for figure, text in map(budgets.cache_picture, caches)
    ]
    return side_by_side(scores) + budgets.tables(scored) + side_by_side(cached)


def _cost(rows: list[Row], colour: dict) -> str:
    def bar(row: Row, value: float, most: float, ratio: float = math.nan) -> str:
        if not math.isfinite(value):
            return "<td>–</td>"
        share = 100 * value / most if most else 0
        beside = (
            f" ({ratio:.2f}\u00a0×)" if math.isfinite(ratio) and row.mechanism != BASELINE else ""
        )
        return (
            f"<td>{value:,.0f}{beside}<div class='bar' style='width:{share:.1f}%;"
            f"background:{colour[row.mechanism][0]}'></div></td>"
        )

    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        group = [row for row in rows if row.task == task]
        base = next((row for row in group if row.mechanism == BASELINE), None)
        speed = max((v for r in group if math.isfinite(v := r.tokens_per_second)), default=0)
        memory = max((v for r in group if math.isfinite(v := r.peak_memory_mib)), default=0)
        for row in group:
            more = "" if base in (None, row) else f" ({row.parameters - base.parameters:+,})"
            lines.append(
                f"<tr><td>{html.escape(task)}</td><td>{html.escape(row.mechanism)}</td>"
                f"<td class='n'>{row.parameters:,}{more}</td>"
                f"{bar(row, row.tokens_per_second, speed, row.speed_ratio)}"
                f"{bar(row, row.peak_memory_mib, memory)}</tr>"
            )
    return (
        "<div class='wide'><table class='cost'><thead><tr><th>task</th><th>mechanism</th>"
        f"<th class='n'>parameters</th><th>tokens/s</th><th>{memory_label(rows)}</th></tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table></div><p class='note'>In parentheses: "
        "against standard on the same task. Bars are relative to the longest of the task.</p>"
    )


def _gallery(exhibits: list[Exhibit], everything: list[Exhibit]) -> str:
    exhibits = sorted(exhibits, key=lambda exhibit: _ORDER.index(type(exhibit)))
    hidden = "".join(_hiding(e) for e in exhibits if isinstance(e, HidingExhibit))
    panels = [_panel(e, everything) for e in exhibits if not isinstance(e, HidingExhibit)]
    note = "<p class='note'>One sample each: illustrations, not measurements.</p>"
    samples = any(isinstance(e, HidingExhibit | MapExhibit) for e in exhibits)
    return note * samples + hidden + side_by_side(panels)


def _panel(exhibit: KernelExhibit | MapExhibit | MixExhibit, everything: list[Exhibit]) -> str:
    where = f"{exhibit.mechanism}, layer {exhibit.layer}"
    if isinstance(exhibit, MapExhibit):
        text = f"{where}, {exhibit.unit} {exhibit.head}: attention weights. Grey: later keys."
        if np.min(exhibit.weights) >= 0:
            text += " Colours by the square root of the weight, so that small ones show."
        if exhibit.rows is not None:
            text += " Chosen queries only."
        return picture(figures.svg(figures.attention_map(exhibit)), text)
    side = {"pre": "before", "post": "after"}.get(exhibit.kind)
    if side is None:
        raise UserError(f"kind must be 'pre' or 'post', got {exhibit.kind!r}")
    if isinstance(exhibit, MixExhibit):
        text = f"{where}: head mixing {side} the softmax."
        return picture(figures.svg(figures.mixing(exhibit)), text)
    same = [
        np.abs(array("kernels", e.kernels, None, None, None)).max()
        for e in everything
        if isinstance(e, KernelExhibit) and e[:3] == exhibit[:3]
    ]
    weight = array("kernels", exhibit.kernels, None, None, None)
    identity = np.zeros_like(weight)
    identity[:, -1, weight.shape[2] // 2] = 1
    text = (
        f"{where}: kernels {side} the softmax, one scale for the layer. Offset 0: the current "
        "query, the same key; positive: later keys. Largest distance of an entry from the "
        f"identity kernel: {np.abs(weight - identity).max():.2g}. Patterns: {_patterns(weight)}."
    )
    return picture(figures.svg(figures.kernels(exhibit, float(max(same)) or 1.0)), text)


def _patterns(kernels: np.ndarray) -> str:
    counts = Counter(kernel_pattern(kernel) for kernel in kernels)
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


def _hiding(exhibit: HidingExhibit) -> str:
    count = len(exhibit.tokens)
    hiding = array("hiding", exhibit.hiding, count, count)
    total = array("accumulated", exhibit.accumulated, count)
    spans = []
    for token, f in zip(exhibit.tokens, total, strict=True):
        share = math.exp(-max(f, 0.0))
        tag = "s" if share < _GONE else "span"
        end = "<br>" if "\n" in token else ""
        spans.append(
            f"<{tag} style='--hid:{100 * (1 - share):.0f}%' title='F = {f:.2f}, {share:.1%} left'>"
            f"{html.escape(visible(token))}</{tag}>{end}"
        )
    pairs = np.argwhere(hiding > 0)
    pairs = sorted(pairs.tolist(), key=lambda at: -hiding[at[0], at[1]])[:_STRONGEST]
    items = "".join(
        f"<li>token {p} {_quoted(exhibit.tokens[p])} hid token {j} {_quoted(exhibit.tokens[j])} "
        f"({hiding[p, j]:.2f})</li>"
        for p, j in pairs
    )
    where = html.escape(f"{exhibit.mechanism}, layer {exhibit.layer}")
    return (
        f"<div class='hiding'><h3>{where}: which token hid which</h3><p class='tokens'>"
        f"{''.join(spans)}</p><p class='note'>The darker a token, the more of its weight exp(−F) "
        f"is gone for what comes later; struck through: less than {100 * _GONE:.0f} % left. "
        + (
            f"The strongest:</p><ol>{items}</ol></div>"
            if items
            else "No token hid another.</p></div>"
        )
    )


def _quoted(token: str) -> str:
    return f"<code>{html.escape(visible(token))}</code>"


def _how(records: list[Record], config: Mapping) -> str:
    def block(title: str, text: str) -> str:
        return f"<h3>{title}</h3><pre>{html.escape(text)}</pre>" if text else ""

    def pretty(value) -> str:
        return json.dumps(value, indent=2, default=str, ensure_ascii=False)

    commands = dict.fromkeys(str(r.environment.get("command", "")) for r in records)
    places = dict.fromkeys(
        pretty({k: v for k, v in r.environment.items() if k not in ("command", "date")})
        for r in records
        if r.environment
    )
    runs = "".join(
        f"<tr><td>{html.escape(r.task)}</td><td>{html.escape(r.mechanism)}</td>"
        f"<td class='n'>{r.seed}</td><td class='n'>{number(r.metric, r.value)}</td>"
        f"<td class='n'>{plain(r.seconds)}</td>"
        f"<td>{html.escape(str(r.environment.get('date', '')))}</td></tr>"
        for r in records
    )
    return (
        "<details><summary>Command, configuration, environment and every run</summary>"
        + block("Command", "\n".join(filter(None, commands)))
        + block("Configuration", pretty(dict(config)) if config else "")
        + block("Environment", "\n".join(places))
        + "<h3>Every run</h3><div class='wide'><table><thead><tr><th>task</th><th>mechanism</th>"
        "<th class='n'>seed</th><th class='n'>final</th><th class='n'>seconds</th><th>date</th>"
        f"</tr></thead><tbody>{runs}</tbody></table></div></details>"
    )
