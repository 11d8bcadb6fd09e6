"""Translation: a generated language pair with reordering, agreement and ambiguity, or given pairs.

Every generated sentence has exactly one translation, by the rules in `Translate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from heedful.checks import check_whole
from heedful_lab.tasks.pairs import TextPairTask, check_texts
from heedful_lab.tasks.samples import Recipe
from heedful_lab.tasks.vocabulary import words

if TYPE_CHECKING:
    from jaxtyping import Int
    from tokenizers import Tokenizer
    from torch import Tensor

_NOUNS, _HOMONYMS, _ADJECTIVES, _VERBS, _MIXED_VERBS, _ADVERBS = 20, 4, 10, 10, 4, 6
_DIGITS = "0123456789"
_PLURAL, _PAST = "n", "t"  # endings of the source language
_OBJECT, _BEFORE = "m", "sh"  # endings of the target language: object, past
_MANY = "l"  # its plural of nouns
_AGREEMENT = {(0, False): "k", (0, True): "ks", (1, False): "r", (1, True): "rs"}
_CLAUSE = (15, 24)  # most tokens of a clause with its conjunction: source, target


class _Noun(NamedTuple):
    """A noun of the source language with one meaning, or with one for each topic.

    stems: of the target language, by topic.
    classes: which endings agree with it there, by topic.
    living: whether it is alive, by topic.
    """

    word: str
    stems: tuple[str, str]
    classes: tuple[int, int]
    living: tuple[bool, bool]


class _Verb(NamedTuple):
    """A verb, with its stem for objects that are not alive and for those that are."""

    word: str
    stems: tuple[str, str]


class _Language(NamedTuple):
    """The words of both languages.

    adverbs: word, translation and topic of each.
    tens, digits: spelled-out numbers of the target language.
    """

    nouns: tuple[_Noun, ...]
    verbs: tuple[_Verb, ...]
    adjectives: tuple[tuple[str, str], ...]
    adverbs: tuple[tuple[str, str, int], ...]
    the: str
    conjunctions: tuple[tuple[str, str], tuple[str, str]]
    digits: tuple[str, ...]
    tens: tuple[str, ...]
    hundred: str
    plus: str
    tokens: "Tokenizer"


@lru_cache(maxsize=1)
def _language() -> _Language:
    """The language pair: the same on every machine, as only whole numbers are drawn for it."""
    rng = np.random.default_rng(7)

    def stems(consonants: str) -> list[str]:
        syllables = [c + v for c in consonants for v in "aeiou"]
        pairs = [a + b for a in syllables for b in syllables]
        return [pairs[i] for i in rng.permutation(len(pairs))]

    here, there = stems("bdfgk"), stems("jpvwz")
    used: tuple[list[str], list[str]] = ([], [])

    def word() -> str:
        used[0].append(here.pop())
        return used[0][-1]

    def stem() -> str:
        used[1].append(there.pop())
        return used[1][-1]

    nouns = []
    for i in range(_NOUNS + _HOMONYMS):
        name, root, sort, alive = word(), stem(), i % 2, i // 2 % 2 == 0
        other = (stem(), 1 - sort, not alive) if i >= _NOUNS else (root, sort, alive)
        nouns.append(_Noun(name, (root, other[0]), (sort, other[1]), (alive, other[2])))
    verbs = []
    for i in range(_VERBS + _MIXED_VERBS):
        name, root = word(), stem()
        verbs.append(_Verb(name, (root, stem() if i >= _VERBS else root)))
    language = _Language(
        tuple(nouns),
        tuple(verbs),
        tuple((word(), stem()) for _ in range(_ADJECTIVES)),
        tuple((word(), stem(), i % 2) for i in range(_ADVERBS)),
        word(),
        ((word(), stem()), (word(), stem())),
        tuple(stem() for _ in _DIGITS),
        tuple(stem() for _ in _DIGITS),
        stem(),
        stem(),
        None,
    )
    endings = [_PLURAL, _PAST, _OBJECT, _BEFORE, _MANY, *_AGREEMENT.values(), *_DIGITS]
    return language._replace(tokens=words([*used[0], *used[1], *_DIGITS], endings))


class _Phrase(NamedTuple):
    """A noun with what belongs to it: in words of the source, and what it is."""

    noun: _Noun
    adjective: tuple[str, str] | None
    number: int | None
    plural: bool

    def source(self, language: _Language) -> str:
        first = language.the if self.number is None else str(self.number)
        adjective = [] if self.adjective is None else [self.adjective[0]]
        return " ".join([first, *adjective, self.noun.word + _PLURAL * self.plural])

    def target(self, language: _Language, topic: int, ending: str) -> str:
        parts = [self.noun.stems[topic] + _MANY * self.plural + ending]
        if self.adjective is not None:
            parts.append(self.adjective[1] + _AGREEMENT[self.noun.classes[topic], self.plural])
        return " ".join(parts + ([] if self.number is None else spelled(self.number, language)))


def spelled(number: int, language: _Language) -> list[str]:
    """A number from 1 to 999 in the target language: hundreds, then units before tens."""
    hundreds, tens, units = number // 100, number // 10 % 10, number % 10
    parts = [language.digits[hundreds], language.hundred] if hundreds else []
    if units:
        parts.append(language.digits[units])
    if tens:
        parts += [*([language.plus] if units else []), language.tens[tens]]
    return parts


@dataclass(frozen=True)
class Translate(TextPairTask):
    """Translate: sentences of a generated language into another one, or given pairs.

    A source clause reads *subject verb object*; a noun phrase is a number in digits or an article,
    an adjective or none, and a noun with a plural ending where it is not one. The target clause
    reads *subject object verb*:

    * a noun comes first, then its adjective, then its number, spelled out with units before tens;
    * objects carry an ending; verbs and adjectives agree with class and number of their subject or
      noun, which the source does not show;
    * a sentence ends with an adverb, which the translation begins with. Some nouns have two
      meanings, of which the adverb's topic tells the right one, also for a noun far before it; some
      verbs have two, of which the object tells, as it is alive or not;
    * of two clauses that are joined by "because" the second is translated first.

    Generated translations are judged by `error`, sentences with any wrong word; given pairs by
    `bleu`, that of `sacrebleu` over all sequences. Both are written by greedy decoding, and `loss`
    is that of the targets' tokens in nats.

    Arguments:
        clauses: most clauses of a generated sentence, 1 to 16.
        paths, length, target_length, tokenizer, vocab_size, part: see `TextPairTask`.

    Raises:
        ValueError: if a field is out of range; at the first use, if the pairs cannot be read or one
            is too long.
    """

    clauses: int = 2

    recipe: ClassVar[Recipe] = Recipe(
        96, 2, 4, 1500, 32, 2e-3, ("standard", "selective"), held_out=128,
        changes={"grouped": {"size": 4, "window": 8}},
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_whole("clauses", self.clauses, 1, 16)
        super().__post_init__()

    def _lengths(self) -> tuple[int, int]:
        if self.paths:
            return (256 if self.length is None else self.length,) * 2
        return tuple(n * self.clauses + 2 for n in _CLAUSE)

    @property
    def _words(self) -> "Tokenizer":
        return _language().tokens

    @property
    def metric(self) -> str:
        """`bleu` for given pairs, whose sentences have many right translations; else `error`."""
        return "bleu" if self.paths else "error"

    @property
    def also(self) -> tuple[str, ...]:
        """The other of the two, and the loss."""
        return ("error" if self.paths else "bleu", "loss")

    def cut(self, length: int | None, tokenizer: str) -> "Translate":
        """Given pairs in sequences of so many tokens, of bytes or of byte pairs."""
        if not self.paths:
            return super().cut(length, tokenizer)
        rows = {"length": length, "target_length": length} if length is not None else {}
        return replace(self, tokenizer=tokenizer, vocab_size=None, **rows)

    def _invented(self, rng: np.random.Generator) -> tuple[str, str]:
        language = _language()
        adverb = language.adverbs[rng.integers(_ADVERBS)]
        clauses = [self._clause(rng, adverb[2]) for _ in range(rng.integers(1, self.clauses + 1))]
        source, target = clauses[0]
        for more, translated in clauses[1:]:
            because = bool(rng.integers(2))
            conjunction = language.conjunctions[because]
            source = f"{source} {conjunction[0]} {more}"
            first, second = (translated, target) if because else (target, translated)
            target = f"{first} {conjunction[1]} {second}"
        return f"{source} {adverb[0]}", f"{adverb[1]} {target}"

    def _clause(self, rng: np.random.Generator, topic: int) -> tuple[str, str]:
        language = _language()
        subject, thing = _phrase(rng, language), _phrase(rng, language)
        verb, past = language.verbs[rng.integers(len(language.verbs))], bool(rng.integers(2))
        ending = _AGREEMENT[subject.noun.classes[topic], subject.plural]
        source = [subject.source(language), verb.word + _PAST * past, thing.source(language)]
        target = [
            subject.target(language, topic, ""),
            thing.target(language, topic, _OBJECT),
            verb.stems[thing.noun.living[topic]] + _BEFORE * past + ending,
        ]
        return " ".join(source), " ".join(target)

    def evaluations(self) -> "dict[str, Translate]":
        """The evaluation part, and of generated sentences also those of twice as many clauses."""
        tasks = super().evaluations()
        if not self.paths and self.clauses <= 8:
            sizes = {"length": None, "target_length": None}
            tasks["2x-clauses"] = replace(self, clauses=2 * self.clauses, part="held-out", **sizes)
        return tasks

    def score(self, texts: Sequence[str], labels: "Int[Tensor, 'N T']") -> dict[str, float]:
        """`bleu` from 0 to 100, and `error`, sentences that are not the reference to the letter."""
        references = self.references(labels)
        return {"bleu": bleu(texts, references), "error": text_error(texts, references)}


def _phrase(rng: np.random.Generator, language: _Language) -> _Phrase:
    noun = language.nouns[rng.integers(len(language.nouns))]
    adjective = language.adjectives[rng.integers(_ADJECTIVES)] if rng.integers(2) else None
    number = int(rng.integers(1, 10 ** rng.integers(1, 4))) if rng.integers(3) == 0 else None
    plural = bool(rng.integers(2)) if number is None else number != 1
    return _Phrase(noun, adjective, number, plural)


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of a whole corpus from 0 to 100, with one reference each, as `sacrebleu` has it."""
    from sacrebleu.metrics import BLEU

    check_texts(texts, references)
    return BLEU().corpus_score(list(texts), [list(references)]).score


def text_error(texts: Sequence[str], references: Sequence[str]) -> float:
    """The fraction of texts that are not their reference to the letter."""
    check_texts(texts, references)
    return sum(a != b for a, b in zip(texts, references, strict=True)) / len(references)
