"""Span corruption takes out what T5's recipe takes out, and nothing is lost."""

import numpy as np
import pytest
import torch

from heedful_lab.tasks import Spans


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("spans") / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 997}, né. " for i in range(3000)))
    return (str(path),)


CASES = [
    {}, {"length": 17}, {"length": 2}, {"length": 100, "noise": 0.5, "mean_span": 1.0},
    {"length": 90, "noise": 0.9, "mean_span": 9.0}, {"tokenizer": "bpe", "length": 64},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
def test_source_and_target_make_the_piece_again(corpus, options):
    task = Spans(corpus, **options)
    rows, rng = task.sample(20, seed=3), np.random.default_rng(0)
    pieces = task._text.sample(20, seed=3).input_ids[:, 1:]
    assert rows.input_ids.max() < task.vocab_size
    for source, target, piece in zip(rows.input_ids, rows.labels, pieces, strict=True):
        assert task.restored(source, target) == piece.tolist()
        assert source[-1] == target[-1] == task.eos
        sentinels = [int(x) - task.sentinel(0) for x in source if task.sentinel(0) <= x < task.pad]
        assert sentinels == list(range(task.spans))
    assert rows.attention_mask.all() and rows.decoder_attention_mask.all()
    assert rows.labels.shape[1] == task.target_length
    assert rows.input_ids.shape[1] == task.length - task.lost + task.spans + 1
    mask = task.mask(rng)
    source, target = task.corrupt(pieces[0].numpy(), mask)
    assert [x for x in target if x < task.sentinel(0)] == pieces[0][mask].tolist()
    assert [x for x in source if x < task.sentinel(0)] == pieces[0][~mask].tolist()


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_noise_is_that_of_the_recipe(corpus, options):
    """Exactly so many tokens in so many spans, whatever is drawn."""
    task, rng = Spans(corpus, **options), np.random.default_rng(1)
    lost = min(max(round(task.length * task.noise), 1), task.length - 1)
    assert task.lost == lost and task.spans <= task.length - lost
    if task.length >= 17 and task.noise == 0.15:
        assert abs(lost / task.length - 0.15) <= 0.5 / task.length
        assert abs(lost / task.spans - 3) <= 1.5 / task.spans
    for _ in range(200):
        mask = task.mask(rng)
        assert mask.shape == (task.length,) and mask.sum() == lost
        starts = (mask & ~np.insert(mask[:-1], 0, False)).sum()
        assert starts == task.spans and not mask[0] and mask[-1]


def test_spans_are_drawn_uniformly_among_all_ways_to_divide():
    """Of 4 lost tokens in 2 spans the first has 1, 2 or 3, each as often; and so what is left."""
    task, rng = Spans(length=8, noise=0.5, mean_span=2.0), np.random.default_rng(5)
    first, left = np.zeros(4), np.zeros(4)
    for _ in range(3000):
        mask = task.mask(rng)
        begin = int(mask.argmax())
        left[begin] += 1
        first[int((~mask[begin:]).argmax())] += 1
    for counts in (first, left):
        assert counts[0] == 0 and abs(counts[1:] - 1000).max() < 5 * (3000 * 2 / 9) ** 0.5


def test_rows_come_from_the_seed_and_parts_do_not_meet(corpus):
    task = Spans(corpus, length=40)
    assert task.sample(9, 4).labels.equal(Spans(corpus, length=40).sample(9, 4).labels)
    assert not task.sample(9, 4).labels.equal(task.sample(9, 5).labels)
    held_out = task.evaluations()["held-out"]
    train, apart = task._text._corpus.train, held_out._text._corpus.held_out
    assert held_out._text._corpus is task._text._corpus
    assert len(apart) == pytest.approx(0.1 * (len(train) + len(apart)), rel=0.01)
    for part, stream in (("train", train), ("held-out", apart)):
        text = bytes(stream.astype(np.uint8))
        of = task if part == "train" else held_out
        rows = of.sample(5, 1)
        for source, target in zip(rows.input_ids, rows.labels, strict=True):
            assert bytes(of.restored(source, target)) in text
    rows = task.held_out(6)
    assert rows.labels.equal(held_out.held_out(6).labels)
    for source, target in zip(rows.input_ids, rows.labels, strict=True):
        assert bytes(task.restored(source, target)) in bytes(apart.astype(np.uint8))


@pytest.mark.usefixtures("no_shape_checks")
def test_perplexity_is_of_the_targets_tokens(corpus):
    task = Spans(corpus, length=40)
    labels = task.sample(3, 1).labels
    losses = torch.full(labels.shape, 0.7)
    labels[0, 4:], losses[0, 4:] = -100, 9.0
    assert task.score(losses, labels) == {"perplexity": pytest.approx(np.exp(0.7))}
    with pytest.raises(ValueError, match="losses must have labels' shape"):
        task.score(losses[:, 1:], labels)


def test_a_row_reads_as_text(corpus):
    task = Spans(corpus, length=60)
    row = task.sample(1, 0)
    source, target = task.decode(row.input_ids[0]), task.decode(row.labels[0])
    assert target.startswith("<0>") and source.endswith(f"<{task.spans - 1}>")
    assert "says" in source.replace("<", "") or "line" in source


def test_sizes_follow_from_cut(corpus):
    task = Spans(corpus).cut(64, "bpe")
    assert task.length == 64 and task.vocab_size == 2048 + task.spans + 2
    assert Spans(corpus).cut(None, "byte") == Spans(corpus)


def test_a_saved_tokenizer_makes_the_rows(corpus):
    for options in ({}, {"tokenizer": "bpe", "text_vocab_size": 280}):
        task = Spans(corpus, length=40, **options)
        tokenizer = task.saved_tokenizer()
        for row in task.sample(5, 1).input_ids:
            text = task.decode(row)
            ids = tokenizer.encode(text).ids
            assert ids[-1] == task.eos
            if task.tokenizer == "byte" and "\N{REPLACEMENT CHARACTER}" not in text:
                assert ids == row.tolist()
        assert tokenizer.token_to_id("<0>") == task.sentinel(0)
        assert tokenizer.token_to_id("<pad>") == task.pad
