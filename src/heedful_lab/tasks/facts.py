"""Text with facts in it and questions behind it, to train what a small cache must not forget."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from heedful.checks import check_whole
from heedful_lab.tasks.background import Background, at_most, draws, places

MOST_FACTS = 12
Spans = list[tuple[int, int]]
"""From which character to which, in order."""


class Fact(NamedTuple):
    """A fact in its text, with questions and their answers.

    statements: ways to state it, one of which is drawn.
    questions: with the answer to each.
    """

    statements: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


FACTS = (
    Fact(
        (
            "The key of the {place} hangs on hook {number}.",
            "Whoever needs the key of the {place} finds it on hook {number}.",
        ),
        (("Where does the key of the {place} hang?", "It hangs on hook {number}."),),
    ),
    Fact(
        ("{name} can be called under {digits}.", "{name}'s telephone has the number {digits}."),
        (("Under which number can {name} be called?", "{name} can be called under {digits}."),),
    ),
    Fact(
        (
            "The door of the {place} opens to the word {word}.",
            "Say {word} and the door of the {place} opens.",
        ),
        (("Which word opens the door of the {place}?", "It opens to the word {word}."),),
    ),
    Fact(
        (
            "{name} was born in {town} in the year {year}.",
            "In {year}, {name} came into the world, in the town of {town}.",
        ),
        (
            ("Where was {name} born?", "{name} was born in {town}."),
            ("In which year was {name} born?", "{name} was born in {year}."),
        ),
    ),
    Fact(
        ("{name} hid a {colour} {thing} in the {place}.",),
        (
            ("What did {name} hide in the {place}?", "A {colour} {thing}."),
            ("Where did {name} hide the {thing}?", "In the {place}."),
            ("Who hid a {colour} {thing}?", "{name} did."),
        ),
    ),
    Fact(
        (
            "For the {colour} {thing}, the merchant wanted {number} crowns.",
            "The {colour} {thing} costs {number} crowns.",
        ),
        (("How many crowns does the {colour} {thing} cost?", "It costs {number} crowns."),),
    ),
    Fact(
        ("{key}: {digits}", "{key} = {digits}", 'The entry "{key}" holds {digits}.'),
        (("What does the entry {key} hold?", "{key}: {digits}"),),
    ),
    Fact(
        (
            "The coach to {town} leaves on {day} at {hour} o'clock.",
            "On {day} at {hour} o'clock there is a coach to {town}.",
        ),
        (
            ("On which day does the coach to {town} leave?", "It leaves on {day}."),
            ("At what time does the coach to {town} leave?", "At {hour} o'clock."),
        ),
    ),
    Fact(
        ("{name} works as a {trade} in {town}.", "In {town}, {name} is known as a {trade}."),
        (
            ("What is {name}'s trade?", "{name} is a {trade}."),
            ("In which town does {name} work?", "{name} works in {town}."),
            ("Who is a {trade}?", "{name} is a {trade}."),
        ),
    ),
    Fact(
        (
            "Please note: the answer to the riddle of {town} is {word}.",
            "They say that the riddle of {town} has one answer, {word}.",
        ),
        (("What is the answer to the riddle of {town}?", "The answer is {word}."),),
    ),
)
WORDS = {
    "name": (
        "Adela", "Bruno", "Clarissa", "Dimitri", "Edmund", "Fatima", "Gustav", "Henrietta", "Ignaz",
        "Jolanda", "Kasimir", "Leonora", "Matthias", "Nadia", "Oswald", "Philippa", "Quentin",
        "Rosalind", "Stefan", "Theodora", "Ursula", "Valentin", "Winifred", "Xaver", "Yolanda",
    ),
    "place": (
        "old mill", "north tower", "boathouse", "library", "wine cellar", "chapel", "greenhouse",
        "attic", "stable", "lighthouse", "bakery", "town hall", "observatory", "school", "harbour",
    ),
    "town": (
        "Aarhus", "Bremen", "Cordoba", "Delft", "Esztergom", "Ferrara", "Ghent", "Halifax", "Izmir",
        "Jena", "Kilkenny", "Lucca", "Malmo", "Nancy", "Orvieto", "Perth", "Rouen", "Salzburg",
        "Tartu", "Uppsala", "Verona", "Worms", "York", "Zadar",
    ),
    "thing": (
        "lantern", "violin", "compass", "kettle", "mirror", "saddle", "clock", "basket",
        "blanket", "telescope", "necklace", "hammer", "ladder", "teapot", "trunk", "umbrella",
        "vase", "whistle",
    ),
    "colour": ("red", "green", "blue", "yellow", "white", "black", "brown", "silver", "purple"),
    "word": (
        "thistle", "marble", "cinnamon", "falcon", "velvet", "ember", "juniper", "quartz", "ripple",
        "saffron", "thunder", "walnut", "meadow", "anchor", "pebble", "lilac", "copper", "harvest",
    ),
    "trade": (
        "baker", "weaver", "surgeon", "notary", "gardener", "printer", "glazier", "tailor", "pilot",
        "cooper", "piper", "painter", "miller", "joiner", "tanner", "jeweller",
    ),
    "day": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
}  # fmt: skip
INSTRUCTIONS = (
    "Read the text and answer the question.",
    "Use the text to answer.",
    "Answer from the passage alone.",
    "Here is a text. A question about it follows.",
)


class FactText(NamedTuple):
    """A text, and where in it the answers stand.

    text: the whole; for a chat, as its template spells it.
    answers: the characters that a model has to predict.
    """

    text: str
    answers: Spans


Chat = Callable[[list[dict[str, str]]], str]
"""Messages as a model's chat template spells them."""


