"""Fields and calls that a task refuses, by name and with what they must be."""

import re

import pytest
import torch

from heedful_lab.tasks import (
    Assignment,
    Blocks,
    Copy,
    MagicNumbers,
    Parity,
    Recall,
    Spans,
    Summarise,
    Text,
    Translate,
)

FIELDS = [
    (Assignment, {"variables": 27}, "variables must be a whole number from 1 to 26, got 27; names"),
    (Assignment, {"query": "last"}, "query must be one of 'any', 'first', got 'last'"),
    (Assignment, {"variables": 1, "query": "first"}, 'variables must be at least 2 with query="fi'),
    (Blocks, {"blocks": True}, "blocks must be a whole number of at least 1, got True"),
    (Blocks, {"question": 6}, "question must be a whole number from 1 to 5, got 6; question lett"),
    (Blocks, {"letters": 2, "blocks": 650}, "blocks must be at most 649 with letters=2"),
    (Copy, {"alphabet": 1}, "alphabet must be a whole number from 2 to 26, got 1; symbols"),
    (Parity, {"bits": 0}, "bits must be a whole number of at least 1, got 0"),
    (MagicNumbers, {"length": 52}, "length must be a whole number of at least 53, got 52; 4 needl"),
    (MagicNumbers, {"needles": 41}, "from 1 to 40, got 41; each has a city of its own"),
    (Recall, {"questions": 5}, "questions must be at most names // 2 = 4"),
    (Recall, {"queries": "recnt"}, "did you mean 'recent'"),
    (Recall, {"retold": 2}, "names and retold must make at most 12 values"),
    (Spans, {"noise": 1}, "noise must lie between 0 and 1.0, got 1"),
    (Spans, {"mean_span": 0}, "mean_span must lie between 0 and inf, got 0"),
    (Summarise, {"salient": 13}, "salient must be a whole number from 1 to 5, got 13; they are am"),
    (Summarise, {"length": 38}, "length must be at least 39 for reports of 5 facts, got 38"),
    (Text, {"paths": "a.txt"}, "paths must be a tuple of paths, got 'a.txt'; write paths=('a.txt'"),
    (Text, {"vocab_size": 300}, 'vocab_size must be 257 (bytes and BOS) with tokenizer="byte"'),
    (Text, {"limit_bytes": 0}, "limit_bytes must be a whole number of at least 1, got 0; use None"),
    (Translate, {"tokenizer": "bpe"}, "tokenizer='bpe' is for pairs of files"),
    (Translate, {"paths": ("x",), "vocab_size": 300}, "vocab_size must be 258 here, got 300"),
]


@pytest.mark.parametrize(("task", "fields", "message"), FIELDS)
def test_wrong_fields_are_refused(task, fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        task(**fields)


@pytest.mark.usefixtures("no_shape_checks")
def test_bad_calls(tmp_path):
    task, file = Blocks(), tmp_path / "short.txt"
    labels = task.sample(2, 0).labels
    file.write_text("0123456789" * 2)
    text = Text(paths=(str(file),), length=10)
    for call, message in [
        (lambda: task.sample(0, 0), "count must be a whole number of at least 1, got 0"),
        (lambda: task.decode([0, -100]), "ids must lie in 0..29, got -100"),
        (lambda: task.score(labels[:, 1:], labels), "predictions must have labels' shape [2, 57]"),
        (lambda: task.score(torch.zeros(2, 57, 32), labels), "32]; take logits.argmax(-1)"),
        (lambda: task.score(labels, labels * 0 - 100), "labels must have at least one target"),
        (lambda: text.score(labels, labels), "losses must be floats in nats, got torch.int64"),
        (text.held_out, "too short for sequences of length=10, as the held-out part has 2 tok"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            call()
