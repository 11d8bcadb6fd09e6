import re

import pytest
import torch

from heedful_lab.tasks import Copy, Parity, SelectiveCopy


@pytest.mark.parametrize("task", [Copy(), Copy(symbols=1), Copy(symbols=50, alphabet=2)], ids=str)
def test_copy_repeats_the_string(task):
    samples = task.sample(300, seed=1)
    assert samples.input_ids.shape == (300, task.length)
    assert samples.input_ids.max() < task.vocab_size
    for ids in samples.input_ids:
        source, target = task.decode(ids).split("#")
        assert source == target and len(source) == task.symbols
        assert set(source) <= set("abcdefghijklmnopqrstuvwxyz"[: task.alphabet])
    start = task.symbols + 2
    assert samples.labels[:, :start].eq(-100).all()
    assert samples.labels[:, start:].equal(samples.input_ids[:, start:])
    assert samples.input_ids[:, 0].eq(0).all() and samples.input_ids[:, -1].eq(1).all()


@pytest.mark.parametrize("task", [Parity(), Parity(bits=1), Parity(bits=77)], ids=str)
def test_parity_counts_ones(task):
    samples = task.sample(300, seed=1)
    assert samples.input_ids.shape == (300, task.length)
    for ids in samples.input_ids:
        text = task.decode(ids)
        assert len(text) == 2 * task.bits
        for i in range(task.bits):
            assert text[2 * i] in "01"
            assert text[2 * i + 1] == "eo"[text[: 2 * i + 1].count("1") % 2]
    assert samples.labels[:, 2::2].equal(samples.input_ids[:, 2::2])
    assert samples.labels[:, 0].eq(-100).all() and samples.labels[:, 1::2].eq(-100).all()


@pytest.mark.parametrize("task", [Copy(), Parity()], ids=str)
def test_deterministic_uniform_and_longer(task):
    first = task.sample(4000, 5).input_ids
    assert first.equal(task.sample(4000, 5).input_ids)
    assert not first.equal(task.sample(4000, 6).input_ids)
    bins = 26 if isinstance(task, Copy) else 2
    symbols = first[:, 1:33] if isinstance(task, Copy) else first[:, 1::2]
    share = (symbols - symbols.min()).flatten().bincount(minlength=bins) / symbols.numel()
    assert share.mul(bins).sub(1).abs().max() < 0.06
    lengths = [split.length for split in task.evaluations().values()]
    assert lengths[0] == task.length and lengths == sorted(lengths) and len(set(lengths)) == 3


@pytest.mark.parametrize("task", [Copy(), Parity()], ids=str)
def test_score(task):
    labels = task.sample(50, seed=0).labels
    predictions = torch.zeros_like(labels)
    predictions[:, :-1] = labels[:, 1:].clamp(min=0)
    assert task.score(predictions, labels) == {"error": 0.0, "token_error": 0.0}
    predictions[7, -2] = 31
    count = int((labels[:, 1:] != -100).sum())
    assert task.score(predictions, labels) == {
        "error": 0.02,
        "token_error": pytest.approx(1 / count),
    }


@pytest.mark.parametrize(
    "task", [SelectiveCopy(), SelectiveCopy(1, 1, 2), SelectiveCopy(9, 300, 26)], ids=str
)
def test_selective_copy_repeats_the_letters_among_the_noise(task):
    samples = task.sample(300, seed=1)
    assert samples.input_ids.shape == (300, task.length)
    assert samples.input_ids.max() < task.vocab_size
    places = torch.zeros(task.context)
    for ids in samples.input_ids:
        source, target = task.decode(ids).split("#")
        assert re.sub("[-.,_]", "", source) == target and len(target) == task.symbols
        assert len(source) == task.context
        places[[i for i, x in enumerate(source) if x.isalpha()]] += 1
    start = task.context + 2
    assert samples.labels[:, :start].eq(-100).all()
    assert samples.labels[:, start:].equal(samples.input_ids[:, start:])
    expected = 300 * task.symbols / task.context
    assert (places - expected).abs().max() <= 5 * expected**0.5  # letters lie anywhere


def test_selective_copy_is_longer_where_requested():
    task = SelectiveCopy().cut(200, "byte")
    assert task.length == 200 and task.symbols == SelectiveCopy().symbols
    assert SelectiveCopy().cut(None, "byte") == SelectiveCopy()
    assert task.evaluations()["2x-context"].context == 2 * task.context
    with pytest.raises(ValueError, match="length must be a whole number of at least 27, got 20"):
        SelectiveCopy().cut(20, "byte")
    with pytest.raises(ValueError, match="context must be a whole number of at least 12, got 11"):
        SelectiveCopy(context=11)
