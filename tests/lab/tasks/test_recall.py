import re
from dataclasses import replace

import pytest
import torch

from heedful_lab.tasks import Recall

TOKEN = re.compile(r"\[[.!]\]|[a-z]=|[A-Z0-9]|[;.!]|[bdklm][aeiou] ")


def read(text: str) -> tuple[list[dict], dict[str, int]]:
    """What stands in a sequence, read from its text alone; also where each name came first.

    Each answer: its name, what it is, what it should be, the token at which its question stands,
    and how often the name had been stated and queried before.
    """
    tokens = TOKEN.findall(text)
    assert "".join(tokens) == text
    values, mark, answers, facts, questions, at = {}, None, [], {}, {}, 0
    while at < len(tokens):
        token = tokens[at]
        if token.startswith("["):
            mark = token[1]
        elif token.endswith("="):
            end = next(i for i in range(at, len(tokens)) if tokens[i] in ";.!")
            name, value = token[0], tokens[at + 1 : end]
            assert 1 <= len(value) <= 3 and all(re.fullmatch("[A-Z0-9]", x) for x in value)
            if tokens[end] == ";":
                values[name] = value
                facts.setdefault(name, []).append(at)
            else:
                answers.append(
                    {"name": name, "at": at, "answer": [*value, tokens[end]],
                     "expected": values[name] + [mark], "told": len(facts[name]),
                     "queries": questions.get(name, 0)}
                )  # fmt: skip
                questions[name] = questions.get(name, 0) + 1
            at = end
        at += 1
    return answers, {name: places[0] for name, places in facts.items()}


TASKS = [
    Recall(),
    Recall(queries="dormant"),
    Recall(queries="recent"),
    Recall(length=150, names=5, pool=5, retold=2, references=3, questions=2, instructions=1),
    Recall(length=84, names=2, pool=26, references=1, questions=1, instructions=2),
    Recall(length=600, instructions=9, taught=False),
]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_answers_follow_from_the_text(task):
    samples = task.sample(150, seed=1)
    assert samples.input_ids.shape == (150, task.length) and samples.attention_mask.eq(1).all()
    assert samples.input_ids.max() < task.vocab_size and samples.input_ids[:, 0].eq(0).all()
    for ids in samples.input_ids:
        text = task.decode(ids)
        answers, facts = read(text)
        assert all(answer["answer"] == answer["expected"] for answer in answers)
        assert len(answers) == task.references + task.questions
        assert len(facts) == task.names and len(re.findall(r"\[", text)) == task.instructions
        last, before = answers[-task.questions :], answers[: -task.questions]
        names = [answer["name"] for answer in last]
        assert len(set(names)) == task.questions
        dormant = set(facts) - {answer["name"] for answer in before}
        retold = {answer["name"]: answer["told"] for answer in last}
        for answer in last:
            kinds = {1: "dormant", 1 + task.retold: "recent"}
            assert task.queries in ("any", kinds[answer["told"]])
            if kinds[answer["told"]] == "dormant":
                assert answer["name"] in dormant and answer["queries"] == 0
        assert len([n for n in retold if retold[n] == 1]) <= task.names // 2
        values = re.findall(r"[a-z]=([A-Z0-9]+);", text)
        assert len(set("".join(values))) == len("".join(values)), "a symbol is in two values"


def test_dormant_facts_lie_beyond_the_distance_and_after_the_lead():
    """So a window of `distance` tokens, sinks beside it, sees none of them from any question."""
    task, nearest, first = Recall(queries="dormant"), 10**6, 10**6
    assert task.distance == 151 > task.length // 2
    for ids in task.sample(400, seed=3).input_ids:
        answers, facts = read(task.decode(ids))
        for answer in answers[-task.questions :]:
            end = (
                facts[answer["name"]] + len(answer["answer"]) + 1
            )  # of BOS, and the fact's last token
            nearest = min(nearest, answer["at"] + 1 - end)
            first = min(first, facts[answer["name"]] + 1)
    assert nearest >= task.distance and first >= 8
    assert nearest < task.distance + 40 and first == 8, "the bounds say no more than is needed"


