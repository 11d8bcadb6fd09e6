"""Long text that a question lies in: sentences, and as many of them as the length allows."""

import ast
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from heedful.checks import UserError
from heedful.data import corpus

Count = Callable[[str], int]
"""How many tokens a text has."""

_WORDS = 40  # of a sentence at most; longer ones are cut
_BYTES = 8  # per requested token: more than any text in an alphabet has


class Question(NamedTuple):
    """A prompt whose answer is written by a model and compared with what is right.

    Arguments:
        key: names the sample within its task, the same for all models.
        cell: what the sample is one of several of, such as `{"length": 1024, "depth": 0.5}`.
        prompt: the whole text that a model reads.
        answers: what is right.
        question: the part of the prompt with the question.
        labels: the answers among which it chooses, where there are such.
    """

    key: str
    cell: dict[str, float | str]
    prompt: str
    answers: tuple[str, ...]
    question: str
    labels: tuple[str, ...] = ()


class Background:
    """Sentences of a text, with what each of them takes in tokens.

    Arguments:
        sentences: in the text's order.
        count: tokens of a text.

    Raises:
        ValueError: there is no sentence.
    """

    def __init__(self, sentences: Iterable[str], count: Count) -> None:
        self.sentences = tuple(sentences)
        if not self.sentences:
            raise UserError("background must hold at least one sentence; give text with words")
        self._count = count
        self._sizes: dict[int, int] = {}

    def size(self, index: int) -> int:
        """Tokens of a sentence that stands behind another one."""
        if index not in self._sizes:
            self._sizes[index] = max(1, self._count(" " + self.sentences[index]))
        return self._sizes[index]

    def cut(self, start: int, tokens: int) -> tuple[list[str], list[int]]:
        """Consecutive sentences of at most so many tokens, and the tokens of each.

        Behind the last sentence of the text comes its first.
        """
        indices: list[int] = []
        while tokens > 0 and (size := self.size(start % len(self.sentences))) <= tokens:
            indices.append(start % len(self.sentences))
            tokens -= size
            start += 1
        return [self.sentences[i] for i in indices], [self.size(i) for i in indices]


def background_sentences(
    paths: Sequence[str], tokens: int, without: Sequence[str] = ()
) -> list[str]:
    """Sentences of text that a question of so many tokens can lie in.

    Arguments:
        paths: what `heedful.data.corpus` takes; none stands for the documentation in the sources
            of the Python standard library.
        tokens: of the longest prompt.
        without: sentences that say one of these, in any case, are left out.

    Raises:
        ValueError: the text cannot be read, or holds no word.
    """
    unwanted = [x.lower() for x in without]
    usable = [
        sentence
        for text in prose(paths, max(1 << 17, 4 * tokens * _BYTES))
        for sentence in sentences(text)
        if not any(x in sentence.lower() for x in unwanted)
    ]
    if not usable:
        sources = ", ".join(map(repr, paths)) or "the standard library"
        raise UserError(f"haystack {sources} holds no sentence of words; name another text")
    return usable


def prose(paths: Sequence[str], nbytes: int) -> list[str]:
    """Texts of about so many bytes, at most.

    Arguments:
        paths: what `heedful.data.corpus` takes; none stands for the documentation in the sources
            of the Python standard library, a text for each of them.
        nbytes: of what is read.

    Raises:
        ValueError: the text cannot be read.
    """
    if paths:
        return [x.text for x in corpus(tuple(paths), nbytes)]
    sources = corpus((), 8 * nbytes)  # most of which is code
    return [text for x in sources if (text := "\n\n".join(_documentation(x.text)))]


def sentences(text: str) -> list[str]:
    """The sentences of a text, white space made single; very long ones are cut between words."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in re.split(r"(?<=[.!?])\s+", paragraph):
            words = sentence.split()
            if not any(c.isalpha() for c in sentence):
                continue
            parts += [" ".join(words[i : i + _WORDS]) for i in range(0, len(words), _WORDS)]
    return parts


def _documentation(source: str) -> list[str]:
    """Paragraphs of prose in a source's docstrings."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # the last one is cut off
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    parts = [part for text in texts for part in re.split(r"\n\s*\n", text)]
    return [part for part in parts if ">>>" not in part and re.search(r"[a-z] [a-z]+ [a-z]", part)]


def at_most(
    tokens: int, count: Count, make: Callable[[int], tuple[str, object]]
) -> tuple[str, object]:
    """A text of at most so many tokens, and what comes with it.

    Where sentences stand together they can take more tokens than alone, so room is given back until
    the whole fits.

    Arguments:
        tokens: of the whole text.
        count: tokens of a text.
        make: the text with so many tokens of background, and something about it.

    Raises:
        ValueError: it does not fit without any background.
    """
    bare = count(make(0)[0])
    room = tokens - bare
    if room < 0:
        raise UserError(
            f"length {tokens} is too short for a question that has {bare} tokens without any text "
            "around it; ask for more"
        )
    while True:
        text, about = make(room)
        if (over := count(text) - tokens) <= 0 or room <= 0:
            return text, about
        room = max(0, room - over)


def places(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    """The gaps between sentences nearest to these shares of their tokens, each gap once.

    Gap 0 is before the first sentence. Where one is taken, the nearest free one stands in; the
    first share always has its own.

    Raises:
        ValueError: there are fewer gaps than shares.
    """
    before = [0, *accumulate(sizes)]
    if len(before) < len(shares):
        raise UserError(
            f"length must leave room for at least {len(shares) - 1} sentences between needles, got "
            f"{len(sizes)}; ask for more tokens or fewer needles"
        )
    total, positions = before[-1], []
    for share in shares:
        at = bisect_left(before, share * total)
        free = [i for i in range(len(before)) if i not in positions]
        near = min(free, key=lambda i: (abs(before[i] - share * total), abs(i - at)))
        positions.append(near)
    return positions


def draws(seed: int, *words: object) -> np.random.Generator:
    """A generator of its own for each sample, so that none depends on how many there are."""
    spelled = "/".join(map(str, words)).encode()
    return np.random.default_rng([seed, *spelled])
