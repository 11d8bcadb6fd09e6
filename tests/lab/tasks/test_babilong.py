"""Stories: their answers derived anew, where they stand in long text, and the strict metric."""

import re

import numpy as np
import pytest

from heedful_lab.tasks.babilong import UNWANTED, BabiLong, only_label
from heedful_lab.tasks.background import Background
from heedful_lab.tasks.stories import OBJECTS, PEOPLE, PLACES, read_stories, story
from helpers import ROOT

PUBLIC = ROOT.parent / "shared" / "data"
TEXT = [f"Sentence {i} says nothing at all{' again' * (i % 7)}." for i in range(300)]
AGAINST = {"north": "south", "south": "north", "east": "west", "west": "east"}


def words(text: str) -> int:
    return len(text.split())


def track(lines: tuple[str, ...]) -> tuple[dict, dict]:
    """Where everybody is, and every place at which each thing was, from the words alone."""
    place_of, owners, visits = {}, {}, {}

    def note(thing):
        if visits.setdefault(thing, [])[-1:] != [place_of[owners[thing]]]:
            visits[thing].append(place_of[owners[thing]])

    for sentence in lines:
        words = sentence.rstrip(".").split()
        person, last = words[0], words[-1]
        if last in PLACES:
            place_of[person] = last
            for thing in [x for x, owner in owners.items() if owner == person]:
                note(thing)
        elif last == "there":
            owners[words[-2]] = person
            note(words[-2])
        else:
            assert owners.pop(last) == person
    return place_of, visits


def derived(kind: int, lines: tuple[str, ...], question: str) -> str:
    """The answer, found by other means than those of the generator."""
    words = question.rstrip("?").split()
    if kind in (1, 2, 3):
        where, been = track(lines)
        if kind == 1:
            return where[words[-1]]
        if kind == 2:
            return been[words[-1]][-1]
        thing, place = words[3], words[-1]
        (at,) = [i for i, x in enumerate(been[thing]) if x == place and i]
        return been[thing][at - 1]
    if kind == 4:
        facts = [re.fullmatch(r"The (\w+) is (\w+) of the (\w+)\.", x).groups() for x in lines]
        pairs = {(a, way, b) for a, way, b in facts} | {(b, AGAINST[way], a) for a, way, b in facts}
        if question.endswith("of?"):
            answers = {b for a, way, b in pairs if (a, way) == (words[3], words[4])}
        else:
            answers = {a for a, way, b in pairs if (way, b) == (words[2], words[-1])}
        (answer,) = answers
        return answer
    gift = re.compile(r"(\w+) (?:gave|handed|passed) the (\w+) to (\w+)\.")
    for giver, thing, taker in reversed([m.groups() for x in lines if (m := gift.fullmatch(x))]):
        for pattern, answer in (
            (f"What did {giver} give to {taker}?", thing),
            (f"Who gave the {thing} to {taker}?", giver),
            (f"Who did {giver} give the {thing} to?", taker),
            (f"Who gave the {thing}?", giver),
            (f"Who received the {thing}?", taker),
        ):
            if question == pattern:
                return answer
    raise AssertionError(question)


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
def test_answers_follow_from_the_words(kind):
    tales = [story(kind, np.random.default_rng(seed)) for seed in range(300)]
    for tale in tales:
        assert derived(kind, tale.sentences, tale.question) == tale.answer, tale
        assert tale.answer in tale.labels
        assert tale.answer.lower() not in tale.question.lower()
    answers = {tale.answer for tale in tales}
    assert answers == set(PLACES if kind < 5 else (*PEOPLE, *OBJECTS))
    assert tales[:3] == [story(kind, np.random.default_rng(seed)) for seed in range(3)]
    assert len({tale.sentences for tale in tales}) > 200


def test_no_label_is_part_of_another():
    for labels in (PLACES, (*PEOPLE, *OBJECTS)):
        lower = [x.lower() for x in labels]
        assert not any(a in b for a in lower for b in lower if a != b)


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
def test_a_story_stands_in_its_order_in_long_text(kind):
    background = Background(TEXT, words)
    bare = BabiLong(kind).sample(4, 0, None, words)
    for length in (500, 1500):
        questions = BabiLong(kind, length).sample(4, 0, background, words)
        for question, alone in zip(questions, bare, strict=True):
            assert (question.question, question.answers) == (alone.question, alone.answers)
            assert length - 12 < words(question.prompt) <= length
            lines = context(alone)
            assert [x for x in context(question) if not x.startswith("Sentence")] == lines
            assert question.prompt.endswith(f"Question: {question.question}\nAnswer:")
    assert questions == BabiLong(kind, 1500).sample(4, 0, background, words)
    assert questions[:2] == BabiLong(kind, 1500).sample(2, 0, background, words)