def fact_texts(
    background: Background, length: int, seed: int, count: Callable[[str], int], chat: Chat | None
) -> Iterator[FactText]:
    """Texts without end: sentences of a background, facts among them, and questions for some.

    One to twelve facts of ten kinds, as many as a third of the text has room for with their
    questions, stand at random gaps, each in one of its ways. One to twelve questions follow,
    in any order; half of the texts, where there is a chat template, are conversations, with the
    first question before or behind the text. Names, places and numbers are drawn anew for each
    text, so that nothing but the text tells the answers.

    Arguments:
        background: sentences, with their tokens.
        length: tokens of a text at most.
        seed: of all that is drawn.
        count: tokens of a text.
        chat: spells a conversation; `None` for texts alone.

    Raises:
        ValueError: the length has no room for facts and questions.
    """
    check_whole("length", length, 256)
    number = 0
    while True:
        yield _fact_text(background, length, draws(seed, "facts", number), count, chat)
        number += 1


def _fact_text(background, length, rng, count, chat) -> FactText:
    words = _shuffled_words(rng)
    facts, size = [_filled(rng, words)], 0
    for _ in range(int(rng.integers(MOST_FACTS))):
        statement, pairs = _filled(rng, words)
        size += count(" ".join([statement, *(f"Question: {q} Answer: {a}" for q, a in pairs)]))
        if size > length // 3:
            break
        facts.append((statement, pairs))
    pairs = [pair for _, pairs in facts for pair in pairs]
    pairs = [pairs[i] for i in rng.permutation(len(pairs))[: int(rng.integers(1, 13))]]
    start = int(rng.integers(len(background.sentences)))
    shares = rng.random(len(facts)).tolist()
    instruction = INSTRUCTIONS[int(rng.integers(len(INSTRUCTIONS)))]
    style = ("text", "text", "question first", "question last")[int(rng.integers(4))]

    def make(room: int) -> tuple[str, Spans]:
        sentences, sizes = background.cut(start, room)
        gap = len(shares) - 1 - len(sentences)  # long sentences leave few gaps
        sentences, sizes = [*sentences, *[""] * gap], [*sizes, *[1] * gap]
        at = dict(zip(places(sizes, shares), (statement for statement, _ in facts), strict=True))
        parts = [
            part
            for gap in range(len(sentences) + 1)
            for part in (at.get(gap), *sentences[gap : gap + 1])
            if part
        ]
        text = " ".join(parts)
        if chat is None or style == "text":
            return _plain(text, pairs)
        question = pairs[0][0]
        if style == "question first":
            return _conversation(f"{instruction} {question}\n\n{text}", pairs, chat)
        return _conversation(f"{instruction}\n\n{text}\n\n{question}", pairs, chat)

    return FactText(*at_most(length, count, make))


def _shuffled_words(rng: np.random.Generator) -> dict[str, list[str]]:
    """Each kind's words in an order of their own, so that none stands for two things."""
    return {kind: [words[i] for i in rng.permutation(len(words))] for kind, words in WORDS.items()}


def _filled(
    rng: np.random.Generator, words: dict[str, list[str]]
) -> tuple[str, list[tuple[str, str]]]:
    """A statement with its questions and answers, its words taken from those that are left."""
    fact = FACTS[int(rng.integers(len(FACTS)))]
    fields = {
        kind: candidates.pop() if len(candidates) > 1 else candidates[0]
        for kind, candidates in words.items()
    }
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    fields |= {
        "number": str(rng.integers(2, 990)),
        "digits": str(rng.integers(10**3, 10 ** int(rng.integers(4, 10)))),
        "year": str(rng.integers(1200, 2000)),
        "hour": str(rng.integers(1, 13)),
        "key": "".join(letters[i] for i in rng.integers(len(letters), size=3))
        + str(rng.integers(10, 99)),
    }
    statement = fact.statements[int(rng.integers(len(fact.statements)))]
    pairs = [(q.format(**fields), a.format(**fields)) for q, a in fact.questions]
    return statement.format(**fields), pairs


def _plain(text: str, pairs: Sequence[tuple[str, str]]) -> tuple[str, Spans]:
    spans: Spans = []
    for question, answer in pairs:
        text += f"\n\nQuestion: {question}\nAnswer:"
        spans.append((len(text), len(text) + 1 + len(answer)))
        text += f" {answer}"
    return text, spans


def _conversation(
    beginning: str, pairs: Sequence[tuple[str, str]], chat: Chat
) -> tuple[str, Spans]:
    messages = [{"role": "user", "content": beginning}]
    for number, (question, answer) in enumerate(pairs):
        if number:
            messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    spelled = chat(messages)
    spans, at = [], spelled.index(beginning) + len(beginning)
    for _, answer in pairs:
        at = spelled.index(answer, at)
        spans.append((at, at + len(answer)))
        at += len(answer)
    return spelled, spans
