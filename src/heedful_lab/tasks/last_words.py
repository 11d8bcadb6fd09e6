"""The last word of a passage: LAMBADA, or passages that are cut from any text."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from heedful.checks import UserError
from heedful.data import corpus
from heedful_lab.tasks.background import draws, prose, sentences

_PASSAGE = 60  # words before the last one, at least: LAMBADA's passages have 75 on average
_WORD = 4  # letters of a last word, at least
_BYTES = 1 << 16  # of text per passage that is looked for


class Passage(NamedTuple):
    """A text and the word that it ends with.

    Arguments:
        key: names the sample within its task: by its text, whatever stands around it.
        context: without the last word, and without the space before it.
        word: the last word, with the space before it.
    """

    key: str
    context: str
    word: str


def last_words(texts: Sequence[str], count: int | None = None) -> list[Passage]:
    """Passages as they are given, the first `count` of them or all, each with its last word.

    The last word is what stands behind the last space, as in LAMBADA's evaluation.

    Raises:
        ValueError: a passage is a single word; names its number.
    """
    passages, times = [], Counter()
    for number, text in enumerate(texts[:count]):
        context, space, word = text.strip().rpartition(" ")
        if not space or not context.strip():
            raise UserError(
                f"lambada: passage {number + 1} is {text.strip()!r:.60}, a single word; give "
                "passages of several words"
            )
        name = hashlib.sha256(text.strip().encode()).hexdigest()[:12]
        times[name] += 1
        key = name if times[name] == 1 else f"{name} {times[name]}"
        passages.append(Passage(key, context.rstrip(), " " + word))
    return passages


def read_passages(path: str) -> list[str]:
    """Passages of a file: the strings "text" of JSON lines, or the lines of a text; or `hf:NAME`.

    Raises:
        ValueError: as `heedful.data.corpus` does, or if there is none.
    """
    documents = corpus((path,))
    texts = [x.text for x in documents]
    if not path.startswith("hf:") and ".jsonl" not in path:
        texts = [line for text in texts for line in text.split("\n")]
    passages = [text.strip() for text in texts if text.strip()]
    if not passages:
        raise UserError(f"lambada {path!r} holds no passage; name a file with one in each line")
    return passages


def passages_of(paths: Sequence[str], count: int, seed: int) -> list[str]:
    """Passages cut from running text, in the manner of LAMBADA.

    Each is some sentences of 60 words or a few more; its last word has at least 4 letters, stands
    before in the passage too, and comes without the full stop behind it. Unlike in LAMBADA nobody
    has read them to tell that the word can be guessed.

    Arguments:
        paths: what `heedful.data.corpus` takes; none stands for the documentation in the sources
            of the Python standard library.
        count: how many at most; passages do not overlap.
        seed: which of all are taken, if there are more.

    Raises:
        ValueError: the text cannot be read, or holds no such passage.
    """
    passages: list[str] = []
    for text in prose(paths, count * _BYTES):
        words: list[str] = []
        for sentence in sentences(text):
            words += sentence.split()
            if len(words) <= _PASSAGE:
                continue
            last = words[-1].rstrip(".!?")
            before = {x.strip(".,;:!?\"'()").lower() for x in words[:-1]}
            if last.isalpha() and len(last) >= _WORD and last.lower() in before:
                passages.append(" ".join([*words[:-1], last]))
                words = []
            elif len(words) > 2 * _PASSAGE:
                words = []
    if not passages:
        sources = ", ".join(map(repr, paths)) or "the standard library"
        raise UserError(
            f"data {sources} holds no passage of {_PASSAGE} words whose last word stands in it "
            "twice; give more running text"
        )
    order = draws(seed, "last words").permutation(len(passages))[:count]
    return [passages[i] for i in sorted(order.tolist())]


def detokenised(text: str) -> str:
    """Text whose words and marks stand apart by spaces, written as usual.

    Quotation marks become straight, contractions and marks join their words. What a tokenised text
    has lost, such as capital letters, does not come back.
    """
    text = text.replace("``", '"').replace("''", '"')
    for curly, straight in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'")):
        text = text.replace(curly, straight)
    text = re.sub(r" (n't|'(?:s|m|d|re|ve|ll))\b", r"\1", text)
    text = re.sub(r" ([.,;:!?)\]])", r"\1", text)
    text = re.sub(r"([(\[]) ", r"\1", text)
    parts = re.split(r'\s*"\s*', text)  # marks open and close in turn
    joined = parts[0]
    for number, part in enumerate(parts[1:]):
        opens = number % 2 == 0
        before = " " if opens and joined and not joined.endswith(("(", "\n")) else ""
        after = " " if not opens and part and part[0].isalnum() else ""
        joined += f'{before}"{after}{part}'
    return joined.strip()
