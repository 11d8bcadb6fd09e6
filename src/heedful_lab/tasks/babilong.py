"""Little stories scattered through a long text: reasoning in a haystack."""

from collections.abc import Sequence
from dataclasses import dataclass

from heedful.checks import UserError, check_whole
from heedful_lab.tasks.background import Background, Count, Question, at_most, draws
from heedful_lab.tasks.stories import KINDS, OBJECTS, PEOPLE, Story, story

UNWANTED = (*(f"{x} " for x in PEOPLE), *(f"the {x}" for x in OBJECTS))
"""Words that no sentence of the background may contain."""

_INSTRUCTIONS = {
    1: "People go from place to place. Say where the person is now.",
    2: "People go from place to place, take things along and put them down. Say where the thing "
    "is now.",
    3: "People go from place to place, take things along and put them down. Say where the thing "
    "was before.",
    4: "Places lie north, south, east or west of each other. Say which place is asked for.",
    5: "People take things and give them to each other. Say who or what is asked for.",
}
_EXAMPLES = {
    1: ("Olga went to the pier. Emil walked to the tower.", "Where is Olga?", "pier"),
    2: ("Olga went to the pier. Olga took the drum there.", "Where is the drum?", "pier"),
    3: (
        "Olga went to the pier. Olga took the drum there. Olga walked to the tower.",
        "Where was the drum before the tower?",
        "pier",
    ),
    4: ("The pier is north of the tower.", "What is north of the tower?", "pier"),
    5: ("Olga gave the drum to Emil.", "Who received the drum?", "Emil"),
}


@dataclass(frozen=True)
class BabiLong:
    """Stories with a question, their sentences in order at random places of a long text.

    A prompt states the question, shows one example, then context and question between marks, as the
    published prompts do; its words are ours. It ends with "Answer:", for models without instruction
    tuning.

    Arguments:
        kind: 1 to 5, as in bAbI: one, two and three supporting facts, two-argument and
            three-argument relations.
        length: tokens of a prompt at most; 0 gives the story alone.

    Raises:
        ValueError: a field is out of range.

    Source: Kuratov et al., "BABILong", arXiv 2406.10149.
    """

    kind: int
    length: int = 0

    def __post_init__(self) -> None:
        check_whole("kind", self.kind, min(KINDS), max(KINDS))
        check_whole("length", self.length, 0)

    def sample(
        self,
        count: int,
        seed: int,
        background: Background | None,
        tokens: Count,
        stories: Sequence[Story] = (),
    ) -> list[Question]:
        """`count` questions, the same for the same configuration, seed, background and tokens.

        Arguments:
            count: how many.
            seed: of stories and places.
            background: what the story is scattered through; not needed where `length` is 0.
            tokens: tokens of a text.
            stories: where they are not to be generated; of those that do not fit into `length`
                others stand in, and there may be fewer than `count`.

        Raises:
            ValueError: no story fits into `length`.
        """
        if stories:
            order = draws(seed, "babilong", self.kind).permutation(len(stories)).tolist()
            numbered = [(number, stories[number]) for number in order]
        else:
            numbered = [
                (number, story(self.kind, draws(seed, "story", self.kind, number)))
                for number in range(count)
            ]
        questions: list[Question] = []
        for number, tale in numbered:
            if len(questions) == count:
                break
            try:
                questions.append(self._question(number, seed, background, tokens, tale))
            except ValueError:
                if not stories:
                    raise
        if not questions:
            raise UserError(
                f"length {self.length} is too short for every story of kind {self.kind}; ask for "
                "more"
            )
        return questions

    def _question(self, number, seed, background, tokens, tale: Story) -> Question:
        rng = draws(seed, "babilong", self.kind, self.length, number)
        start = 0 if background is None else int(rng.integers(len(background.sentences)))
        shares = sorted(rng.random(len(tale.sentences)).tolist())

        def make(room: int) -> tuple[str, None]:
            text = background.cut(start, room)[0] if room and background is not None else []
            at = [int(share * (len(text) + 1)) for share in shares]
            parts, position = [], 0
            for gap in range(len(text) + 1):
                while position < len(at) and at[position] == gap:
                    parts.append(tale.sentences[position])
                    position += 1
                parts += text[gap : gap + 1]
            return _prompt(self.kind, " ".join(parts), tale.question), None

        prompt = make(0)[0] if not self.length else at_most(self.length, tokens, make)[0]
        cell = {"kind": f"qa{self.kind}", "length": self.length}
        key = f"qa{self.kind} length={self.length} {number}"
        return Question(key, cell, prompt, (tale.answer,), tale.question, tale.labels)


def _prompt(kind: int, context: str, question: str) -> str:
    example, example_question, answer = _EXAMPLES[kind]
    return (
        f"{_INSTRUCTIONS[kind]} The facts may be hidden in a longer text. Answer with one word.\n\n"
        f"{_as_prompt(example, example_question)} {answer}\n\n{_as_prompt(context, question)}"
    )


def _as_prompt(context: str, question: str) -> str:
    return f"<context>\n{context}\n</context>\nQuestion: {question}\nAnswer:"


def only_label(reply: str, answer: str, question: str, labels: Sequence[str]) -> bool:
    """Test whether the answer is the only label of a reply's first sentence not in the question.

    In lower case; a label counts where its letters stand, also inside a word. The sentence ends
    with the first full stop, or where the reply begins a context or an example of its own.

    Source: the strict metric of github.com/booydar/babilong, `babilong/metrics.py`.
    """
    sentence = reply.lower()
    for end in (".", "<context>", "<example>"):
        sentence = sentence.split(end)[0]
    lowered = {label.lower() for label in labels}
    matches = {x for x in lowered if x in sentence} - {x for x in lowered if x in question.lower()}
    return matches == {answer.lower()}
