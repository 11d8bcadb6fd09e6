"""Find the one block that holds all question letters: attention to several tokens at once."""

import math
import string
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from heedful.checks import UserError, check_choice, check_whole
from heedful_lab.tasks.samples import BOS, EOS, Recipe, Samples, SymbolTask, rows

_DOT, _HASH, _LETTER = 2, 3, 4

# Sequences are drawn in chunks of about this many blocks, so that a million sequences need no more
# scratch memory than a thousand.
_CHUNK_BLOCKS = 1 << 19


@dataclass(frozen=True)
class Blocks(SymbolTask):
    """The block task: blocks of random letters, question letters, and the block that holds them.

    A sequence reads `BOS hjnvt.qfjgt.bjtpq#pb bjtpq EOS` (without the spaces): blocks of distinct
    lowercase letters joined by ".", then "#" and letters sampled from one block in random order,
    then the answer. Exactly one block holds all question letters, wherever and in whatever order;
    no two blocks are equal; every block is whole. Loss lies on the answer and EOS alone.

    A single query-key product sees one letter at a time, so standard attention has to gather the
    letters of a block in one token before it can compare; multi-token attention need not.

    Arguments:
        blocks: number of blocks; the paper has 52 of 5 letters in its sequences of 321 tokens.
        letters: letters in a block, 2 to 26; the paper has 5 and 8.
        answer: what of the block is the target: `"all"` letters, its `"first"` or its `"last"`.
        question: number of question letters, 1 to `letters`; the paper has 2.

    Raises:
        ValueError: if a field is out of range, or so many different blocks without all question
            letters do not exist.

    Source: Multi-Token Attention, arXiv 2504.00927, §4.1 and appendix C.
    """

    blocks: int = 8
    letters: int = 5
    answer: Literal["all", "first", "last"] = "all"
    question: int = 2

    symbol_names = ("", "", ".", "#", *string.ascii_lowercase)
    recipe: ClassVar[Recipe] = Recipe(
        64, 3, 4, 900, 32, 4e-3, ("standard", "mta"), mechanism_rate=8.0,
        # In every layer, as in the paper's toy task (section 4.1), but with the published kernels
        # and mixing: they learn it sooner than 2 x 9 kernels alone.
        changes={"mta": {"conv_every": 1}},
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_whole("blocks", self.blocks, 1)
        check_whole(
            "letters", self.letters, 2, 26, way_out="the letters of a block differ, and 26 exist"
        )
        check_choice("answer", self.answer, ("all", "first", "last"))
        check_whole(
            "question",
            self.question,
            1,
            self.letters,
            way_out="question letters are taken from one block: ask fewer or use longer blocks",
        )
        most = self._distractors() + 1
        if self.blocks > most:
            raise UserError(
                f"blocks must be at most {most} with letters={self.letters} and "
                f"question={self.question}, got {self.blocks}: no more different blocks lack a "
                "question letter; ask for fewer blocks or for another number of letters"
            )

    def _distractors(self) -> int:
        """Number of different blocks that do not hold all letters of a given question."""
        sets = math.comb(26, self.letters)
        holding = math.comb(26 - self.question, self.letters - self.question)
        return (sets - holding) * math.factorial(self.letters)

    @property
    def vocab_size(self) -> int:
        """Ids 0 to 29 are BOS, EOS, ".", "#" and a to z; rounded up to 32 as in the paper."""
        return 32

    @property
    def length(self) -> int:
        """Tokens of a sequence, BOS and EOS included."""
        return self._answer_start + self._answer_length + 1

    @property
    def _answer_start(self) -> int:
        return 1 + self.blocks * (self.letters + 1) + self.question

    @property
    def _answer_length(self) -> int:
        return self.letters if self.answer == "all" else 1

    def draw(self, rng: np.random.Generator, count: int) -> Samples:
        """`count` sequences, from these random numbers."""
        ids = np.empty((count, self.length), dtype=np.int64)
        step = max(1, _CHUNK_BLOCKS // self.blocks)
        for start in range(0, count, step):
            self._fill(ids[start : start + step], rng)
        return rows(torch.from_numpy(ids), slice(self._answer_start, None))

    def _fill(self, ids: np.ndarray, rng: np.random.Generator) -> None:
        count, n = len(ids), self.letters
        each = np.arange(count)
        blocks = _draw(rng, count * self.blocks, n).reshape(count, self.blocks, n)
        target = rng.integers(self.blocks, size=count)
        answer = blocks[each, target]
        places = rng.permuted(np.tile(np.arange(n), (count, 1)), axis=1)[:, : self.question]
        question = np.take_along_axis(answer, places, axis=1)
        _redraw_distractors(rng, blocks, target, _letter_set(question))

        body = np.full((count, self.blocks, n + 1), _DOT)
        body[..., :n] = blocks.astype(np.int64) + _LETTER
        body[:, -1, n] = _HASH
        ids[:, 0] = BOS
        ids[:, 1 : self._answer_start - self.question] = body.reshape(count, -1)
        ids[:, self._answer_start - self.question : self._answer_start] = (
            question.astype(np.int64) + _LETTER
        )
        letters = {"all": slice(None), "first": slice(0, 1), "last": slice(-1, None)}[self.answer]
        ids[:, self._answer_start : -1] = answer[:, letters].astype(np.int64) + _LETTER
        ids[:, -1] = EOS

    def shown(self) -> Int[Tensor, " T"]:
        """A sequence of at most six blocks."""
        return replace(self, blocks=min(self.blocks, 6)).sample(1, 0).input_ids[0]

    def evaluations(self) -> "dict[str, Blocks]":
        """The task itself, to be sampled with another seed than training."""
        return {"in-distribution": self}


def _draw(rng: np.random.Generator, count: int, letters: int) -> np.ndarray:
    """`count` blocks of distinct letters 0..25, all orders equally likely (Fisher-Yates)."""
    pool = np.tile(np.arange(26, dtype=np.uint8), (count, 1))
    each = np.arange(count)
    for i in range(letters):
        j = rng.integers(i, 26, size=count)
        targets = pool[each, j]
        pool[each, j] = pool[:, i]
        pool[:, i] = targets
    return pool[:, :letters]


def _letter_set(blocks: np.ndarray) -> np.ndarray:
    """The set of letters along the last axis, one bit each."""
    bits = np.zeros(blocks.shape[:-1], dtype=np.int32)
    for i in range(blocks.shape[-1]):
        bits |= np.left_shift(np.int32(1), blocks[..., i], dtype=np.int32, casting="unsafe")
    return bits


def _redraw_distractors(
    rng: np.random.Generator, blocks: np.ndarray, target: np.ndarray, question: np.ndarray
) -> None:
    """Replace, in place, blocks beside the target that hold the question or repeat another."""
    open_rows = np.arange(len(blocks))
    while len(open_rows):
        here, letters = blocks[open_rows], question[open_rows, None]
        bad = ((_letter_set(here) & letters) == letters) | _repeats(here)
        # A copy of the target holds the question too, so the copy is always the one to go.
        bad[np.arange(len(here)), target[open_rows]] = False
        redo = bad.any(axis=1)
        open_rows, bad = open_rows[redo], bad[redo]
        row, block = np.nonzero(bad)
        blocks[open_rows[row], block] = _draw(rng, len(row), blocks.shape[-1])


def _repeats(blocks: np.ndarray) -> np.ndarray:
    """Mark the blocks `[n, B, N]` that equal an earlier one of their sequence."""
    # Five bits a letter: twelve letters fill an int64. Longer blocks that agree in twelve letters
    # count as equal, which is stricter and, with 26!/14! beginnings, never leaves too few.
    code = np.zeros(blocks.shape[:2], dtype=np.int64)
    for i in range(min(blocks.shape[-1], 12)):
        code = code << 5 | blocks[..., i]
    order = np.argsort(code, axis=1, kind="stable")
    ordered = np.take_along_axis(code, order, axis=1)
    same = np.zeros(code.shape, dtype=bool)
    same[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    result = np.empty_like(same)
    np.put_along_axis(result, order, same, axis=1)
    return result
