"""One self-contained HTML page about a comparison: what was found, at what cost, in pictures."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from heedful.checks import UserError
from heedful.files import write_whole
from heedful_lab.commands.compare import figures
from heedful_lab.commands.compare.findings import (
    RULE,
    Row,
    better,
    budget_tables,
    by_split,
    configurations,
    findings,
    further,
    number,
    plain,
    summarise,
    table,
)
from heedful_lab.commands.inspect.patterns import kernel_pattern
from heedful_lab.records import METRICS, Record, UnderBudget
from heedful_lab.records.page import PAGE, picture, side_by_side
from heedful_lab.records.tables import format_table

if TYPE_CHECKING:
    from heedful.hf.look import LayerLook
    from heedful_lab.commands.compare.run import CacheHistory, ModelLook, ModelTexts

_STRONGEST = 12  # pairs of tokens listed below a sample
_GONE = 0.01  # a masked token is struck through where less than this of its weight is left
_LONGEST = 600  # characters of a text that are shown


def write_report(
    folder: str | Path,
    records: Sequence[Record],
    config: Mapping | None = None,
    looks: Iterable["ModelLook"] = (),
    budgeted: Sequence[UnderBudget] = (),
    caches: Iterable["CacheHistory"] = (),
    texts: Iterable["ModelTexts"] = (),
) -> Path:
    """Write `report.html` into `folder` and return its path.

    The page is one file that loads nothing from anywhere. It replaces an earlier one only when it
    is whole.

    Arguments:
        folder: where to write; made if absent.
        records: the finished runs.
        config: the configuration of the comparison, shown as it is.
        looks: one sample each as trained models see it.
        budgeted: scores under small KV caches.
        caches: what small caches held in the course of a sequence.
        texts: what encoder-decoders make of evaluation sources.

    Raises:
        ValueError: without records.
    """
    records, inside, written = list(records), {}, {}
    if not records:
        raise UserError("records must hold at least one finished run, got none; train first")
    for look in looks:
        inside.setdefault(f"Inside: {look.task}", []).append(look)
    for text in texts:
        written.setdefault(f"Written: {text.task}", []).append(text)
    rows = summarise(records)
    by_task = {name: [r for r in records if r.task == name] for name in (r.task for r in records)}
    colour = figures.colours([record.mechanism for record in records])
    sections = [
        ("What it shows", _findings(rows)),
        ("Results", _results(rows, records)),
        ("Learning curves", _learning_curves(by_task, colour)),
        ("Beyond the training distribution", _wide(by_split(records, "html"))),
        ("Under small KV caches", _small_caches(budgeted, caches)),
        *((title, _inside(models)) for title, models in inside.items()),
        *((title, _written(models)) for title, models in written.items()),
        ("How it was run", _how(records, config or {})),
    ]
    body = "\n".join(
        f"<section><h2>{html.escape(title)}</h2>\n{text}</section>"
        for title, text in sections
        if text
    )
    title, lead = f"Attention compared: {', '.join(by_task)}", html.escape(_lead(records, rows))
    page = PAGE.substitute(title=html.escape(title), lead=lead, body=body, style="", script="")
    path = Path(folder) / "report.html"
    write_whole(path, page)
    return path


def _wide(tables: Sequence[str]) -> str:
    return "".join(f"<div class='wide'>{x}</div>" for x in tables)


def _note(text: str) -> str:
    return f"<p class='note'>{html.escape(text)}</p>"


def _lead(records: list[Record], rows: list[Row]) -> str:
    def several(values) -> str:
        values = sorted(set(values))
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

    def values_of(key: str) -> list[str]:
        return sorted({str(r.environment[key]) for r in records if r.environment.get(key)})

    mechanisms = list(dict.fromkeys(r.mechanism for r in records))
    tasks = list(dict.fromkeys(r.task for r in records))
    parts = [
        f"{len(records)} training run{'s' * (len(records) > 1)}: {', '.join(mechanisms)} on "
        f"{', '.join(tasks)}",
        f"{several(len(row.seeds) for row in rows)} "
        f"seed{'s' * any(len(row.seeds) > 1 for row in rows)} each",
        f"{several(r.steps for r in records)} steps of "
        f"{several(r.batch for r in records)} sequences",
        f"models of {several(r.parameters for r in records)} parameters",
    ]
    parts += [f"on {', '.join(machines)}"] if (machines := values_of("machine")) else []
    commits = [commit[:12] for commit in values_of("commit")]
    parts += [f"commit {', '.join(commits)}"] if commits else []
    dates = values_of("date")
    parts += [" to ".join(dict.fromkeys([dates[0], dates[-1]]))] if dates else []
    return f"{', '.join(parts)}."


def _findings(rows: list[Row]) -> str:
    items = []
    for sentence in findings(rows):
        task, colon, text = sentence.partition(": ")
        about = f"<b>{html.escape(task)}</b>: {html.escape(text)}" if colon else sentence
        items.append(f"<li>{about}</li>")
    return f"<ul>{''.join(items)}</ul>{_note(RULE)}"


def _results(rows: list[Row], records: list[Record]) -> str:
    note = (
        "Mean ± sample standard deviation over seeds at the end of training, on the evaluation "
        f"set; {better(rows)}. “× standard” is the ratio of the means. Tokens per second: median "
        "of the seeds."
    )
    note = _note(" ".join([note, *configurations(records)]))
    return _wide([table(rows, "html")]) + note + _wide(further(records, "html"))


def _learning_curves(by_task: Mapping[str, list[Record]], colour: dict) -> str:
    pictures = []
    for task, runs in by_task.items():
        if (figure := figures.curves(runs, colour)) is not None:
            lines = "" if len({r.seed for r in runs}) == 1 else " Thin: seeds; thick: mean."
            text = f"{task}: {METRICS[runs[0].metric]} on the evaluation set.{lines}"
            pictures.append(picture(figures.svg(figure), text))
    return side_by_side(pictures)


def _small_caches(scored: Sequence[UnderBudget], caches: Iterable["CacheHistory"]) -> str:
    scores = []
    for task in dict.fromkeys(x.task for x in scored):
        those = [x for x in scored if x.task == task]
        for split in those[0].final:
            for name in dict.fromkeys(x.mechanism for x in those):
                if len({x.policy for x in those if x.mechanism == name}) > 1:
                    text = (
                        f"{task}, {split}: {METRICS[those[0].metric]} of {name} against the "
                        "compression of its KV cache: bytes of a full cache of the same tokens in "
                        "bf16, divided by the peak of this one. Lines: eviction policies "
                        "under the same protection; square: the full cache; dashed: standard "
                        "attention with its full cache; star: the hybrid of local and "
                        "global layers."
                    )
                    figure = figures.under_budgets(those, name, split)
                    scores.append(picture(figures.svg(figure), text))
    tables = "".join(
        f"<h3>{html.escape(x.title)}</h3>{_wide([format_table(x.head, x.body, 'html', words=2)])}"
        for x in budget_tables(scored)
    )
    cached = []
    for x in caches:
        text = (
            f"{x.task}, {x.mechanism}: what each layer's cache holds in the course of a sequence "
            f"under {x.policy} with {x.budget} tokens. Dark: cached; light: evicted."
        )
        cached.append(picture(figures.svg(figures.cached(x.layers)), text, "as-it-is"))
    return side_by_side(scores) + tables + side_by_side(cached)


def _inside(models: Sequence["ModelLook"]) -> str:
    """Masking in the layer that masks most, the sharpest map, and kernels that have learned.

    The sharpest head has the largest mean, over queries, of the greatest weight on another token
    than the first and itself.
    """
    masking, panels = [], []
    for model in models:
        masks = {i: look for i, look in model.looks.items() if look.masking is not None}
        if masks:
            layer = max(masks, key=lambda i: masks[i].masked.sum().item())
            masking.append(_masking(model, layer))
        layer, head = max(
            ((i, head) for i, look in model.looks.items() for head in range(len(look.weights))),
            key=lambda at: _sharpness(model.looks[at[0]], at[1]),
        )
        weights = model.looks[layer].weights[head].numpy()
        unit = "head" if model.looks[layer].heads_per_map == 1 else "pair"
        text = f"{model.mechanism}, layer {layer}, {unit} {head}: attention weights."
        text += " Grey: later keys."
        if weights.min() >= 0:
            text += " Colours by the square root of the weight, so that small ones show."
        panels.append(picture(figures.svg(figures.attention_map(model.tokens, weights)), text))
        panels += _kernels(model)
    note = _note("One sample each: illustrations, not measurements.")
    return note + "".join(masking) + side_by_side(panels)


def _sharpness(look: "LayerLook", head: int) -> float:
    weights = look.weights[head][2:, 1:]
    others = weights.clone()
    others.diagonal(1).zero_()  # the token itself
    return others.amax(-1).mean().item()


def _kernels(model: "ModelLook") -> list[str]:
    """The kernels of layers of which at least one is no longer near the identity."""
    pictures = []
    for index, look in model.looks.items():
        for side, weights in (("before", look.conv), ("after", look.post_conv)):
            names = [] if weights is None else [kernel_pattern(kernel) for kernel in weights]
            if set(names) - {"near identity"}:
                patterns = ", ".join(f"{x} {names.count(x)}" for x in dict.fromkeys(names))
                text = (
                    f"{model.mechanism}, layer {index}: kernels {side} the softmax. Offset 0: the "
                    f"current query, the same key; positive: later keys. Patterns: {patterns}."
                )
                pictures.append(picture(figures.svg(figures.kernels(weights)), text))
    return pictures


def _masking(model: "ModelLook", layer: int) -> str:
    """The sample's tokens, the darker the more they are masked, and the strongest pairs."""
    look, tokens = model.looks[layer], model.tokens
    masking, total = look.masking.mean(0).numpy(), look.masked.mean(0).tolist()
    spans = []
    for token, f in zip(tokens, total, strict=True):
        share = math.exp(-max(f, 0.0))
        tag = "s" if share < _GONE else "span"
        end = "<br>" if "\n" in token else ""
        spans.append(
            f"<{tag} style='--hid:{100 * (1 - share):.0f}%' title='F = {f:.2f}, {share:.1%} left'>"
            f"{html.escape(figures.visible(token))}</{tag}>{end}"
        )
    pairs = sorted(np.argwhere(masking > 0).tolist(), key=lambda at: -masking[at[0], at[1]])
    quoted = [f"<code>{html.escape(figures.visible(token))}</code>" for token in tokens]
    items = "".join(
        f"<li>token {p} {quoted[p]} masked token {j} {quoted[j]} ({masking[p, j]:.2f})</li>"
        for p, j in pairs[:_STRONGEST]
    )
    where = html.escape(f"{model.mechanism}, layer {layer}")
    note = (
        "The darker a token, the more of its weight exp(−F) is gone for what comes later; struck "
        f"through: less than {100 * _GONE:.0f} % left. "
        f"{'The strongest:' if items else 'No token masked another.'}"
    )
    return (
        f"<div class='masking'><h3>{where}: which token masked which</h3><p class='tokens'>"
        f"{''.join(spans)}</p>{_note(note)}{f'<ol>{items}</ol>' if items else ''}</div>"
    )


