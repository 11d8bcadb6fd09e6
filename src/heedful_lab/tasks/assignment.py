"""The latest value of a variable: attention that should forget what has been overwritten."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from heedful.checks import UserError, check_choice, check_whole
from heedful_lab.tasks.samples import BOS, Recipe, Samples, SymbolTask, rows

_NAME = 2


@dataclass(frozen=True)
class Assignment(SymbolTask):
    """Variable assignment: many assignments, then a query for the latest value of one variable.

    A sequence reads `y=7;x=1;x=3;z=5;x=3;` after BOS; its last value is the target. A token is a
    name with its `=`, or a value with its `;`. Names and values are drawn uniformly and
    independently; the queried name is drawn uniformly from those that have been assigned. Every
    value is one token, also 177, so all sequences of a configuration have the same length. Loss
    lies on the answers alone.

    The paper gives no numbers; sizes and the longer evaluations here are ours. Its remark that
    selective attention, unlike standard attention, still answers for a variable that was assigned
    once at the start and queried after a long context is the evaluation `assigned-once-4x`.

    Arguments:
        variables: number of names, 1 to 26 (a, b, ...).
        values: number of values, 2 or more (0, 1, ...); guessing errs in 1 - 1/values of the
            sequences.
        assignments: assignments before the query.
        query: `"any"` assigned variable, or the one that the `"first"` assignment sets and no
            other sets again.
        queries: queries at the end of a sequence, each drawn anew: `x=3;y=7`. The paper has one,
            and so have the evaluations; more of them give a training sequence more to learn
            from.

    Raises:
        ValueError: if a field is out of range.

    Source: Selective Attention Improves Transformer, arXiv 2410.02703, §2 and appendix A.1.
    """

    variables: int = 8
    values: int = 10
    assignments: int = 32
    query: Literal["any", "first"] = "any"
    queries: int = 1

    recipe: ClassVar[Recipe] = Recipe(64, 2, 2, 500, 32, 3e-3, ("standard", "selective"))

    def __post_init__(self) -> None:
        check_whole("variables", self.variables, 1, 26, way_out="names are single letters")
        check_whole("values", self.values, 2)
        check_whole("assignments", self.assignments, 1)
        check_choice("query", self.query, ("any", "first"))
        check_whole("queries", self.queries, 1)
        if self.query == "first" and self.variables == 1 and self.assignments > 1:
            raise UserError(
                'variables must be at least 2 with query="first", got 1: with one name, every '
                "assignment overwrites the first"
            )

    @property
    def symbol_names(self) -> tuple[str, ...]:
        """BOS, EOS (unused), one for each name and one for each value."""
        names = (f"{name}=" for name in string.ascii_lowercase[: self.variables])
        return ("", "", *names, *(f"{value};" for value in range(self.values)))

    @property
    def length(self) -> int:
        """Tokens of a sequence: BOS, and two for each assignment and each query."""
        return 1 + 2 * (self.assignments + self.queries)

    def draw(self, rng: np.random.Generator, count: int) -> Samples:
        """`count` sequences, from these random numbers."""
        n, each = self.assignments, np.arange(count)
        names = rng.integers(self.variables, size=(count, n))
        values = rng.integers(self.values, size=(count, n))
        if self.query == "first":
            query_names = names[:, :1].repeat(self.queries, axis=1)
            if n > 1:
                # The other names, uniformly: a step of 1 to variables-1 around the circle.
                steps = rng.integers(1, self.variables, size=(count, n - 1))
                names[:, 1:] = (query_names[:, :1] + steps) % self.variables
        else:
            lots = rng.random((count, self.queries, self.variables))
            assigned = np.zeros((count, 1, self.variables), dtype=bool)
            assigned[each[:, None], 0, names] = True
            query_names = np.where(assigned, lots, -1.0).argmax(axis=2)
        latest = n - 1 - (names[:, None] == query_names[:, :, None])[:, :, ::-1].argmax(axis=2)

        ids = np.empty((count, self.length), dtype=np.int64)
        ids[:, 0] = BOS
        end = 1 + 2 * n
        ids[:, 1:end:2] = names + _NAME
        ids[:, 2:end:2] = values + (_NAME + self.variables)
        ids[:, end::2] = query_names + _NAME
        ids[:, end + 1 :: 2] = values[each[:, None], latest] + (_NAME + self.variables)
        return rows(torch.from_numpy(ids), slice(end + 1, None, 2))

    @classmethod
    def default(cls, data: Sequence[str] = ()) -> "Assignment":
        """Eight queries a sequence: one gives too little to learn from."""
        return cls(queries=8)

    def shown(self) -> Int[Tensor, " T"]:
        """A sequence of at most 16 assignments and three queries."""
        assignments, queries = min(self.assignments, 16), min(self.queries, 3)
        short = replace(self, assignments=assignments, queries=queries)
        return short.sample(1, 0).input_ids[0]

    def evaluations(self) -> "dict[str, Assignment]":
        """The task itself, two and four times as many assignments, and the two hard cases.

        `assigned-once` and `assigned-once-4x` query the variable of the first assignment, which is
        never overwritten, at the training length and at four times as many assignments. They are
        left out where there is only one variable.
        """
        once = replace(self, queries=1)
        twice = replace(once, assignments=2 * self.assignments)
        four = replace(once, assignments=4 * self.assignments)
        splits = {"in-distribution": once, "2x-assignments": twice, "4x-assignments": four}
        if self.variables > 1:
            splits["assigned-once"] = replace(once, query="first")
            splits["assigned-once-4x"] = replace(four, query="first")
        return splits
