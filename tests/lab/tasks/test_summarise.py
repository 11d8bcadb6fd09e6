"""Summaries follow from their reports; measures are those of rouge-score, and counts by hand."""

import re
from dataclasses import replace

import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer

from heedful_lab.tasks import Summarise
from heedful_lab.tasks.summarise import fact_scores, rouge_l

MARKS = ("notably", "reportedly", "formerly", "allegedly")
TASKS = [Summarise(), Summarise(length=700, facts=30, salient=9), Summarise(facts=4, salient=1)]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_summary_follows_from_its_report(task):
    lengths = set()
    for report, summary in task.texts(200, seed=2):
        heading, *sentences = [x.split() for x in report.removesuffix(" .").split(" . ")]
        assert heading[0] == "heading" and heading[1] in MARKS and len(heading) == 2
        facts = [x for x in sentences if x[0] in MARKS]
        assert len(facts) == task.facts and all(len(x) == 4 for x in facts)
        assert all(re.fullmatch("[1-9][0-9]", x[3]) for x in facts)
        assert len({(x[1], x[2]) for x in facts}) == task.facts, "a fact is told twice"
        salient = [x[1:] for x in facts if x[0] == heading[1]]
        assert 1 <= len(salient) <= task.salient
        assert summary == " ".join(" ".join(x) + " ." for x in salient)
        noise = [x for x in sentences if x[0] not in MARKS]
        assert not any(word in MARKS for x in noise for word in x)
        lengths.add(len(salient))
    assert lengths == set(range(1, task.salient + 1))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_reports_fill_their_rows(task):
    rows = task.sample(100, seed=1)
    sizes = rows.attention_mask.sum(1)
    assert sizes.max() <= task.length and sizes.max() > 0.95 * task.length
    assert sizes.min() >= 0.75 * task.length - 4  # a rest too short for a sentence of noise
    assert rows.labels.shape[1] <= task.target_length == task.salient * 4 + 1
    for i, (report, summary) in enumerate(task.texts(100, seed=1)):
        assert task.decode(rows.input_ids[i]) == report
        assert task.decode(rows.labels[i]) == summary


def test_held_out_reports_are_never_trained_on():
    task = Summarise()
    trained = {report for report, _ in task.texts(500, 1)}
    held_out = {report for report, _ in replace(task, part="held-out").texts(300, 0)}
    assert len(trained) == 500 and len(held_out) == 300 and not trained & held_out
    first = task.held_out(20)
    assert first.input_ids.equal(replace(task, part="held-out").sample(20, 0).input_ids)
    assert {task.decode(x) for x in first.input_ids} <= held_out


def test_facts_are_counted_by_hand():
    references = ["mill output 47 . farm loss 12 .", "port size 30 .", "mill size 10 ."]
    texts = ["mill output 47 . farm loss 13 .", "port size 30 . port size 30 .", ""]
    scores = fact_scores(texts, references)
    assert scores == {  # 2 of 4 facts, and 2 of the 4 that were written
        "fact_error": pytest.approx(0.5), "fact_recall": 0.5, "fact_precision": 0.5,
    }  # fmt: skip
    assert fact_scores(["", "", ""], references) == {
        "fact_error": 1.0, "fact_recall": 0.0, "fact_precision": 0.0,
    }  # fmt: skip
    assert fact_scores(references, references)["fact_error"] == 0.0
    single = fact_scores(["port size 30"], ["port size 30 . mill size 10 ."])
    assert single["fact_recall"] == 0.5 and single["fact_precision"] == 1.0
    assert single["fact_error"] == pytest.approx(1 - 2 / 3)


def test_rouge_l_is_that_of_rouge_score():
    texts = ["police killed the gunman", "the gunman kill police", ""]
    references = ["police kill the gunman"] * 3
    scorer = RougeScorer(["rougeL"])
    each = [scorer.score(references[0], x)["rougeL"].fmeasure for x in texts]
    assert rouge_l(texts, references) == pytest.approx(sum(each) / 3)
    assert each == pytest.approx([0.75, 0.5, 0.0])  # Lin 2004, its own example


def test_scores_are_those_of_the_texts():
    task = Summarise()
    labels = task.sample(20, seed=1).labels
    perfect = task.references(labels)
    assert task.score(perfect, labels) == {
        "rouge_l": pytest.approx(1), "fact_error": 0.0, "fact_recall": 1.0, "fact_precision": 1.0,
    }  # fmt: skip
    assert task.metric == "fact_error" and set(task.also) < {"loss", *task.score(perfect, labels)}


def test_longer_reports_have_as_many_facts():
    task = Summarise().cut(1024, "byte")
    assert task.length == 1024 and task.target_length == Summarise().target_length
    assert torch.equal(task.sample(3, 1).labels, task.sample(3, 1).labels)
    assert task.sample(30, 1).input_ids.shape[1] > 950
