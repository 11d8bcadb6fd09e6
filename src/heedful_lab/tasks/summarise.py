"""Summaries: generated reports of which some facts belong into the summary, or given pairs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from heedful.checks import UserError, check_whole
from heedful_lab.tasks.pairs import TextPairTask, check_texts
from heedful_lab.tasks.samples import Recipe
from heedful_lab.tasks.vocabulary import words

if TYPE_CHECKING:
    from jaxtyping import Int
    from tokenizers import Tokenizer
    from torch import Tensor

_ENTITIES, _RELATIONS, _FILLERS = 24, 8, 40
_MARKS = ("notably", "reportedly", "formerly", "allegedly")
_NUMBERS = tuple(map(str, range(10, 100)))
_HEADING = 3  # tokens of a report's first sentence
_FACT = 5  # tokens of a fact in a report: mark, entity, relation, number, "."
_SUMMARY_FACT = 4  # tokens of a fact in a summary
_NOISE = (4, 9)  # least and most words of a sentence of noise, with its "."


class _Words(NamedTuple):
    entities: tuple[str, ...]
    relations: tuple[str, ...]
    fillers: tuple[str, ...]
    tokens: "Tokenizer"


@lru_cache(maxsize=1)
def _lexicon() -> _Words:
    """Words of three syllables; the same on every machine."""
    rng = np.random.default_rng(11)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    numbers = rng.permutation(len(syllables) ** 2)[: _ENTITIES + _RELATIONS + _FILLERS].tolist()
    stock = [
        syllables[n // len(syllables)] + syllables[n % len(syllables)] + syllables[n % 7]
        for n in numbers
    ]
    entities, rest = stock[:_ENTITIES], stock[_ENTITIES:]
    stems = ["heading", *_MARKS, ".", *stock, *_NUMBERS]
    return _Words(tuple(entities), tuple(rest[:_RELATIONS]), tuple(rest[_RELATIONS:]), words(stems))


@dataclass(frozen=True)
class Summarise(TextPairTask):
    """Summarise: long generated reports into the facts that matter, or given pairs.

    A generated report is a heading, facts and noise, in sentences:

        heading notably . fugelo tadira bugo . formerly sipabu lemipe 47 . notably nuko dasi 12 .

    A fact is a mark, an entity, a relation and a number; noise is other words. The heading names
    the mark of the facts that *matter* in this report: they are the summary, in their order and
    without the mark. Facts with other marks look the same, so the heading must be remembered, and
    no fact can be told from its own sentence alone.

    Generated summaries are judged by `fact_error`, which is one less F1 of the facts, summed over
    all reports; recorded are also `fact_recall`, `fact_precision` and `rouge_l`. Given pairs are
    judged by `rouge_l`, F1 of the longest common subsequence as `rouge-score` has it, the mean over
    sequences. Summaries are written by greedy decoding; `loss` is that of their tokens in nats.

    Arguments:
        facts: facts of a generated report; a small model learns few of them in a short report
            within minutes, and longer reports (thousands of tokens) hold more.
        salient: the most of them that matter; at least one does.
        length: the most tokens of a report; generated ones have three quarters of it at least.
        paths, target_length, tokenizer, vocab_size, part: see `TextPairTask`.

    Raises:
        ValueError: if a field is out of range, or a report may not hold its facts; at the first
            use, if the pairs cannot be read or one is too long.
    """

    facts: int = 5
    salient: int = 3

    recipe: ClassVar[Recipe] = Recipe(
        64, 3, 4, 4000, 32, 1e-3, ("standard", "selective"), held_out=64,
        changes={"grouped": {"size": 4, "window": 8}},
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_whole("facts", self.facts, 1, _ENTITIES * _RELATIONS)
        check_whole("salient", self.salient, 1, self.facts, way_out="they are among the facts")
        super().__post_init__()
        least = -(-4 * (_HEADING + self.facts * _FACT + 1) // 3)
        if not self.paths and self.length < least:
            raise UserError(
                f"length must be at least {least} for reports of {self.facts} facts, got "
                f"{self.length}; give fewer facts or longer reports"
            )

    def _lengths(self) -> tuple[int, int]:
        if not self.paths:
            return 64, self.salient * _SUMMARY_FACT + 1
        length = 1024 if self.length is None else self.length
        return length, max(2, length // 4)

    @property
    def _words(self) -> "Tokenizer":
        return _lexicon().tokens

    @property
    def metric(self) -> str:
        """`rouge_l` for given pairs; else `fact_error`."""
        return "rouge_l" if self.paths else "fact_error"

    @property
    def also(self) -> tuple[str, ...]:
        """Names of further metrics to record."""
        if self.paths:
            return ("loss",)
        return ("fact_recall", "fact_precision", "rouge_l", "loss")

    def cut(self, length: int | None, tokenizer: str) -> "Summarise":
        """Reports of so many tokens; given pairs in bytes or byte pairs."""
        target_length = self.target_length if not self.paths or length is None else None
        return replace(
            self,
            length=self.length if length is None else length,
            target_length=target_length,
            tokenizer=tokenizer if self.paths else "byte",
            vocab_size=None,
        )

    def _invented(self, rng: np.random.Generator) -> tuple[str, str]:
        lexicon = _lexicon()
        mark = int(rng.integers(len(_MARKS)))
        matter = set(rng.permutation(self.facts)[: rng.integers(1, self.salient + 1)].tolist())
        keys = rng.permutation(_ENTITIES * _RELATIONS)[: self.facts].tolist()
        facts, summary = [], []
        for i, key in enumerate(keys):
            entity, relation = divmod(key, _RELATIONS)
            fact = f"{lexicon.entities[entity]} {lexicon.relations[relation]}"
            fact = f"{fact} {_NUMBERS[rng.integers(len(_NUMBERS))]} ."
            other = (mark + rng.integers(1, len(_MARKS))) % len(_MARKS)
            facts.append(f"{_MARKS[mark if i in matter else other]} {fact}")
            summary += [fact] if i in matter else []
        most = self.length - 1
        room = int(rng.integers(3 * most // 4, most + 1)) - _HEADING - self.facts * _FACT
        noise = _noise(rng, lexicon, room)
        places = np.sort(rng.integers(len(noise) + 1, size=self.facts)).tolist()
        report = [f"heading {_MARKS[mark]} ."]
        for at in range(len(noise) + 1):
            while places and places[0] == at:
                report.append(facts[len(facts) - len(places)])
                places.pop(0)
            report += noise[at : at + 1]
        return " ".join(report), " ".join(summary)

    def score(self, texts: Sequence[str], labels: "Int[Tensor, 'N T']") -> dict[str, float]:
        """`rouge_l` from 0 to 1, and of generated reports what became of their facts."""
        references = self.references(labels)
        scores = {"rouge_l": rouge_l(texts, references)}
        return scores if self.paths else scores | fact_scores(texts, references)


def _noise(rng: np.random.Generator, lexicon: _Words, room: int) -> list[str]:
    """Sentences of any words, of so many tokens in all but for a rest too short for one."""
    sentences = []
    while room >= _NOISE[0]:
        size = min(int(rng.integers(_NOISE[0], _NOISE[1] + 1)), room)
        fillers = rng.integers(_FILLERS, size=size - 1).tolist()
        sentences.append(" ".join([*(lexicon.fillers[i] for i in fillers), "."]))
        room -= size
    return sentences


def facts_of(text: str) -> Counter:
    """The sentences of a summary, each as its words."""
    sentences = (tuple(sentence.split()) for sentence in text.split("."))
    return Counter(sentence for sentence in sentences if sentence)


def fact_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Recall, precision and one less F1 of the references' sentences, summed over all texts.

    A sentence that is not the reference's to the letter is a wrong fact, and one that is there
    twice is one too many. Precision is 0 where nothing was written.
    """
    check_texts(texts, references)
    pairs = [(facts_of(a), facts_of(b)) for a, b in zip(texts, references, strict=True)]
    hits = sum((predicted & expected).total() for predicted, expected in pairs)
    positives = sum(predicted.total() for predicted, _ in pairs)
    facts = sum(expected.total() for _, expected in pairs)
    return {
        "fact_error": 1 - 2 * hits / (positives + facts) if positives + facts else 1.0,
        "fact_recall": hits / facts if facts else 0.0,
        "fact_precision": hits / positives if positives else 0.0,
    }


def rouge_l(texts: Sequence[str], references: Sequence[str]) -> float:
    """ROUGE-L as `rouge-score` has it: F1 of the longest common subsequence, mean over texts."""
    from rouge_score.rouge_scorer import RougeScorer

    check_texts(texts, references)
    scorer = RougeScorer(["rougeL"])
    scores = [
        scorer.score(reference, text)["rougeL"].fmeasure
        for text, reference in zip(texts, references, strict=True)
    ]
    return sum(scores) / len(scores)
