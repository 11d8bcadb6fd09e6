"""Generated facts: the answers stand in the text, and nowhere is there a question without one."""

import re

from heedful_lab.tasks.background import Background
from heedful_lab.tasks.facts import FACTS, MOST_FACTS, WORDS, fact_texts
from heedful_lab.tasks.needles import CITIES

SENTENCES = [f"Sentence {i} of a quiet text says nothing." for i in range(60)]


def count(text: str) -> int:
    return len(text.split())


def spell(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{x['role']}>{x['content']}<end>" for x in messages)


def texts(number: int, chat=spell, length: int = 400, seed: int = 0):
    documents = fact_texts(Background(SENTENCES, count), length, seed, count, chat)
    return [next(documents) for _ in range(number)]


def test_answers_are_at_their_places_and_follow_from_the_text():
    documents = texts(60)
    assert all(count(x.text) <= 400 for x in documents)
    for x in documents:
        assert 1 <= len(x.answers) <= MOST_FACTS
        before = x.text[: x.answers[0][0]]
        for start, stop in x.answers:
            values = re.findall(r"\d+|[A-Z][a-z]+", x.text[start:stop])
            vocabulary = {word for words in WORDS.values() for word in words}
            assert all(v in before for v in values if v.isdigit() or v in vocabulary)


def test_half_of_the_texts_are_conversations_where_there_is_a_template():
    share = sum(x.text.startswith("<user>") for x in texts(200)) / 200
    assert 0.4 < share < 0.6
    assert not any("<user>" in x.text for x in texts(20, chat=None))
    for x in texts(200):
        if x.text.startswith("<user>"):
            assert x.text.count("<assistant>") == len(x.answers)
            assert all(x.text[stop : stop + 5] == "<end>" for _, stop in x.answers)


def test_a_seed_gives_the_same_texts_and_another_one_others():
    assert texts(3) == texts(3) != texts(3, seed=1)


def test_nothing_of_the_evaluation_is_trained_on():
    templates = " ".join(str(fact) for fact in FACTS).lower()
    assert "magic number" not in templates
    assert not set(CITIES) & set(WORDS["town"])
