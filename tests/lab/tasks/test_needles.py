"""Needles: where they stand, how long a prompt is, and what counts as right."""

import re
from itertools import accumulate

import pytest

from heedful_lab.tasks.background import Background, background_sentences, sentences
from heedful_lab.tasks.needles import CITIES, Needles, all_found

TEXT = [f"Sentence {chr(97 + i % 26)}{'x' * (i % 7)} says nothing at all." for i in range(300)]


def words(text: str) -> int:
    return len(text.split())


def bytes_of(text: str) -> int:
    return len(text.encode())


def taken_apart(question) -> tuple[list[str], dict[str, str]]:
    """The sentences of a prompt's text, and the numbers of its cities."""
    text = question.prompt.split("\n\n")[0]
    facts = re.findall(r"The magic number of (\w+) is (\d+)\.", text)
    assert len(dict(facts)) == len(facts)
    return sentences(text), dict(facts)


@pytest.mark.parametrize("count", [words, bytes_of])
@pytest.mark.parametrize("depth", [0, 0.25, 0.5, 0.75, 1])
def test_the_requested_needle_is_at_its_depth(count, depth):
    background = Background(TEXT, count)
    for question in Needles(3000, needles=6, depth=depth).sample(8, 0, background, count):
        text, numbers = taken_apart(question)
        assert len(numbers) == 6 and set(numbers) <= set(CITIES)
        (city,) = re.findall(r"is the magic number of (\w+)\?", question.question)
        assert question.answers == (numbers[city],)
        plain = [x for x in text if "magic" not in x]
        sizes = [count(" " + x) for x in plain]
        at = next(i for i, x in enumerate(text) if city in x)
        before = sum(count(" " + x) for x in text[:at] if "magic" not in x)
        gaps = [0, *accumulate(sizes)]
        nearest = min(abs(gap - depth * sum(sizes)) for gap in gaps)
        assert abs(before - depth * sum(sizes)) == nearest


def test_prompts_have_the_requested_length_up_to_a_sentence():
    background = Background(TEXT, bytes_of)
    longest = max(bytes_of(" " + x) for x in TEXT)
    for length in (600, 1000, 5000, 40_000):  # the last is longer than the text: it begins anew
        for question in Needles(length, needles=2).sample(3, 0, background, bytes_of):
            assert length - longest < bytes_of(question.prompt) <= length


def test_tokens_that_grow_where_sentences_meet_still_fit():
    def awkward(text: str) -> int:
        return words(text) + text.count(". ") * 2

    background = Background(TEXT, awkward)
    for question in Needles(400, needles=3).sample(5, 0, background, awkward):
        assert awkward(question.prompt) <= 400


def test_samples_come_from_the_seed_alone():
    background = Background(TEXT, words)
    task = Needles(500, needles=4, queries=2, depth=0.25)
    first = task.sample(6, 0, background, words)
    assert first == task.sample(6, 0, background, words)
    assert first[:3] == task.sample(3, 0, background, words)
    other = task.sample(6, 1, background, words)
    assert {x.prompt for x in first}.isdisjoint(x.prompt for x in other)
    assert len({x.prompt for x in first}) == len({x.key for x in first}) == 6


def test_several_cities_are_answered_in_the_order_of_the_question():
    background = Background(TEXT, words)
    orders = set()
    for question in Needles(500, needles=4, queries=3, depth=0).sample(20, 0, background, words):
        text, numbers = taken_apart(question)
        cities = re.findall(r"[A-Z]\w+", question.question.removeprefix("What are"))
        assert question.answers == tuple(numbers[city] for city in cities)
        assert question.prompt.endswith(f"{cities[0]}, {cities[1]} and {cities[2]} are")
        first = re.findall(r"of (\w+) is", text[0])[0]
        orders.add(cities.index(first))  # that at the depth is among them, in any place
    assert orders == {0, 1, 2}


def test_right_is_the_exact_number_first():
    assert all_found(" 123.", ("123",)) and all_found("123 and 45", ("123",))
    assert all_found("1 and 2.", ("1", "2")) and all_found("1, 2, 3", ("1", "2"))
    assert all_found("\n the number is 7", ("7",))
    for reply in ("", "12", "1234", "no: 9, 123", "\n\n", "number\n123"):
        assert not all_found(reply, ("123",)), reply
    assert not all_found("2 and 1", ("1", "2")) and not all_found("1", ("1", "2"))


def test_what_does_not_fit_is_refused():
    background = Background(TEXT, words)
    with pytest.raises(ValueError, match="length 20 is too short for a question that has"):
        Needles(20, needles=4).sample(1, 0, background, words)
    with pytest.raises(ValueError, match="room for at least 5 sentences between needles"):
        Needles(80, needles=6).sample(1, 0, background, words)
    for options in ({"needles": 0}, {"needles": 41}, {"queries": 2}, {"depth": 1.1}, {"digits": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Needles(1000, **options)


def test_sentences_too_long_to_part_the_needles_are_passed_over():
    """Ten of eleven sentences leave too few gaps; all questions begin at one that leaves enough."""
    long = " ".join(["Nothing", *["more"] * 38, "here."])
    mixed = [x for i in range(60) for x in ([long] * 20 if i % 6 else [f"Line {i} is short."] * 10)]
    background = Background(mixed, words)
    room = Needles(80, needles=4)
    for question in room.sample(40, 0, background, words):
        text, numbers = taken_apart(question)
        assert len(numbers) == 4 and words(question.prompt) <= 80
        assert len(text) >= 4 + 3
    with pytest.raises(ValueError, match="room for at least 3 sentences between needles, got 0"):
        room.sample(1, 0, Background([long] * 5, words), words)


def test_a_haystack_is_sentences_of_any_text(tmp_path):
    (tmp_path / "a.txt").write_text("One fact.\nTwo\nlines! The magic number of Oslo?\n\n- 12 -\n")
    assert background_sentences((str(tmp_path),), 100) == [
        "One fact.", "Two lines!", "The magic number of Oslo?",
    ]  # fmt: skip
    assert len(background_sentences((str(tmp_path),), 100, without=("Magic number",))) == 2
    assert sentences(" ".join(["word"] * 90)) == [" ".join(["word"] * n) for n in (40, 40, 10)]
    (tmp_path / "a.txt").write_text("12 34 --- 5\n")
    with pytest.raises(ValueError, match="holds no sentence of words"):
        background_sentences((str(tmp_path),), 100)
    with pytest.raises(ValueError, match="does not exist"):
        background_sentences(("nowhere.txt",), 100)


def test_every_machine_has_a_haystack():
    haystack = background_sentences((), 4096, without=("magic number",))
    assert sum(map(bytes_of, haystack)) > 4 * 4096
    assert not any("magic number" in x.lower() for x in haystack)
    assert sum(x.count("self.") for x in haystack) < len(haystack) / 20  # prose, not code
