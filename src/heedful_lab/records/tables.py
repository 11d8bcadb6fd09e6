"""A table as text, Markdown or HTML."""

import html
from collections.abc import Sequence

from heedful.checks import UserError


def format_table(head: Sequence[str], body: list[Sequence[str]], format: str, words: int) -> str:
    """A table whose first `words` columns are words and the others numbers.

    Raises:
        ValueError: `format` is not `"text"`, `"markdown"` or `"html"`.
    """
    if format == "html":

        def whole(text: str) -> str:
            # A narrow screen may break between the value and its seeds, not inside either.
            for part in (" ± ", " %", " seed"):
                text = text.replace(part, part.replace(" ", "\u00a0"))
            return text

        def line(texts: Sequence[str], tag: str) -> str:
            marks = ["", *[" class='n'" if i >= words else "" for i in range(1, len(texts))]]
            inner = (
                f"<{tag}{mark}>{html.escape(whole(text))}</{tag}>"
                for text, mark in zip(texts, marks, strict=True)
            )
            return f"<tr>{''.join(inner)}</tr>"

        lines = "\n".join(line(texts, "td") for texts in body)
        return f"<table>\n<thead>{line(head, 'th')}</thead>\n<tbody>\n{lines}\n</tbody>\n</table>"
    if format not in ("text", "markdown"):
        raise UserError(f"format must be 'text', 'markdown' or 'html', got {format!r}")
    if format == "markdown":
        body = [tuple(text.replace("|", "\\|") for text in texts) for texts in body]
    columns = list(zip(head, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def aligned(texts: Sequence[str]) -> list[str]:
        return [
            text.ljust(width) if i < words else text.rjust(width)
            for i, (text, width) in enumerate(zip(texts, widths, strict=True))
        ]

    if format == "markdown":
        rule = ["-" * w if i < words else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
        lines = [aligned(head), rule, *map(aligned, body)]
        return "\n".join(f"| {' | '.join(texts)} |" for texts in lines)
    lines = [aligned(head), ["-" * w for w in widths], *map(aligned, body)]
    return "\n".join("  ".join(texts).rstrip() for texts in lines)
