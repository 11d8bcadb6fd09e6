"""Groups of every kind over short rows, who is in which by plain Python, and calls with them."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from heedful.ops import Groups, Visibility, grouped_attention, summarise
from heedful.ops.grouped import (
    cif_groups,
    fixed_groups,
    sentence_groups,
    sliding_groups,
)
from helpers.mechanisms import VISIBILITIES
from helpers.oracle import draw

SIZE, SPAN, STRIDE, SHORTEST, LONGEST = 4, 6, 2, 2, 7


@dataclass(frozen=True)
class Case:
    """A way of grouping: `draw` gives what it learns from, `make` the groups."""

    name: str
    draw: Callable[[int, int], Tensor | None]
    make: Callable[[Tensor | None, int, Visibility | None], Groups]

    def __str__(self) -> str:
        return self.name


def _ids(rows: int, tokens: int) -> Tensor:
    return torch.randint(0, 5, (rows, tokens))


def _alpha(rows: int, tokens: int) -> Tensor:
    return 1 / LONGEST + (1 - 1 / LONGEST) * 0.6 * torch.rand(rows, tokens, dtype=torch.float64)


CASES = [
    Case("fixed", lambda *_: None, lambda _, n, v: fixed_groups(SIZE, n, visibility=v)),
    Case("sliding", lambda *_: None, lambda _, n, v: sliding_groups(SPAN, STRIDE, n, visibility=v)),
    Case(
        "sentence",
        _ids,
        lambda ids, _, v: sentence_groups(
            ids, (0, 3), shortest=SHORTEST, longest=LONGEST, visibility=v
        ),
    ),
    Case("cif", _alpha, lambda a, _, v: cif_groups(a, longest=LONGEST, visibility=v)),
]
BY_NAME = {case.name: case for case in CASES}


def documents_of(visibility: Visibility | None, row: int, tokens: int) -> list[list[int]]:
    """The runs of real tokens of one document, in order; a gap of padding parts a run."""
    runs: list[list[int]] = []
    before = None
    for t in range(tokens):
        number, real = 0, True
        if visibility is not None and visibility.documents is not None:
            number = int(visibility.documents[row % len(visibility.documents), t])
        if visibility is not None and visibility.padding is not None:
            real = bool(visibility.padding[row % len(visibility.padding), t])
        number = number if real and number >= 0 else None
        if number is not None:
            if number != before:
                runs.append([])
            runs[-1].append(t)
        before = number
    return runs


Shares = list[dict[int, float]]
"""Of one row: the tokens of every group with their shares, in the order of the groups' ends."""


def shares_by_hand(
    case: Case, inputs: Tensor | None, row: int, tokens: int, visibility: Visibility | None
) -> Shares:
    """The memberships of one row as the docstrings define them, token by token."""
    actual: Shares = []
    for run in documents_of(visibility, row, tokens):
        match case.name:
            case "fixed":
                actual += [dict.fromkeys(run[i : i + SIZE], 1.0) for i in range(0, len(run), SIZE)]
            case "sliding":
                starts = range(0, len(run), STRIDE)
                count = [sum(s <= i < s + SPAN for s in starts) for i in range(len(run))]
                actual += [
                    {run[i]: 1 / count[i] for i in range(s, min(s + SPAN, len(run)))}
                    for s in starts
                ]
            case "sentence":
                new = True
                for t in run:
                    if new:
                        actual.append({})
                    actual[-1][t] = 1.0
                    closes = inputs[row, t].item() in (0, 3)
                    length = len(actual[-1])
                    new = (closes and length >= SHORTEST) or length == LONGEST
            case "cif":
                level, groups = 0.0, {}
                for t in run:
                    alpha, at = inputs[row, t].item(), level
                    level += alpha
                    while level - at > 1e-12:
                        j = int(at + 1e-12)
                        part = min(level, j + 1) - at
                        groups.setdefault(j, {})[t] = part / alpha
                        at += part
                actual += [groups[j] for j in sorted(groups)]
    return actual


TOKENS = 37
VISIBILITIES = VISIBILITIES | {
    "both ways in a window": lambda keys: Visibility(causal=False, window=11)
}
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_impl = pytest.mark.parametrize("impl", ["reference", "tiled"])


def tensors(tokens: int = TOKENS, queries: int | None = None, dim: int = 6) -> dict[str, Tensor]:
    """q, k, v of two rows, weights of the members, and a factor on the sizes per head."""
    return {
        "q": draw(2, 4, queries or tokens, dim),
        "k": draw(2, 2, tokens, dim),
        "v": draw(2, 2, tokens, dim),
        "logits": draw(2, 2, tokens),
        "beta": torch.rand(4, dtype=torch.float64) + 0.5,
    }


def attend(x, groups: Groups, impl: str, *, asking: bool = False, **options) -> Tensor:
    """The operator with summaries made of `x`; groups ask by the means of the last queries."""
    queries = None
    if asking:
        queries = summarise(x["q"], x["q"], groups).k
    sums = summarise(x["k"], x["v"], groups, logits=x.get("logits"))._replace(q=queries)
    return grouped_attention(
        x["q"], x["k"], x["v"], groups=groups, summaries=sums, beta=x.get("beta", 1.0), impl=impl,
        **options,
    )  # fmt: skip
