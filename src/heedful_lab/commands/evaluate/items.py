"""The items of an evaluation: texts that are the same for all, as tokens of its own."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from heedful.checks import UserError
from heedful.data import ByteTokenizer
from heedful_lab.commands.compare.setups import setups
from heedful_lab.commands.evaluate.answers import Likelihood
from heedful_lab.commands.evaluate.options import READ, ROWS, WRITTEN, Questions
from heedful_lab.tasks import Task, babilong, needles
from heedful_lab.tasks.babilong import BabiLong, only_label
from heedful_lab.tasks.background import Background, Count, Question, background_sentences
from heedful_lab.tasks.last_words import (
    Passage,
    detokenised,
    last_words,
    passages_of,
    read_passages,
)
from heedful_lab.tasks.needles import Needles, all_found
from heedful_lab.tasks.stories import read_stories
from heedful_lab.tasks.windows import TextWindow, domain_windows, domains

_REPLY = 20  # tokens that a reply may have, at least: as the authors of BABILong allow
_MORE = 4  # tokens beyond the longest answer


class Graded(NamedTuple):
    """Grade of an answer: numbers by name, the answer and the expected one."""

    values: dict[str, float]
    reply: str | None = None
    expected: str | None = None
    curve: dict[str, list[float]] = {}  # noqa: RUF012 (a NamedTuple's default is never changed)


class Item(NamedTuple):
    """One sample as tokens.

    Arguments:
        task, key, cell: as in `heedful_lab.records.Sample`.
        digest: of the exact question.
        ids: what the model reads.
        room: tokens that it may write; 0 where the likelihood of `ids` is the answer.
        grade: what an answer is worth: a text, or a `Likelihood`.
    """

    task: str
    key: str
    cell: dict
    digest: str
    ids: list[int]
    room: int
    grade: Callable[[str | Likelihood], Graded]


Texts = dict[str, list[Question] | list[Passage]]


def texts(questions: Questions, count: Count) -> Texts:
    """Questions and passages by task, which are the same for all models.

    Arguments:
        questions: the tasks.
        count: by which lengths are counted.

    Raises:
        ValueError: a text cannot be read, or a question does not fit into its length.
    """
    texts_by_task: Texts = {}
    backgrounds = _backgrounds(questions, count)
    for name in questions.tasks:
        if name == "needles":
            texts_by_task[name] = [
                question
                for task in _needles(questions)
                for question in task.sample(
                    questions.samples, questions.seed, backgrounds[name, task.length], count
                )
            ]
        elif name == "babilong":
            texts_by_task[name] = _stories(questions, backgrounds, count)
        elif name in ("lambada", "lambada-detokenised"):
            passages = (
                read_passages(questions.lambada)
                if questions.lambada is not None
                else passages_of(questions.data, questions.samples, questions.seed)
            )
            if name != "lambada":
                passages = [detokenised(text) for text in passages[: questions.samples]]
            texts_by_task[name] = last_words(passages, questions.samples)
    return texts_by_task


def _needles(questions: Questions) -> list[Needles]:
    return [
        Needles(length, n, depth, min(questions.queries, n))
        for length in questions.lengths if length
        for n in questions.needles
        for depth in questions.depths
    ]  # fmt: skip


_Backgrounds = dict[tuple[str, int], Background]


def _stories(questions: Questions, backgrounds: _Backgrounds, count: Count) -> list[Question]:
    all_questions = []
    for kind in questions.kinds:
        stories = () if questions.babi is None else read_stories(questions.babi, kind)
        for length in questions.lengths:
            task = BabiLong(kind, length)
            background = backgrounds.get(("babilong", length))
            all_questions += task.sample(
                questions.samples, questions.seed, background, count, stories
            )
    return all_questions


def _backgrounds(questions: Questions, count: Count) -> _Backgrounds:
    """Text without what the questions are about; of each length its own, so that another length
    changes none of its prompts."""
    unwanted = {"needles": needles.UNWANTED, "babilong": babilong.UNWANTED}
    return {
        (name, length): Background(
            background_sentences(questions.haystack, length, unwanted[name]), count
        )
        for name in WRITTEN
        for length in questions.lengths
        if name in questions.tasks and length
    }


def items(
    questions: Questions, texts_by_task: Texts, tokenizer, vocabulary: int, model: str
) -> list[Item]:
    """All items of one model, task by task.

    Arguments:
        questions: the tasks.
        texts_by_task: what `texts` made.
        tokenizer: the model's; not needed for tasks of sequences.
        vocabulary: how many tokens the model has.
        model: its name, for messages.

    Raises:
        ValueError: a text cannot be read, or a task has another vocabulary.
    """
    all_items: list[Item] = []
    for name in questions.tasks:
        if name in WRITTEN:
            all_items += [
                _prompt_item(name, question, tokenizer) for question in texts_by_task[name]
            ]
        elif name == "perplexity":
            all_items += _windows(questions, tokenizer)
        elif name in READ:
            all_items += [_passage(name, passage, tokenizer) for passage in texts_by_task[name]]
        elif name in ROWS:
            all_items += _rows(questions, name, setups()[name].task, vocabulary, model)
    return all_items


def _prompt_item(task: str, question: Question, tokenizer) -> Item:
    def grade(reply: str | Likelihood) -> Graded:
        if task == "needles":
            right = all_found(reply, question.answers)
        else:
            right = only_label(reply, question.answers[0], question.question, question.labels)
        return Graded({"right": float(right)}, reply, ", ".join(question.answers))

    ids = tokenizer.encode(question.prompt)
    digest = _digest(question.prompt, question.answers, question.labels)
    room = _reply_room(tokenizer, question)
    return Item(task, question.key, question.cell, digest, list(ids), room, grade)


def _reply_room(tokenizer, question: Question) -> int:
    """Tokens that a reply may have: what the longest answer takes, and some more."""
    answers = [", and ".join(question.answers), *question.labels]
    sizes = [len(tokenizer.encode(f" {x}.", add_special_tokens=False)) for x in answers]
    return max(_REPLY, max(sizes) + _MORE)


def _passage(task: str, passage: Passage, tokenizer) -> Item:
    """Tokens of the word are what the whole has beyond the context, as in lm-evaluation-harness."""
    context = tokenizer.encode(passage.context)
    ids = list(tokenizer.encode(passage.context + passage.word))
    first = max(1, min(len(context), len(ids) - 1))

    def grade(likelihood: str | Likelihood) -> Graded:
        nats, likeliest = likelihood.nats[first - 1 :], likelihood.likeliest[first - 1 :]
        right = likeliest.tolist() == ids[first:]
        values = {
            "right": float(right),
            "nats": nats.double().sum().item(),
            "tokens": len(ids) - first,
            "bytes": len(passage.word.encode()),
        }
        return Graded(values, tokenizer.decode(likeliest.tolist()), passage.word)

    digest = _digest(passage.context, passage.word)
    return Item(task, passage.key, {}, digest, ids, 0, grade)


def _windows(questions: Questions, tokenizer) -> list[Item]:
    stride = questions.stride or max(1, questions.length // 2)
    return [
        _window(name, window)
        for name, paths in domains(questions.data).items()
        for window in domain_windows(
            paths,
            lambda text: encoded(tokenizer, text),
            questions.samples,
            questions.length,
            stride,
        )
    ]


def encoded(tokenizer, text: str) -> tuple[list[int], list[int]]:
    """A text's tokens, and where the text of each ends, in bytes.

    Raises:
        ValueError: the tokenizer does not tell where its tokens stand.
    """
    if isinstance(tokenizer, ByteTokenizer):
        ids = tokenizer.encode(text)
        return ids, list(range(1, len(ids) + 1))
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {type(tokenizer).__name__} does not say where its tokens stand in the "
            "text, which bits per byte need; take a fast one, or leave perplexity out"
        )
    encoding = tokenizer(text, return_offsets_mapping=True)
    before = [0]  # bytes before each character
    for character in text:
        before.append(before[-1] + len(character.encode()))
    ends, last = [], 0
    for _, end in encoding["offset_mapping"]:
        last = max(last, before[end])  # special tokens stand at 0
        ends.append(last)
    return list(encoding["input_ids"]), ends


def _window(domain: str, window: TextWindow) -> Item:
    def grade(likelihood: str | Likelihood) -> Graded:
        nats = likelihood.nats.double()
        own = nats[window.first - 1 :]
        values = {"nats": own.sum().item(), "tokens": len(own), "bytes": window.nbytes}
        return Graded(values, curve=by_position(nats.tolist()))

    digest = _digest(window.ids, window.first)
    key = f"{domain} {window.key}"
    return Item("perplexity", key, {"domain": domain}, digest, list(window.ids), 0, grade)


def by_position(nats: Sequence[float]) -> dict[str, list[float]]:
    """Sums over tokens with 1, 2 to 3, 4 to 7, 8 to 15, ... tokens before them in the window."""
    sums = [0.0] * (len(nats).bit_length())
    counts = [0] * len(sums)
    for before, value in enumerate(nats, start=1):
        sums[before.bit_length() - 1] += value
        counts[before.bit_length() - 1] += 1
    return {"nats": sums, "tokens": counts}


def _rows(questions: Questions, name: str, task: Task, vocabulary: int, model: str) -> list[Item]:
    if task.vocab_size != vocabulary:
        raise UserError(
            f"task {name!r} has {task.vocab_size} tokens and model {model!r} has {vocabulary}; it "
            f"is for models that `heedful compare --tasks {name}` trained"
        )
    row_items = []
    for split, other in task.evaluations().items():
        rows = other.held_out(questions.samples)
        for number, (ids, labels) in enumerate(zip(rows.input_ids, rows.labels, strict=True)):
            # Sequences are drawn together: with other counts they are others.
            key = f"{split} {number + 1} of {len(rows.input_ids)}"
            row_items.append(_row(name, split, other, key, ids, labels))
    return row_items


def _row(name, split: str, task: Task, key: str, ids, labels) -> Item:
    def grade(likelihood: str | Likelihood) -> Graded:
        predictions = torch.nn.functional.pad(likelihood.likeliest, (0, 1))[None]
        return Graded({"error": task.score(predictions, labels[None])[task.metric]})

    digest = _digest(ids.tolist(), labels.tolist())
    return Item(name, key, {"split": split}, digest, ids.tolist(), 0, grade)


def check_fits(requests: Sequence[Item], most: int | None, model: str) -> None:
    """Raise unless the model has positions for every item."""
    way_out = {"perplexity": "--length", "needles": "--lengths", "babilong": "--lengths"}
    longest = max(requests, key=lambda item: len(item.ids) + item.room, default=None)
    if longest is None or most is None or len(longest.ids) + longest.room <= most:
        return
    hint = f"give a smaller {way_out[longest.task]}" if longest.task in way_out else "leave it out"
    reply = f" and up to {longest.room} written" if longest.room else ""
    raise UserError(
        f"model {model!r} has positions for {most} tokens, and {longest.task} asks for "
        f"{len(longest.ids)}{reply} ({longest.key}); {hint}, nothing is cut off"
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def finite(values: dict[str, float]) -> dict[str, float]:
    """Numbers that JSON can hold; a model that gives none of these is broken.

    Raises:
        ValueError: one is not finite.
    """
    for name, value in values.items():
        if not math.isfinite(value):
            raise UserError(f"the model gives {name} = {value}; its weights or its dtype are off")
    return values
