"""What a page shows of encoder-decoders: held-out sources, and what each model makes of them."""

import html
from collections.abc import Sequence
from typing import NamedTuple

_LONGEST = 600  # characters of a text that are shown


class WrittenExhibit(NamedTuple):
    """What one trained model makes of some held-out sources.

    Arguments:
        rows: of each the source, what was asked for, and the model's text.
    """

    task: str
    mechanism: str
    rows: Sequence[tuple[str, str, str]]


def written_tables(exhibits: Sequence[WrittenExhibit]) -> str:
    """One task's sources, each with what was asked for and what every model wrote."""
    parts = []
    for number, (source, asked, _) in enumerate(exhibits[0].rows):
        lines = [("source", source), ("asked for", asked)]
        for exhibit in exhibits:
            text = exhibit.rows[number][2]
            lines.append((f"{exhibit.mechanism} {'✓' if text == asked else '✗'}", text))
        body = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(_cut(text))}</td></tr>"
            for name, text in lines
        )
        parts.append(f"<table>{body}</table>")
    note = "Held-out sources; ✓: to the letter what was asked for. Written by greedy decoding."
    return f"<p class='note'>{note}</p><div class='wide written'>{''.join(parts)}</div>"


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