def test_facts_are_spread_over_the_whole_text():
    background = Background(TEXT, words)
    at = []
    for question in BabiLong(1, 2000).sample(40, 0, background, words):
        sentences = context(question)
        at += [i / len(sentences) for i, x in enumerate(sentences) if not x.startswith("Sentence")]
    assert len(at) > 150
    shares = np.histogram(at, bins=4, range=(0, 1))[0] / len(at)
    assert (abs(shares - 0.25) < 0.1).all(), shares


def context(question) -> list[str]:
    text = question.prompt.split("<context>\n")[-1].split("\n</context>")[0]
    return re.split(r"(?<=\.) ", text)


def test_what_is_too_short_is_refused():
    with pytest.raises(ValueError, match="length 40 is too short for a question that has"):
        BabiLong(1, 40).sample(1, 0, Background(TEXT, words), words)
    with pytest.raises(ValueError, match="kind must be a whole number from 1 to 5, got 6"):
        BabiLong(6)
    assert any(x == "the lantern" for x in UNWANTED) and "Marta " in UNWANTED


@pytest.mark.parametrize(
    ("reply", "question", "right"),
    [
        # As the published `compare_answers` says of each, with its six places.
        ("kitchen", "Where is Mary?", True),
        (" She is in the KITCHEN. Then the garden.", "Where is Mary?", True),
        ("kitchen or garden", "Where is Mary?", False),
        ("garden", "Where is Mary?", False),
        ("", "Where is Mary?", False),
        ("I do not know", "Where is Mary?", False),
        ("the garden, before it the kitchen", "Where was the milk before the garden?", True),
        ("kitchens", "Where is Mary?", True),
        ("kitchen <context> garden", "Where is Mary?", True),
        ("kitchen <example> garden", "Where is Mary?", True),
        ("kitchen\nQuestion: garden", "Where is Mary?", False),
        ("kitchen", "What is north of the kitchen?", False),
    ],
)
def test_the_strict_metric(reply, question, right):
    places = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
    assert only_label(reply, "kitchen", question, places) is right


FILE = """1 Mary went to the kitchen.
2 Where is Mary? \tkitchen\t1
3 Mary left the milk.
4 Where is the milk? |kitchen|1 3
1 John went to the garden.
2 Where is John? \tgarden\t1
"""


def test_stories_are_read_from_files(tmp_path):
    (tmp_path / "qa1_facts_test.txt").write_text(FILE)
    tales = read_stories(str(tmp_path), 1)
    assert [(x.sentences, x.question, x.answer) for x in tales] == [
        (("Mary went to the kitchen.",), "Where is Mary?", "kitchen"),
        (("Mary went to the kitchen.", "Mary left the milk."), "Where is the milk?", "kitchen"),
        (("John went to the garden.",), "Where is John?", "garden"),
    ]
    assert {x.labels for x in tales} == {("garden", "kitchen")}
    assert read_stories(str(tmp_path / "qa1_facts_test.txt"), 3) == tales
    questions = BabiLong(1).sample(9, 0, None, words, tales)
    assert {x.answers for x in questions} == {("kitchen",), ("garden",)} and len(questions) == 3
    with pytest.raises(ValueError, match="length 40 is too short for every story of kind 1"):
        BabiLong(1, 40).sample(9, 0, Background(TEXT, words), words, tales)
    with pytest.raises(ValueError, match=r"holds no qa2_\*\.txt"):
        read_stories(str(tmp_path), 2)
    (tmp_path / "qa2_bad.txt").write_text("1 Mary went.\nno number\n")
    with pytest.raises(ValueError, match="line 2 is not of the form of bAbI"):
        read_stories(str(tmp_path), 2)
    (tmp_path / "qa2_bad.txt").write_text("1 Mary went.\n")
    with pytest.raises(ValueError, match="holds no question"):
        read_stories(str(tmp_path), 2)
    with pytest.raises(ValueError, match="cannot be read"):
        read_stories(str(tmp_path / "gone.txt"), 2)


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 5])
def test_the_published_stories(kind):
    """All thousand questions are read, and one has the answer that follows from its words."""
    if not PUBLIC.is_dir():
        pytest.skip("needs the public text folder shared/data beside the checkout")
    tales = read_stories(str(PUBLIC / "babi"), kind)
    assert len(tales) == 1000
    places = {"bathroom", "bedroom", "garden", "hallway", "kitchen", "office"}
    things = {"Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"}
    assert set(tales[0].labels) == (things if kind == 5 else places)
    if kind == 1:
        for tale in tales:
            person = tale.question.removeprefix("Where is ").rstrip("?")
            last = [x for x in tale.sentences if x.startswith(f"{person} ")][-1]
            assert last.endswith(f" {tale.answer}.")
    if kind == 4:
        assert all(derived(4, tale.sentences, tale.question) == tale.answer for tale in tales)
    background = Background(TEXT, words)
    for question in BabiLong(kind, 2000).sample(5, 0, background, words, tales):
        assert 2000 - 12 < words(question.prompt) <= 2000
        right = question.answers[0]
        assert only_label(right, right, question.question, question.labels)
