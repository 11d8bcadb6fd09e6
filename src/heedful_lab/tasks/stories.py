"""Little stories with a question, of five kinds: who is where, what lies where, who gave what.

The kinds are those of the first five bAbI tasks (Weston et al., arXiv 1502.05698); people, places,
objects and the generator are ours. Stories in bAbI's own files can be read as well.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from heedful.checks import UserError

PEOPLE = ("Marta", "Pavel", "Ingrid", "Tomas", "Yusuf")
PLACES = ("attic", "bakery", "cellar", "harbour", "library", "meadow")
OBJECTS = ("lantern", "compass", "kettle", "violin")

_MOVES = ("went to", "walked to", "hurried to", "went back to")
_TAKES = ("took", "picked up", "grabbed")
_DROPS = ("put down", "left", "dropped")
_GIVES = ("gave", "handed", "passed")
_OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
_TRIES = 1000


class Story(NamedTuple):
    """Sentences in order, a question about their end, its one right answer, and who may be one."""

    sentences: tuple[str, ...]
    question: str
    answer: str
    labels: tuple[str, ...]


class _World:
    """State of people, places and objects, and every sentence about it."""

    def __init__(self, rng: np.random.Generator, people: int = 3, objects: int = 3) -> None:
        self.rng = rng
        self.people = _some(rng, PEOPLE, people)
        self.objects = _some(rng, OBJECTS, objects)
        self.sentences: list[str] = []
        self.place: dict[str, str] = {}  # of people
        self.holder: dict[str, str] = {}
        self.been: dict[str, list[str]] = {x: [] for x in self.objects}  # each place once in a row
        self.gifts: list[tuple[str, str, str]] = []  # who, what, to whom

    def choose(self, things):
        return things[int(self.rng.integers(len(things)))]

    def move(self) -> None:
        person = self.choose(self.people)
        self.place[person] = self.choose([x for x in PLACES if x != self.place.get(person)])
        self.sentences.append(f"{person} {self.choose(_MOVES)} the {self.place[person]}.")
        for thing, holder in self.holder.items():
            if holder == person:
                self._lies(thing, self.place[person])

    def take(self) -> None:
        """Somebody whose place is known takes what lies there or was never seen."""
        can = [
            (person, thing)
            for person, place in self.place.items()
            for thing in self.objects
            if thing not in self.holder and (self.been[thing] or [place])[-1] == place
        ]
        if can:
            person, thing = self.choose(can)
            self.holder[thing] = person
            self.sentences.append(f"{person} {self.choose(_TAKES)} the {thing} there.")
            self._lies(thing, self.place[person])

    def drop(self) -> None:
        if self.holder:
            thing = self.choose(sorted(self.holder))
            self.sentences.append(f"{self.holder.pop(thing)} {self.choose(_DROPS)} the {thing}.")

    def give(self) -> None:
        """Whoever has something gives it to anybody else, as if both stood together."""
        if self.holder:
            thing = self.choose(sorted(self.holder))
            giver = self.holder[thing]
            taker = self.choose([x for x in self.people if x != giver])
            self.holder[thing] = taker
            self.gifts.append((giver, thing, taker))
            self.sentences.append(f"{giver} {self.choose(_GIVES)} the {thing} to {taker}.")

    def _lies(self, thing: str, place: str) -> None:
        if self.been[thing][-1:] != [place]:
            self.been[thing].append(place)

    def live(self, events: int, turns: str) -> None:
        """So many things happen: m(ove), t(ake), d(rop), g(ive), as often as their letters."""
        do = {"m": self.move, "t": self.take, "d": self.drop, "g": self.give}
        for _ in range(_TRIES):
            if len(self.sentences) >= events:
                return
            do[self.choose(turns)]()


def _one_fact(rng: np.random.Generator) -> Story | None:
    world = _World(rng, people=4)
    world.live(int(rng.integers(4, 11)), "m")
    person = world.choose(sorted(world.place))
    return Story(tuple(world.sentences), f"Where is {person}?", world.place[person], PLACES)


def _two_facts(rng: np.random.Generator) -> Story | None:
    world = _World(rng)
    world.live(int(rng.integers(6, 15)), "mmttd")
    things = [thing for thing, been in world.been.items() if been]
    if not things:
        return None
    thing = world.choose(things)
    return Story(tuple(world.sentences), f"Where is the {thing}?", world.been[thing][-1], PLACES)


def _three_facts(rng: np.random.Generator) -> Story | None:
    world = _World(rng, people=2, objects=2)
    world.live(int(rng.integers(12, 25)), "mmmttd")
    can = [
        (thing, before, place)
        for thing, been in world.been.items()
        for before, place in pairwise(been)
        if been.count(place) == 1  # so that "before" means one time
    ]
    if not can:
        return None
    thing, before, place = world.choose(can)
    return Story(
        tuple(world.sentences), f"Where was the {thing} before the {place}?", before, PLACES
    )


def _two_relations(rng: np.random.Generator) -> Story | None:
    first, middle, last = _some(rng, PLACES, 3)
    facts = [
        (first, list(_OPPOSITE)[rng.integers(4)], middle),
        (last, list(_OPPOSITE)[rng.integers(4)], middle),
    ]
    if rng.integers(2):  # the place in the middle can stand first
        facts[1] = (middle, _OPPOSITE[facts[1][1]], last)
    relations = facts + [(b, _OPPOSITE[way], a) for a, way, b in facts]
    candidates = [(f"What is {way} of the {b}?", a) for a, way, b in relations]
    candidates += [(f"What is the {a} {way} of?", b) for a, way, b in relations]
    questions = [question for question, _ in candidates]
    can = [(question, answer) for question, answer in candidates if questions.count(question) == 1]
    if not can:
        return None
    question, answer = can[int(rng.integers(len(can)))]
    sentences = tuple(f"The {a} is {way} of the {b}." for a, way, b in facts)
    return Story(sentences, question, answer, PLACES)


def _three_arguments(rng: np.random.Generator) -> Story | None:
    world = _World(rng, people=4)
    world.live(int(rng.integers(6, 15)), "mttggg")
    if not world.gifts:
        return None
    newest: dict[str, str] = {}  # a later gift takes the place of an earlier one
    for giver, thing, taker in world.gifts:
        newest |= {
            f"What did {giver} give to {taker}?": thing,
            f"Who gave the {thing} to {taker}?": giver,
            f"Who did {giver} give the {thing} to?": taker,
            f"Who gave the {thing}?": giver,
            f"Who received the {thing}?": taker,
        }
    question = world.choose(sorted(newest))
    return Story(tuple(world.sentences), question, newest[question], (*PEOPLE, *OBJECTS))


KINDS: dict[int, Callable[[np.random.Generator], Story | None]] = {
    1: _one_fact, 2: _two_facts, 3: _three_facts, 4: _two_relations, 5: _three_arguments,
}  # fmt: skip
"""The five kinds of question, by their number in bAbI."""


def story(kind: int, rng: np.random.Generator) -> Story:
    """A story of this kind with its question."""
    for _ in range(_TRIES):
        if (tale := KINDS[kind](rng)) is not None:
            return tale
    raise AssertionError(f"no story of kind {kind} came in {_TRIES} tries")


def read_stories(path: str, kind: int) -> list[Story]:
    """The questions of a bAbI file, each with the sentences before it in its story.

    Arguments:
        path: the file, or a folder with `qa1_..._test.txt` and so on.
        kind: which of the five; in a folder it chooses the file.

    Raises:
        ValueError: there is no such file, or it is not of that form; names the line.
    """
    file = Path(path)
    if file.is_dir():
        files = sorted(file.glob(f"qa{kind}_*test.txt")) or sorted(file.glob(f"qa{kind}_*.txt"))
        if not files:
            raise UserError(f"babi {path!r} holds no qa{kind}_*.txt; name a folder of bAbI files")
        file = files[0]
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"babi {str(file)!r} cannot be read ({error}); name a bAbI file") from None
    stories: list[Story] = []
    sentences: list[str] = []
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"(\d+) ([^\t|]*?)\s*(?:[\t|]\s*([^\t|]*?)\s*(?:[\t|].*)?)?", line)
        if match is None:
            raise UserError(
                f"babi {str(file)!r}, line {number} is not of the form of bAbI: a number, then a "
                "sentence, or a question with a tabulator and its answer"
            )
        if int(match[1]) == 1:
            sentences = []
        if match[3] is None:
            sentences.append(match[2])
        else:
            stories.append(Story(tuple(sentences), match[2], match[3], ()))
    if not stories:
        raise UserError(f"babi {str(file)!r} holds no question; name a bAbI file")
    labels = tuple(sorted({x.answer for x in stories}))
    return [x._replace(labels=labels) for x in stories]


def _some(rng: np.random.Generator, things: tuple[str, ...], count: int) -> list[str]:
    return [things[i] for i in rng.permutation(len(things))[:count]]
