"""Sliding windows over text, in which every token is predicted once with enough context."""

from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from heedful.checks import UserError, check_whole
from heedful.data import corpus

Encode = Callable[[str], tuple[list[int], list[int]]]
"""A text's tokens, and where the text of each ends, in bytes of UTF-8."""

_BYTES = 16  # of text per token that is looked for


class TextWindow(NamedTuple):
    """Consecutive tokens of a document; those from `first` on are counted.

    Arguments:
        key: names the sample within its task.
        ids: the tokens.
        first: the first that is counted; those before it are context, at least one.
        nbytes: of the text that the counted tokens stand for.
    """

    key: str
    ids: tuple[int, ...]
    first: int
    nbytes: int


def windows(
    ids: Sequence[int], ends: Sequence[int], length: int, stride: int, name: str = ""
) -> list[TextWindow]:
    """Windows of `length` tokens, each `stride` further; every token but the first counts once.

    Tokens without text that stand before the document (BOS) stand before every window: models that
    are trained with it can depend on it. They do not count, and the document's first token does.

    Arguments:
        ids: tokens of one document.
        ends: of each, where its text ends, in bytes.
        length: tokens of a window; the last one may be shorter.
        stride: how far a window is from the one before: so each counted token, but those of the
            first window, has at least `length - stride` tokens before it.
        name: what keys begin with.

    Raises:
        ValueError: `length` or `stride` is out of range.
    """
    lead = sum(1 for _ in takewhile(lambda end: end == 0, ends))
    check_whole("length", length, 1 + max(lead, 1))
    most = length - max(lead, 1)
    check_whole("stride", stride, 1, most, way_out="a window needs a token of context")
    begin, text, ends = tuple(ids[:lead]), ids[lead:], ends[lead:]
    result, position, start = [], 0 if lead else 1, 0
    while position < len(text):
        stop = min(start + length - lead, len(text))
        nbytes = ends[stop - 1] - (ends[position - 1] if position else 0)
        first = lead + position - start
        result.append(TextWindow(f"{name}{start}", (*begin, *text[start:stop]), first, nbytes))
        position, start = stop, start + stride
    return result


def domains(paths: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Paths to read for each domain: every path is one, called by its last part.

    No paths are one domain, the Python standard library's sources.
    """
    if not paths:
        return {"standard library": ()}
    short = [x if x.startswith("hf:") else Path(x).stem or x for x in paths]
    alone = [x if short.count(x) == 1 else path for x, path in zip(short, paths, strict=True)]
    return dict(zip(alone, ((path,) for path in paths), strict=True))


def domain_windows(
    paths: Sequence[str], encode: Encode, count: int, length: int, stride: int
) -> list[TextWindow]:
    """The first `count` windows of a domain's documents; none reaches over a document's end.

    Raises:
        ValueError: the text cannot be read, or has no two tokens.
    """
    result: list[TextWindow] = []
    for number, document in enumerate(corpus(tuple(paths), (count + 1) * length * _BYTES)):
        result += windows(*encode(document.text), length, stride, f"{number}:")
        if len(result) >= count:
            break
    if not result:
        raise UserError(f"data {', '.join(paths)} holds no two tokens; give more text")
    return result[:count]