def _written(models: Sequence["ModelTexts"]) -> str:
    """One task's sources, each with its target and what every model wrote."""

    def line(name: str, text: str) -> str:
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
        return f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"

    parts = []
    for at, (source, target, _) in enumerate(models[0].rows):
        lines = [line("source", source), line("target", target)]
        for model in models:
            text = model.rows[at][2]
            lines.append(line(f"{model.mechanism} {'✓' if text == target else '✗'}", text))
        parts.append(f"<table>{''.join(lines)}</table>")
    note = "Sources of the evaluation set; ✓: exactly the target. Written by greedy decoding."
    return f"{_note(note)}<div class='wide written'>{''.join(parts)}</div>"


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
    runs = []
    for r in records:
        numbers = (str(r.seed), number(r.metric, r.value), plain(r.seconds))
        runs.append((r.task, r.mechanism, str(r.environment.get("date", "")), *numbers))
    head = ("task", "mechanism", "date", "seed", "final", "seconds")
    return (
        "<details><summary>Command, configuration, environment and every run</summary>"
        + block("Command", "\n".join(filter(None, commands)))
        + block("Configuration", pretty(dict(config)) if config else "")
        + block("Environment", "\n".join(places))
        + f"<h3>Every run</h3><div class='wide'>{format_table(head, runs, 'html', words=3)}</div>"
        "</details>"
    )
