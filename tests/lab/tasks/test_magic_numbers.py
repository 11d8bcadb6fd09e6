import re
from collections import Counter

import pytest
import torch

from heedful_lab.tasks import MagicNumbers

_NEEDLE = re.compile(r"magic number of (\w+) is (\d+) (\. )?")


@pytest.mark.parametrize(
    "task", [MagicNumbers(), MagicNumbers(27, 2), MagicNumbers(14, 1), MagicNumbers(600, 40)],
    ids=str,
)  # fmt: skip
def test_every_city_is_stated_once_and_requested_once(task):
    samples = task.sample(60, seed=1)
    assert samples.input_ids.shape == (60, task.length)
    assert samples.input_ids.max() < task.vocab_size and samples.input_ids[:, 0].eq(0).all()
    for ids, labels in zip(samples.input_ids, samples.labels, strict=True):
        matches = _NEEDLE.findall(task.decode(ids))
        needles = {city: number for city, number, stop in matches if stop}
        answers = [(city, number) for city, number, stop in matches if not stop]
        assert len(needles) == len(answers) == task.needles and needles == dict(answers)
        assert len(set(needles.values())) == task.needles
        # Loss lies on the answers' numbers, at their own places.
        places = (labels != -100).nonzero().flatten()
        assert labels[places].equal(ids[places])
        assert task.decode(labels[places]) == "".join(f"{number} " for _, number in answers)
        assert task.decode(ids).endswith(f"is {answers[-1][1]} ")


def test_needles_stand_anywhere_and_questions_in_any_order():
    task = MagicNumbers(length=128, needles=2)
    rows = [_NEEDLE.findall(task.decode(ids)) for ids in task.sample(2000, 3).input_ids]
    same = sum(row[0][0] == row[2][0] for row in rows) / 2000
    assert abs(same - 0.5) < 4 * (0.25 / 2000) ** 0.5
    ids = task.sample(4000, 4).input_ids
    starts = (ids[:, :-12] == 2).nonzero()[:, 1]  # "magic" of the needles
    # By hand: places are uniform from 0 to 101, and one of the two stands behind the other's 7.
    error = (102**2 / 12 / 8000) ** 0.5
    assert abs((starts - 1).double().mean().item() - (101 / 2 + 7 / 2)) < 4 * error
    cities, numbers = ids[(ids >= 7) & (ids < 47)], ids[(ids >= 47) & (ids < 147)]
    assert cities.unique().numel() == 40 and numbers.unique().numel() == 100
    assert cities.numel() == numbers.numel() == 4 * 4000


def test_filler_is_as_frequent_as_words_are():
    task = MagicNumbers(length=1000, needles=1)
    words = Counter(task.sample(200, 0).input_ids.flatten().tolist())
    for rank in (2, 10):
        error = (1 / words[147] + 1 / words[146 + rank]) ** 0.5
        assert words[147] / words[146 + rank] == pytest.approx(rank, rel=4 * error)
    names = [task.decode([i]) for i in range(147, task.vocab_size)]
    assert len(set(names)) == 400 and set(names) & {"magic ", "number ", "of ", "is "} == set()


def test_the_tokenizer_that_is_saved_reads_what_rows_say():
    task = MagicNumbers()
    tokenizer = task.saved_tokenizer()
    assert tokenizer.get_vocab_size() == task.vocab_size
    for ids in task.sample(20, 2).input_ids:
        assert tokenizer.encode(task.decode(ids)).ids == ids.tolist()
    assert tokenizer.encode("magic  number of Paris").ids == [0, 2, 3, 4, 1]
    names = {name: tokenizer.id_to_token(i) for name, i in task.special_tokens().items()}
    assert names == {"bos_token": "<bos>", "unk_token": "<unk>"}


def test_deterministic_and_longer():
    task = MagicNumbers()
    first = task.sample(20, 5).input_ids
    assert first.equal(task.sample(20, 5).input_ids)
    assert not first.equal(task.sample(20, 6).input_ids)
    assert task.cut(300, "byte") == MagicNumbers(300) and task.cut(None, "byte") == task
    sizes = {name: (x.length, x.needles) for name, x in task.evaluations().items()}
    assert list(sizes.items()) == [
        ("in-distribution", (128, 4)), ("2-needles", (128, 2)), ("6-needles", (128, 6)),
        ("8-needles", (128, 8)), ("2x-length", (256, 4)), ("2-needles-2x-length", (256, 2)),
        ("6-needles-2x-length", (256, 6)), ("8-needles-2x-length", (256, 8)),
    ]  # fmt: skip
    assert list(MagicNumbers(27, 2).evaluations()) == ["in-distribution", "2x-length"]
    assert len(_NEEDLE.findall(task.decode(task.shown()))) == 4


def test_score():
    task = MagicNumbers()
    labels = task.sample(50, seed=0).labels
    predictions = torch.zeros_like(labels)
    predictions[:, :-1] = labels[:, 1:].clamp(min=0)
    assert task.score(predictions, labels) == {"answer_error": 0.0}
    predictions[7, -2] = 3
    assert task.score(predictions, labels) == {"answer_error": pytest.approx(1 / 200)}
