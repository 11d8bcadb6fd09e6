"""Several facts in a long text, some of which are queried."""

import re
from dataclasses import dataclass
from functools import partial

from heedful.checks import UserError, check_whole
from heedful_lab.tasks.background import Background, Count, Question, at_most, draws, places

CITIES = (
    "Accra", "Amman", "Athens", "Bergen", "Bogota", "Busan", "Cairo", "Calgary", "Chennai", "Cusco",
    "Dakar", "Dublin", "Geneva", "Hanoi", "Havana", "Helsinki", "Jakarta", "Kampala", "Kyoto",
    "Lagos", "Lahore", "Lima", "Lisbon", "Lusaka", "Madrid", "Manila", "Nairobi", "Naples", "Oslo",
    "Prague", "Quito", "Riga", "Santiago", "Seoul", "Tbilisi", "Tirana", "Tunis", "Vienna",
    "Warsaw", "Zagreb",
)  # fmt: skip
UNWANTED = ("magic number", *CITIES)
"""Words that no sentence of the background may contain."""


@dataclass(frozen=True)
class Needles:
    """Multi-needle retrieval: numbers of cities in a long text, and the question for some of them.

    "The magic number of Oslo is 4805236." stands between sentences of a background, `needles` times
    with different cities and numbers. The first queried city stands at `depth`, the nearest gap
    between sentences to that share of the background's tokens, the others at random gaps. A prompt
    ends with the beginning of its answer, so that models without instruction tuning can go on.

    Arguments:
        length: tokens of a prompt at most; it is less by at most a sentence.
        needles: how many there are.
        depth: from 0, before the first sentence, to 1, behind the last.
        queries: how many cities the question names.
        digits: of a number.

    Raises:
        ValueError: a field is out of range.

    Source: arXiv 2504.00927, section 4.4, which gives no haystack, prompt or count of cities; these
        are ours, and the places those of arXiv 2410.05258, section 3.4.
    """

    length: int
    needles: int = 1
    depth: float = 0.5
    queries: int = 1
    digits: int = 7

    def __post_init__(self) -> None:
        check_whole("length", self.length, 1)
        check_whole("needles", self.needles, 1, len(CITIES), way_out="each has a city of its own")
        check_whole("queries", self.queries, 1, self.needles, way_out="only needles can be queried")
        check_whole("digits", self.digits, 1, 18)
        if not 0 <= self.depth <= 1:
            raise UserError(f"depth must lie between 0 and 1, got {self.depth!r}")
        if 9 * 10 ** (self.digits - 1) < self.needles:
            raise UserError(f"digits={self.digits} is too few for {self.needles} numbers")

    def sample(
        self, count: int, seed: int, background: Background, tokens: Count
    ) -> list[Question]:
        """`count` questions, the same for the same configuration, seed, background and tokens.

        Raises:
            ValueError: the needles do not fit into `length`.
        """
        cell = {"needles": self.needles, "length": self.length, "depth": self.depth}
        return [
            self._question(number, seed, background, tokens, dict(cell)) for number in range(count)
        ]

    def _question(self, number, seed, background, tokens, cell) -> Question:
        name = f"n={self.needles} r={self.queries} length={self.length} depth={self.depth:g}"
        rng = draws(seed, "needles", name, self.digits, number)
        cities = [CITIES[i] for i in rng.permutation(len(CITIES))[: self.needles]]
        numbers: list[str] = []
        while len(numbers) < self.needles:
            digits = str(rng.integers(10 ** (self.digits - 1), 10**self.digits))
            numbers += [digits] * (digits not in numbers)
        start = int(rng.integers(len(background.sentences)))
        shares = [self.depth, *rng.random(self.needles - 1).tolist()]
        queries = [int(i) for i in rng.permutation(self.queries)]
        ending = _ending([cities[i] for i in queries])
        facts = [
            f"The magic number of {city} is {value}."
            for city, value in zip(cities, numbers, strict=True)
        ]

        def make(start: int, room: int) -> tuple[str, int]:
            text, sizes = background.cut(start, room)
            if len(text) + 1 < self.needles:  # too short; the whole tells by how much
                return " ".join([*facts, *text]) + ending, len(text)
            at = dict(zip(places(sizes, shares), facts, strict=True))
            parts = [
                part
                for gap in range(len(text) + 1)
                for part in (at.get(gap), *text[gap : gap + 1])
                if part is not None
            ]
            return " ".join(parts) + ending, len(text)

        # Where long sentences leave too few gaps, the next ones of the text may leave enough.
        for begin in range(start, start + len(background.sentences)):
            prompt, count = at_most(self.length, tokens, partial(make, begin))
            if count + 1 >= self.needles:
                break
        else:
            places([1] * count, shares)  # raises
        question = ending.split("\n")[2].removeprefix("Question: ")
        return Question(
            f"{name} {number}", cell, prompt, tuple(numbers[i] for i in queries), question
        )


def _ending(cities: list[str]) -> str:
    if len(cities) == 1:
        return (
            f"\n\nQuestion: What is the magic number of {cities[0]}?\n"
            f"Answer: The magic number of {cities[0]} is"
        )
    places = f"{', '.join(cities[:-1])} and {cities[-1]}"
    return (
        f"\n\nQuestion: What are the magic numbers of {places}?\n"
        f"Answer: The magic numbers of {places} are"
    )


def all_found(reply: str, answers: tuple[str, ...]) -> bool:
    """Test whether the first numbers in a reply's first line are exactly the answers, in order."""
    lines = reply.strip().splitlines() or [""]
    return tuple(re.findall(r"\d+", lines[0])[: len(answers)]) == tuple(answers)
