import math
import re

import pytest
import torch

from heedful_lab.tasks import TASKS, Blocks, sequence_error, token_error, token_losses

PAIRED = {name for name, kind in TASKS.items() if kind.paired}
SIZES = [
    Blocks(),
    Blocks(blocks=8, letters=8),
    Blocks(blocks=52, answer="first"),
    Blocks(blocks=34, letters=8, answer="last"),
    Blocks(blocks=1),
    Blocks(blocks=5, letters=2, question=1, answer="last"),
    Blocks(blocks=26, letters=2, question=1),
    Blocks(blocks=20, letters=3, question=3),
    Blocks(blocks=6, letters=14, question=2),
    Blocks(blocks=4, letters=25, question=2),
    Blocks(blocks=1, letters=26, question=26),
]


def perfect(labels):
    """Predictions that are right wherever a label asks: position t answers the label of t + 1."""
    predictions = torch.zeros_like(labels)
    predictions[:, :-1] = labels[:, 1:].clamp(min=0)
    return predictions


@pytest.mark.parametrize("task", SIZES, ids=str)
def test_answer_follows_from_the_text(task):
    samples = task.sample(400, seed=3)
    assert samples.input_ids.shape == (400, task.length)
    assert samples.input_ids.dtype == samples.labels.dtype == torch.int64
    assert samples.attention_mask.eq(1).all()
    assert samples.input_ids.min() >= 0 and samples.input_ids.max() < task.vocab_size
    for ids in samples.input_ids:
        source, rest = task.decode(ids).split("#")
        blocks, question, answer = source.split("."), rest[: task.question], rest[task.question :]
        assert len(blocks) == task.blocks == len(set(blocks))
        assert all(re.fullmatch("[a-z]+", block) for block in blocks)
        assert all(len(block) == len(set(block)) == task.letters for block in blocks)
        assert len(question) == len(set(question)) == task.question
        holding = [block for block in blocks if set(question) <= set(block)]
        assert len(holding) == 1
        answers = {"all": holding[0], "first": holding[0][0], "last": holding[0][-1]}
        assert answer == answers[task.answer]


@pytest.mark.parametrize("task", SIZES, ids=str)
def test_loss_lies_on_the_answer_and_eos(task):
    samples = task.sample(50, seed=0)
    size = (task.letters if task.answer == "all" else 1) + 1
    assert samples.labels[:, :-size].eq(-100).all()
    assert samples.labels[:, -size:].equal(samples.input_ids[:, -size:])
    assert samples.input_ids[:, 0].eq(0).all()
    assert samples.input_ids[:, -1].eq(1).all()


def test_length_of_the_papers_rows():
    assert Blocks(blocks=52, letters=5).length == 321
    assert Blocks().vocab_size == 32


def test_chunks_hold_to_the_definition(monkeypatch):
    monkeypatch.setattr("heedful_lab.tasks.blocks._CHUNK_BLOCKS", 56)
    test_answer_follows_from_the_text(Blocks())
    rows = Blocks().sample(400, seed=3).input_ids.tolist()
    assert len({tuple(row) for row in rows}) == 400


def test_targets_letters_and_questions_are_uniform():
    task, count = Blocks(), 20_000
    ids = task.sample(count, seed=1).input_ids
    blocks = ids[:, 1:49].view(count, 8, 6)[..., :5]
    question, answer = ids[:, 49:51], ids[:, 51:56]
    place = (blocks == answer[:, None]).all(-1).int().argmax(1)

    def is_flat(values, bins):
        expected = len(values) / bins
        chi2 = ((values.bincount(minlength=bins) - expected) ** 2 / expected).sum().item()
        return chi2 < bins - 1 + 5 * math.sqrt(2 * (bins - 1))

    assert is_flat(place, 8)
    for letter in range(5):
        assert is_flat(answer[:, letter] - 4, 26)
    where = [(answer == question[:, [i]]).int().argmax(1) for i in range(2)]
    pairs = where[0] * 4 + where[1] - (where[1] > where[0]).int()
    assert is_flat(pairs, 20)
    # The first letter of a block beside the target is uniform up to the ban on the question.
    beside = blocks[:, 0, 0][place != 0] - 4
    assert is_flat(beside, 26)


def test_score_counts_rows():
    task = Blocks()
    labels = task.sample(100, seed=0).labels
    right = perfect(labels)
    assert task.score(right, labels) == {"error": 0.0, "token_error": 0.0}
    # Positions without a label, the last one among them, do not count.
    noise = right.clone()
    noise[:, : task.length - 7] = 31
    noise[:, -1] = 31
    assert task.score(noise, labels)["error"] == 0.0
    flawed = right.clone()
    flawed[17, -2] = 31
    assert task.score(flawed, labels) == {"error": 0.01, "token_error": pytest.approx(1 / 600)}
    flawed[17, -3] = 31
    flawed[40, -7] = 31
    assert task.score(flawed, labels) == {"error": 0.02, "token_error": pytest.approx(3 / 600)}
    # Unshifted predictions are one off and must not pass.
    assert task.score(labels.clamp(min=0), labels)["error"] == 1.0


def test_rows_that_ask_nothing_do_not_count():
    labels = torch.tensor([[-100, 5], [3, -100], [-100, 6]])
    predictions = torch.tensor([[5, 0], [0, 0], [9, 0]])
    assert sequence_error(predictions, labels) == 0.5
    assert token_error(predictions, labels) == 0.5


@pytest.mark.usefixtures("no_shape_checks")
def test_token_losses_are_aligned_as_predictions():
    labels = torch.tensor([[-100, 1, -100, 2]])
    logits = torch.randn(1, 4, 3, generator=torch.Generator().manual_seed(0))
    losses = token_losses(logits, labels)
    log_p = logits.log_softmax(-1)
    assert torch.allclose(
        losses, torch.stack([-log_p[0, 0, 1], z := torch.tensor(0.0), -log_p[0, 2, 2], z])[None]
    )
    with pytest.raises(ValueError, match=r"logits must be \[N, T, V\] .* got \[4, 3\]"):
        token_losses(logits[0], labels)


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"text", *PAIRED}))
def test_every_task_has_the_same_outward_shape(name):
    task = TASKS[name]()
    assert hash(task) == hash(TASKS[name]())
    splits = task.evaluations()
    assert next(iter(splits)) == "in-distribution"
    assert splits["in-distribution"].length == task.length
    for split in splits.values():
        samples = split.sample(20, seed=9)
        assert samples.input_ids.shape == (20, split.length)
        assert split.sample(20, seed=9).input_ids.equal(samples.input_ids)
        assert not split.sample(20, seed=8).input_ids.equal(samples.input_ids)
        assert samples.input_ids.max() < task.vocab_size == split.vocab_size
        assert split.score(perfect(samples.labels), samples.labels)[task.metric] == 0.0
        mask = samples.labels != -100
        assert samples.labels[mask].equal(samples.input_ids[mask])
        assert mask[:, 1:].any(1).all() and not mask[:, 0].any()
        assert split.decode(samples.input_ids[0])