def test_the_last_instruction_is_late_and_matters():
    task, changed, places = Recall(), 0, []
    for ids in task.sample(300, seed=5).input_ids:
        text = task.decode(ids)
        marks = re.findall(r"\[(.)\]", text)
        changed += marks[-1] != marks[-2]
        places.append(len(TOKEN.findall(text[: text.rfind("[")])) / task.length)
    assert abs(changed / 300 - 0.5) < 0.1
    assert min(places) > 0.5 and max(places) < 0.95


def test_loss_lies_on_answers_and_in_training_on_all_that_follows():
    plain, taught = Recall(taught=False), Recall()
    first, second = plain.sample(50, seed=0), taught.sample(50, seed=0)
    assert first.input_ids.equal(second.input_ids)
    for ids, few, many in zip(first.input_ids, first.labels, second.labels, strict=True):
        answers, _ = read(plain.decode(ids))
        expected = torch.zeros(plain.length, dtype=torch.bool)
        for number, answer in enumerate(answers):
            span = slice(answer["at"] + 2, answer["at"] + 2 + len(answer["answer"]))
            expected[span] = True
            if number < plain.references:
                assert many[span].ne(-100).all()
                expected[span] = False
        assert few.ne(-100).equal(expected)
        assert many[expected].equal(ids[expected])
        for at in many.ne(-100).nonzero().flatten().tolist():
            assert many[at] == ids[at]
            word = plain.decode(ids[at : at + 1])
            if word.endswith(" "):  # a second saying: the same words one phrase before
                back = [n for n in range(1, 9) if plain.decode(ids[at - n : at - n + 1]) == word]
                assert back


def test_rows_are_the_same_for_a_seed_and_streamed():
    task = Recall()
    assert task.sample(8, 5).input_ids.equal(task.sample(8, 5).input_ids)
    assert not task.sample(8, 5).input_ids.equal(task.sample(8, 6).input_ids)
    batches = [task.batch(4, 7, step).input_ids for step in (0, 1, 0)]
    assert batches[0].equal(batches[2]) and not batches[0].equal(batches[1])
    assert not task.batch(4, 0, 0).input_ids.equal(task.held_out(4).input_ids)


def test_an_answer_is_right_if_all_its_tokens_are():
    task = Recall(taught=False)
    labels = task.sample(50, seed=0).labels
    right = labels.roll(-1, 1)
    assert task.score(right, labels) == {"answer_error": 0.0, "token_error": 0.0}
    mask, wrong = labels.ne(-100), right.clone()
    ends = (
        mask & ~mask.roll(-1, 1)
    ).nonzero()  # the marks; no sequence ends in the next one's name
    assert len(ends) == 50 * task.questions
    for row, at in ends[:3].tolist():
        wrong[row, at - 1] = 0
    row, at = ends[0].tolist()
    wrong[row, at - 2] = 0  # the same answer once more
    scores = task.score(wrong, labels)
    assert scores["answer_error"] == pytest.approx(3 / 200)
    assert scores["token_error"] == pytest.approx(4 / mask.sum().item())
    assert task.score(torch.zeros_like(right), labels)["answer_error"] == 1


def test_evaluations():
    task = Recall()
    splits = task.evaluations()
    assert list(splits) == ["in-distribution", "dormant", "recent", "2x-length"]
    assert {split.vocab_size for split in splits.values()} == {task.vocab_size}
    assert not any(split.taught for split in splits.values())
    assert splits["2x-length"].length == 512
    assert [splits[name].queries for name in ("dormant", "recent")] == ["dormant", "recent"]


def test_a_row_to_be_read_is_short_and_whole():
    ids = Recall().shown()
    answers, facts = read(Recall().decode(ids))
    assert len(ids) <= 100 and len(answers) == 2 and len(facts) == 2
    assert len(Recall().tokens(ids)) == len(ids)


def test_the_least_length_in_the_message_always_suffices():
    few = {"names": 4, "references": 2, "questions": 2}
    with pytest.raises(ValueError) as refused:
        Recall(length=1, **few)
    least = int(re.search(r"at least (\d+) for", str(refused.value))[1])
    task = replace(Recall(**few), length=least)
    assert task.sample(500, 0).input_ids.shape == (500, least)
