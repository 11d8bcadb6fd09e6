"""Facts stated early and queried at the end: attention that must keep what nothing refers to."""

import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from heedful.checks import UserError, check_choice, check_whole
from heedful_lab.tasks.samples import (
    BOS,
    IGNORE,
    Recipe,
    Samples,
    Task,
    check_draw,
    errors_and_mask,
    render,
    token_error,
)

_MARKS = (".", "!")  # an answer ends with one of them, as the last instruction says
_LONGEST = 3  # symbols of a value
_LEAD = 8  # tokens before the first fact: more than the sinks that a cache keeps
_SYMBOLS = string.ascii_uppercase + string.digits
_WORDS = tuple(f"{c}{v} " for c in "bdklm" for v in "aeiou")
_INSTRUCTION = 2
_NAME = _INSTRUCTION + len(_MARKS)


class _Piece(NamedTuple):
    """Tokens that stand together; from `answer` on they follow from earlier ones."""

    ids: list[int]
    answer: int | None = None


@dataclass(frozen=True)
class Recall(Task):
    """Recall: facts, a long stretch of distractors, an instruction, questions.

    A sequence reads, after BOS (shortened):

        le mi ba le mi ba j=MN5;do mu do mu c=HGJ;e=0;[!]e=0!ko da lu ko da lu e=R4;
        be la be la e=R4![.]do bo do bo c=HGJ.e=R4.

    *Facts* are stated in the early part, the first third of the sequence: a name with its "=", a
    value of one to three symbols, and ";". No symbol is in two values of a sequence. Half of the
    names (rounded down) are *dormant*: nothing refers to them before the last questions. The others
    are stated anew in the middle part, `retold` times, where the newest value counts, and are
    queried there (`references`). An *instruction* says with which mark answers end from there on,
    "." or "!". The first begins the middle part and the last comes among the last quarter of what
    happens there, so that it alone matters in the end. At the end stand the *questions*, of
    different names, each followed by its answer: the newest value and the mark. What is left is
    *filler*: phrases of words, each stated twice, so that the second time follows from the first.

    So a model may forget filler, retold values, references and old instructions, and must keep the
    dormant facts and the last instruction. The last `distance` tokens before a question hold no
    dormant fact, nor do the first 8 tokens of a sequence: a smaller window, with or without sinks,
    has lost them, and guesses. Whoever guesses among the symbols that are in no value in sight errs
    in more than 0.97 of the dormant answers; whoever mistakes the last instruction, in half.

    Loss lies on the questions' answers and, with `taught`, also on those of the references and on
    what is stated the second time: a training sequence then has more to learn from. The measure
    counts answers; one is wrong if any of its tokens is.

    Arguments:
        length: tokens of a sequence.
        names: names of a sequence, of which `names // 2` are dormant.
        pool: names that sequences draw theirs from, 2 to 26.
        retold: how often each name that is not dormant is stated anew.
        references: questions in the middle part, of names that are not dormant.
        instructions: how many there are.
        questions: questions at the end, at most `names // 2`.
        queries: what they ask for: `"dormant"` names, `"recent"` ones (stated anew in the middle
            part), or `"any"`, all names alike.
        taught: whether references and filler carry loss as well.

    Raises:
        ValueError: a field is out of range, or a sequence may not hold it all.

    Source: ours, for the claims on context pruning of arXiv 2410.02703, section 4.
    """

    length: int = 256
    names: int = 8
    pool: int = 12
    retold: int = 1
    references: int = 16
    instructions: int = 3
    questions: int = 4
    queries: Literal["any", "dormant", "recent"] = "any"
    taught: bool = True

    metric: ClassVar[str] = "answer_error"
    recipe: ClassVar[Recipe] = Recipe(
        64, 2, 2, 1600, 16, 2e-3, ("standard", "selective"),
        changes={"grouped": {"size": 8, "window": 16}},
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_whole("pool", self.pool, 2, 26, way_out="names are single letters")
        check_whole("names", self.names, 2, self.pool, way_out="names are drawn from the pool")
        for name in ("retold", "references", "instructions", "questions"):
            check_whole(name, getattr(self, name), 1)
        check_choice("queries", self.queries, ("any", "dormant", "recent"))
        check_whole("length", self.length, 1)
        if self.questions > self.names // 2:
            raise UserError(
                f"questions must be at most names // 2 = {self.names // 2}, as they ask for "
                f"different names, dormant ones alone in some sequences; got {self.questions}"
            )
        active = self.names - self.names // 2
        pieces = active * self.retold + self.references + self.questions
        most = _LONGEST + 2  # tokens of a fact, and of a question with its answer
        rest = pieces * most + self.instructions
        if (values := self.names + active * self.retold) * _LONGEST > len(_SYMBOLS):
            raise UserError(
                f"names and retold must make at most {len(_SYMBOLS) // _LONGEST} values, as no "
                f"symbol is in two of them, got {values}"
            )
        least = max(3 * (_LEAD + self.names * most), -(-3 * rest // 2))
        if self.length < least:
            raise UserError(
                f"length must be at least {least} for {self.names} names, {self.retold} retold "
                f"facts, {self.references} references and {self.questions} questions, got "
                f"{self.length}"
            )

    @property
    def vocab_size(self) -> int:
        """BOS, EOS (unused), instructions, names, symbols, ";", the two marks, filler words."""
        return self._word + len(_WORDS)

    @property
    def _symbol(self) -> int:
        return _NAME + self.pool

    @property
    def _end(self) -> int:
        return self._symbol + len(_SYMBOLS)

    @property
    def _word(self) -> int:
        return self._end + 1 + len(_MARKS)

    @property
    def early(self) -> int:
        """End of the early part: tokens before it, BOS included."""
        return self.length // 3

    @property
    def distance(self) -> int:
        """Least number of tokens before a question at the end that hold no dormant fact."""
        return self.length - self.early - self.questions * (_LONGEST + 2)

    def cut(self, length: int | None, tokenizer: str) -> "Recall":
        """Sequences of so many tokens; longer ones have more filler."""
        return self if length is None else replace(self, length=length)

    def sample(self, count: int, seed: int) -> Samples:
        """`count` sequences, the same for the same configuration, count and seed."""
        check_draw(count, seed)
        rng = np.random.default_rng(seed)
        pairs = [self._row(rng) for _ in range(count)]
        ids, labels = (torch.from_numpy(np.stack(x)) for x in zip(*pairs, strict=True))
        return Samples(ids, labels, torch.ones_like(ids))

    def _row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        names = rng.permutation(self.pool)[: self.names]
        dormant, active = np.split(names, [self.names // 2])
        values: dict[int, list[int]] = {}
        fresh = (self._symbol + rng.permutation(len(_SYMBOLS))).tolist()  # each is used once

        def tell(name: int | np.integer) -> _Piece:
            values[name] = [fresh.pop() for _ in range(rng.integers(1, _LONGEST + 1))]
            return _Piece([_NAME + name, *values[name], self._end])

        def ask(name: int | np.integer) -> _Piece:
            return _Piece([_NAME + name, *values[name], self._end + 1 + mark], answer=1)

        early = [tell(name) for name in _shuffled(rng, names)]
        turns = [*active.tolist() * self.retold, *["question"] * self.references]
        turns = _shuffled(rng, turns + ["instruction"] * max(self.instructions - 2, 0))
        last = len(turns) - rng.integers(len(turns) // 4 + 1)
        if self.instructions > 1:
            turns.insert(last, "instruction")
        middle, mark = [], 0
        for turn in ["instruction", *turns]:
            if turn == "instruction":
                mark = int(rng.integers(len(_MARKS)))
                middle.append(_Piece([_INSTRUCTION + mark]))
            else:
                middle.append(ask(rng.choice(active)) if turn == "question" else tell(turn))
        choice = {"dormant": dormant, "recent": active, "any": names}[self.queries]
        question_names = _shuffled(rng, choice)[: self.questions]
        return self._laid(rng, early, middle, [ask(name) for name in question_names])

    def _laid(self, rng, early, middle, last) -> tuple[np.ndarray, np.ndarray]:
        """Ids and labels of a sequence: its pieces in order, with filler between them."""
        tail = sum(len(piece.ids) for piece in last)
        pieces = [_Piece([BOS]), *self._filler(rng, _LEAD - 1)]
        pieces += self._spread(rng, early, self.early - _LEAD)
        pieces += self._spread(rng, middle, self.length - self.early - tail)
        if not self.taught:
            pieces = [piece._replace(answer=None) for piece in pieces]
        ids, labels = [], []
        for piece in [*pieces, *last]:
            prompt = len(piece.ids[: piece.answer])
            ids += piece.ids
            labels += [IGNORE] * prompt + piece.ids[prompt:]
        return np.array(ids), np.array(labels)

    def _spread(self, rng, pieces: "list[_Piece]", length: int) -> "list[_Piece]":
        """The pieces with filler before, between and after them, `length` tokens in all."""
        free = length - sum(len(piece.ids) for piece in pieces)
        cuts = np.sort(rng.integers(free + 1, size=len(pieces)))
        gaps = np.diff(cuts, prepend=0, append=free)
        spread = self._filler(rng, gaps[0])
        for piece, gap in zip(pieces, gaps[1:], strict=True):
            spread += [piece, *self._filler(rng, gap)]
        return spread

    def _filler(self, rng, length: int | np.integer) -> "list[_Piece]":
        phrases = []
        while length:
            size = min(int(rng.integers(3, 9)), max(length // 2, 1))
            words = (self._word + rng.integers(len(_WORDS), size=size)).tolist()
            twice = [*words, *words][:length]
            phrases.append(_Piece(twice, answer=size + 1))
            length -= len(twice)
        return phrases

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence, without BOS."""
        names = string.ascii_lowercase[: self.pool]
        return render(
            ids,
            (
                *("", ""),
                *(f"[{mark}]" for mark in _MARKS),
                *(f"{name}=" for name in names),
                *_SYMBOLS,
                *(";", *_MARKS),
                *_WORDS,
            ),
        )

    def shown(self) -> Int[Tensor, " T"]:
        """A sequence with two names and one question."""
        few = {"names": 2, "retold": 1, "references": 1, "instructions": 2, "questions": 1}
        short = replace(self, length=87, **few)
        return short.sample(1, 0).input_ids[0]

    def evaluations(self) -> "dict[str, Recall]":
        """Questions of both kinds, dormant and recent ones alone, and sequences twice as long."""
        plain = replace(self, taught=False)
        return {
            "in-distribution": plain,
            "dormant": replace(plain, queries="dormant"),
            "recent": replace(plain, queries="recent"),
            "2x-length": replace(plain, length=2 * self.length),
        }

    def under_budgets(self) -> "dict[str, Recall]":
        """Sequences of this length, both kinds of questions alone as well."""
        return {name: x for name, x in self.evaluations().items() if x.length == self.length}

    def score(
        self, predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]
    ) -> dict[str, float]:
        """`answer_error`: answers with any wrong token, ";" included; `token_error`: tokens."""
        return {
            "answer_error": answer_error(predictions, labels),
            "token_error": token_error(predictions, labels),
        }


def answer_error(predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]) -> float:
    """The fraction of answers, runs of labels without a gap, with at least one wrong prediction.

    Arguments and errors are those of `sequence_error`.
    """
    wrong, mask = errors_and_mask(predictions, labels)
    starts = mask & ~torch.nn.functional.pad(mask, (1, -1))
    number = starts.flatten().cumsum(0)[mask.flatten()] - 1
    failed = torch.zeros(int(starts.sum()), dtype=torch.int64)
    return (failed.index_add_(0, number, wrong[mask].long()) > 0).double().mean().item()


def _shuffled(rng: np.random.Generator, items: Sequence | np.ndarray) -> list:
    return [items[i] for i in rng.permutation(len(items))]
