import re

import pytest
import torch

from heedful_lab.tasks import Assignment


def latest(text):
    """The answer by running the assignments; also how often the queried name was set."""
    *lines, query, end = text.split(";")
    assert end == ""
    name, answer = re.fullmatch(r"([a-z])=(\d+)", query).groups()
    state, times = {}, 0
    for line in lines:
        key, value = re.fullmatch(r"([a-z])=(\d+)", line).groups()
        state[key] = value
        times += key == name
    return state[name], answer, times, lines


@pytest.mark.parametrize(
    "task",
    [
        Assignment(),
        Assignment(variables=26, values=200, assignments=10),
        Assignment(variables=2, values=2, assignments=1),
        Assignment(variables=1, assignments=5),
        Assignment(variables=5, assignments=40, query="first"),
        Assignment(variables=1, assignments=1, query="first"),
        Assignment(variables=3, assignments=6, queries=4),
        Assignment(variables=3, assignments=6, query="first", queries=2),
    ],
    ids=str,
)
def test_answer_follows_from_the_text(task):
    samples = task.sample(400, seed=2)
    assert samples.input_ids.shape == (400, task.length)
    assert samples.input_ids.max() < task.vocab_size
    for ids in samples.input_ids:
        ends = [task.length - 2 * later for later in range(task.queries)]
        for number, end in enumerate(reversed(ends)):
            expected, answer, times, lines = latest(task.decode(ids[:end]))
            assert answer == expected
            assert len(lines) == task.assignments + number
        if task.query == "first":
            assert times == task.queries and lines[0].endswith(f"={answer}")


def test_loss_lies_on_the_answer():
    samples = Assignment().sample(10, seed=0)
    assert samples.labels[:, :-1].eq(-100).all()
    assert samples.labels[:, -1].equal(samples.input_ids[:, -1])
    assert samples.attention_mask.eq(1).all()
    several = Assignment(queries=3).sample(10, seed=0)
    mask = several.labels.ne(-100)
    assert mask.sum() == 30 and mask[:, [-5, -3, -1]].all()


def test_evaluations():
    task = Assignment(variables=4, assignments=6)
    splits = task.evaluations()
    assert {name: split.assignments for name, split in splits.items()} == {
        "in-distribution": 6,
        "2x-assignments": 12,
        "4x-assignments": 24,
        "assigned-once": 6,
        "assigned-once-4x": 24,
    }
    assert {split.vocab_size for split in splits.values()} == {task.vocab_size}
    assert len(Assignment(variables=1).evaluations()) == 3
    for name in ("assigned-once", "assigned-once-4x"):
        texts = [splits[name].decode(ids) for ids in splits[name].sample(200, 1).input_ids]
        assert all(latest(text)[2] == 1 for text in texts)


@pytest.mark.parametrize("query", ["any", "first"])
def test_names_queries_and_answers_are_uniform(query):
    task = Assignment(variables=5, values=4, assignments=20, query=query)
    ids = task.sample(20_000, seed=0).input_ids
    names, query_names, answer = ids[:, 1:-2:2] - 2, ids[:, -2] - 2, ids[:, -1] - 7
    for values, bins in [(names[:, 0], 5), (names[:, 7], 5), (query_names, 5), (answer, 4)]:
        share = values.bincount(minlength=bins) / len(values)
        assert share.sub(1 / bins).abs().max() < 0.015
    if query == "first":
        # The names after the first are the others, all of them equally likely.
        step = (names[:, 9] - names[:, 0]) % 5
        share = step.bincount(minlength=5) / len(step)
        assert share[0] == 0 and share[1:].sub(0.25).abs().max() < 0.015


def test_queries_do_not_prefer_recent_names():
    task = Assignment(variables=3, assignments=3)
    rows = [latest(task.decode(ids)) for ids in task.sample(9000, seed=4).input_ids]
    twice = [times == 2 for *_, times, lines in rows if len({line[0] for line in lines}) == 2]
    # Of two assigned names one was set twice; each is queried equally often.
    assert abs(sum(twice) / len(twice) - 0.5) < 0.03


def test_score():
    task = Assignment()
    labels = task.sample(50, seed=0).labels
    predictions = torch.zeros_like(labels)
    predictions[:, -2] = labels[:, -1]
    assert task.score(predictions, labels) == {"error": 0.0, "token_error": 0.0}
    predictions[3, -2] = 0
    assert task.score(predictions, labels)["error"] == 0.02
