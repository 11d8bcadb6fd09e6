"""Needles for models from scratch: numbers of cities among words, queried at the end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from heedful.checks import check_whole
from heedful_lab.tasks.needles import CITIES
from heedful_lab.tasks.samples import (
    BOS,
    EOS,
    IGNORE,
    Recipe,
    Samples,
    Task,
    check_draw,
    render,
    token_error,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAGIC, _NUMBER, _OF, _IS, _STOP, _CITY = range(2, 8)  # after BOS and EOS
_VALUE = _CITY + len(CITIES)
_VALUES = 100
_WORD = _VALUE + _VALUES
_SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
_WORDS = tuple(
    f"{_SYLLABLES[11 * i % 70]}{_SYLLABLES[(13 * i + 9 * (i // 70)) % 70]}" for i in range(400)
)  # the most frequent ones do not begin alike
_NAMES = (
    "<bos>", "<unk>", "magic", "number", "of", "is", ".", *CITIES, *map(str, range(_VALUES)),
    *_WORDS,
)  # fmt: skip
_NEEDLE, _QUESTION = 7, 6  # tokens of a needle, and of a question with its answer


@dataclass(frozen=True)
class MagicNumbers(Task):
    """Multi-needle retrieval in words: numbers of cities among filler, all queried at the end.

    A sequence reads, after BOS (shortened):

        bade gora magic number of Oslo is 37 . bade seko magic number of Lima is 5 . kumi dabe
        magic number of Lima is 5 magic number of Oslo is 37

    A word, a city and a number are a token each. *Needles* stand at random places, each with a city
    and a number of its own; every city is queried once, in random order. *Filler* is drawn from
    400 words as often as words are in text (Zipf's law). Loss lies on the numbers in the answers.

    The token that an answer follows, "is", says nothing about which number is meant: that is one
    token back, and in the needle two before the number. A model has to gather both before it can
    compare. Whoever knows which numbers are in the sequence and not whose errs in 1 - 1 / `needles`
    of the answers.

    Arguments:
        length: tokens of a sequence.
        needles: how many there are, at most 40.

    Raises:
        ValueError: a field is out of range, or a sequence may not hold it all.

    Source: the multi-needle task of arXiv 2504.00927, section 4.4, for models that cannot read yet;
        words, numbers and sizes are ours.
    """

    length: int = 128
    needles: int = 4

    metric: ClassVar[str] = "answer_error"
    recipe: ClassVar[Recipe] = Recipe(
        64, 2, 4, 400, 32, 3e-3, ("standard", "mta"), mechanism_rate=8.0,
        changes={"mta": {"conv_every": 1}},
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_whole("needles", self.needles, 1, len(CITIES), way_out="each has a city of its own")
        least = 1 + self.needles * (_NEEDLE + _QUESTION)
        check_whole(
            "length",
            self.length,
            least,
            way_out=f"{self.needles} needles and their questions take so many",
        )

    @property
    def vocab_size(self) -> int:
        """BOS, EOS (unused), what sentences are made of, cities, numbers, filler words."""
        return len(_NAMES)

    def cut(self, length: int | None, tokenizer: str) -> "MagicNumbers":
        """Sequences of so many tokens; longer ones have more filler."""
        return self if length is None else replace(self, length=length)

    def sample(self, count: int, seed: int) -> Samples:
        """`count` sequences, the same for the same configuration, count and seed."""
        check_draw(count, seed)
        rng = np.random.default_rng(seed)
        ids = torch.from_numpy(np.stack([self._row(rng) for _ in range(count)]))
        labels = torch.full_like(ids, IGNORE)
        answers = slice(self.length - _QUESTION * self.needles + _QUESTION - 1, None, _QUESTION)
        labels[:, answers] = ids[:, answers]
        return Samples(ids, labels, torch.ones_like(ids))

    def _row(self, rng: np.random.Generator) -> np.ndarray:
        cities = _CITY + rng.permutation(len(CITIES))[: self.needles]
        values = _VALUE + rng.permutation(_VALUES)[: self.needles]
        needles = [
            [_MAGIC, _NUMBER, _OF, city, _IS, value, _STOP]
            for city, value in zip(cities, values, strict=True)
        ]
        filler = self._filler(rng, self.length - 1 - self.needles * (_NEEDLE + _QUESTION))
        places = np.sort(rng.integers(len(filler) + 1, size=self.needles))
        row, end = [BOS], 0
        for place, needle in zip(places, needles, strict=True):
            row += [*filler[end:place], *needle]
            end = place
        row += filler[end:].tolist()
        for index in rng.permutation(self.needles):
            row += needles[index][:_QUESTION]
        return np.array(row)

    def _filler(self, rng: np.random.Generator, length: int) -> np.ndarray:
        often = 1 / np.arange(1, len(_WORDS) + 1)
        return _WORD + rng.choice(len(_WORDS), size=length, p=often / often.sum())

    def decode(self, ids: Int[Tensor, " T"] | Sequence[int]) -> str:
        """The text of one sequence, without BOS."""
        return render(ids, ("", "", *(f"{name} " for name in _NAMES[2:])))

    def saved_tokenizer(self) -> "Tokenizer":
        """Words between spaces, behind BOS; one that the task does not know takes EOS's place."""
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        ids = {name: i for i, name in enumerate(_NAMES)}
        tokenizer = Tokenizer(models.WordLevel(ids, unk_token=_NAMES[EOS]))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{_NAMES[BOS]} $A", special_tokens=[(_NAMES[BOS], BOS)]
        )
        return tokenizer

    def special_tokens(self) -> dict[str, int]:
        """BOS, and what stands for a word that the task does not know."""
        return {"bos_token": BOS, "unk_token": EOS}

    def shown(self) -> Int[Tensor, " T"]:
        """A short sequence with two needles."""
        return replace(self, length=48, needles=2).sample(1, 0).input_ids[0]

    def evaluations(self) -> "dict[str, MagicNumbers]":
        """As many needles, and two, six and eight where they fit; also twice as long."""
        tasks = {"in-distribution": self}
        for needles in (2, 6, 8):
            if needles != self.needles and 1 + needles * (_NEEDLE + _QUESTION) <= self.length:
                tasks[f"{needles}-needles"] = replace(self, needles=needles)
        longer = {
            name.replace("in-distribution", "2x-length").replace("needles", "needles-2x-length"):
            replace(task, length=2 * self.length) for name, task in tasks.items()
        }  # fmt: skip
        return tasks | longer

    def score(
        self, predictions: Int[Tensor, "N T"], labels: Int[Tensor, "N T"]
    ) -> dict[str, float]:
        """`answer_error`: the share of queried numbers that are wrong."""
        return {"answer_error": token_error(predictions, labels)}
