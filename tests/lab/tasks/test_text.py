import math
import re
from pathlib import Path

import pytest
import torch

from heedful.data import corpus
from heedful_lab.tasks import Text, token_losses
from helpers import ROOT

PUBLIC = ROOT.parent / "shared" / "data"
WORDS = "thé quick brown fox jumps over the lazy dog while seven wizards — boxing — jest "


@pytest.fixture
def folder(tmp_path):
    """Forty documents, each of words that name the document."""
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text("".join(f"<{i:02}>{WORDS}" for _ in range(30 + i)))
    return str(tmp_path)


@pytest.fixture(params=["byte", "bpe"])
def task(request, folder):
    size = None if request.param == "byte" else 400
    return Text(paths=(folder,), length=64, tokenizer=request.param, vocab_size=size)


def names(text):
    return set(re.findall(r"<(\d\d)>", text))


def test_rows(task):
    samples = task.sample(200, seed=0)
    assert samples.input_ids.shape == (200, 64) == samples.labels.shape
    assert samples.input_ids[:, 0].eq(task.bos).all()
    assert task.vocab_size == (257 if task.tokenizer == "byte" else 400)
    assert samples.input_ids.max() < task.vocab_size
    bos = samples.input_ids == task.bos
    assert samples.labels[bos].eq(-100).all()
    assert samples.labels[~bos].equal(samples.input_ids[~bos])
    assert samples.attention_mask.eq(1).all()
    source = "".join(document.text for document in corpus(task.paths))
    for ids in samples.input_ids:
        if ids[1:].ne(task.bos).all():
            assert task.decode(ids).strip("�") in source


def test_whole_documents_are_held_out(task):
    evaluation = task.held_out()
    held_names = names("".join(task.decode(ids) for ids in evaluation.input_ids))
    train_names = names("".join(task.decode(ids) for ids in task.sample(3000, 0).input_ids))
    assert held_names and not held_names & train_names
    assert len(held_names | train_names) == 40
    texts = [document.text for document in corpus(task.paths)]
    size = sum(len(text) for i, text in enumerate(texts) if f"{i:02}" in held_names)
    assert 0.06 < size / sum(map(len, texts)) <= 0.1


def test_held_out_rows_cover_the_part_once(task):
    evaluation = task.held_out()
    stream = torch.from_numpy(task._corpus.held_out.astype("int64"))
    assert evaluation.input_ids[:, 1:].flatten().equal(stream[: 63 * len(evaluation.input_ids)])
    assert len(stream) - 63 * len(evaluation.input_ids) < 63
    some = task.held_out(5)
    assert len(some.input_ids) == 5
    assert (
        len(
            {tuple(row) for row in some.input_ids.tolist()}
            - set(map(tuple, evaluation.input_ids.tolist()))
        )
        == 0
    )
    assert task.held_out(10**6).input_ids.equal(evaluation.input_ids)


def test_evaluation_is_the_held_out_part(task):
    (name, split), *others = task.evaluations().items()
    assert name == "held-out" and not others and split.part == "held-out"
    assert split._corpus is task._corpus
    evaluation_names = names("".join(task.decode(ids) for ids in task.held_out().input_ids))
    words = names("".join(split.decode(ids) for ids in split.sample(200, 0).input_ids))
    assert words <= evaluation_names


def test_one_document_is_cut(tmp_path):
    file = tmp_path / "one.txt"
    text = "".join(chr(ord("a") + i * 7 % 26) + str(i) for i in range(1000))
    file.write_text(text)
    task = Text(paths=(str(file),), length=20)
    assert (
        bytes(task._corpus.train.tolist()).decode() + bytes(task._corpus.held_out.tolist()).decode()
        == text
    )
    assert len(task._corpus.held_out) == len(text) // 10


def test_score_of_a_uniform_model():
    task = Text()
    labels = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))
    labels[:, 0] = -100
    labels[1, 20] = -100
    score = task.score(token_losses(torch.zeros(3, 50, 257), labels), labels)
    assert score["perplexity"] == pytest.approx(257)
    assert score["bits_per_byte"] == pytest.approx(math.log2(257))


def test_score_counts_the_bytes_of_the_predicted_tokens(folder):
    task = Text(paths=(folder,), length=64, tokenizer="bpe", vocab_size=400)
    evaluation = task.held_out()
    rows = "".join(task.decode(ids) for ids in evaluation.input_ids[:1])
    labels = evaluation.labels[:1]
    assert not labels[:, 1:].eq(-100).any()
    size = int(task._corpus.token_bytes[labels[0, 1:].numpy()].sum())
    assert len(rows.replace("�", "").encode()) <= size <= len(rows.encode())
    losses = torch.full(labels.shape, 2.0)
    losses[:, -1] = 1e9  # answers nothing
    score = task.score(losses, labels)
    assert score["perplexity"] == pytest.approx(math.exp(2))
    assert score["bits_per_byte"] == pytest.approx(63 * 2 / math.log(2) / size)
    assert task.score(losses.masked_fill(losses < 9, 5000.0), labels)["perplexity"] == math.inf


def test_bpe_keeps_every_byte_and_fewer_tokens(folder):
    task = Text(paths=(folder,), tokenizer="bpe", vocab_size=400)
    for part, stream in (("train", task._corpus.train), ("held_out", task._corpus.held_out)):
        texts = "".join(d.text for d in corpus(task.paths))
        decoded = task.decode(stream.tolist())
        assert len(stream) < 0.5 * len(decoded), part
        assert names(decoded) < names(texts)
    total = sum(int(task._corpus.token_bytes[s].sum()) for s in task._corpus[:2])
    assert total == sum(len(d.text.encode()) for d in corpus(task.paths))


def test_bpe_never_makes_bos_of_text(tmp_path):
    file = tmp_path / "tricky.txt"
    file.write_text("<bos></s>[PAD]<|endoftext|>\x00 " * 200)
    task = Text(paths=(str(file),), length=16, tokenizer="bpe", vocab_size=300)
    assert (task._corpus.train != task.bos).all()
    assert task.sample(20, 0).labels[:, 1:].ne(-100).all()


def test_configuration_is_a_value(folder):
    assert Text(paths=[Path(folder)]) == Text(paths=(folder,))
    assert hash(Text(paths=[Path(folder)])) == hash(Text(paths=(folder,)))
    assert Text(tokenizer="bpe").vocab_size == 4096
    assert "_corpus" not in Text(paths=("nowhere",)).__dict__  # built without reading


def test_standard_library_is_the_default():
    task = Text(limit_bytes=200_000)
    samples = task.sample(4, seed=0)
    assert samples.input_ids.shape == (4, 256)
    size = len(task._corpus.train) + len(task._corpus.held_out)
    separators = int((task._corpus.train == 256).sum() + (task._corpus.held_out == 256).sum())
    assert size - separators == 200_000


def test_public_text():
    if not PUBLIC.is_dir():
        pytest.skip("needs the public text folder shared/data beside the checkout")
    plays = Text(paths=(str(PUBLIC / "shakespeare.txt"),))
    assert len(plays._corpus.held_out) == pytest.approx(111_539, rel=0.01)
    essays = Text(paths=(str(PUBLIC / "essays"),))
    size = len(essays._corpus.held_out) / (len(essays._corpus.held_out) + len(essays._corpus.train))
    assert 0.05 < size <= 0.11


@pytest.mark.parametrize("words", ["Héllo\n wörld €", "\x00\x7f\xad tab\t", " a  b", ""])
def test_a_saved_tokenizer_of_bytes_gives_bytes(words):
    tokenizer = Text().saved_tokenizer()
    ids = tokenizer.encode(words).ids
    assert ids == [256, *words.encode()]
    assert tokenizer.decode(ids) == words


def test_a_saved_tokenizer_of_pairs_gives_the_tasks_rows(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} says {i * i % 97}. " for i in range(3000)))
    task = Text(paths=(str(path),), tokenizer="bpe", vocab_size=300, length=40)
    row = task.sample(1, 0).input_ids[0].tolist()
    tokenizer = task.saved_tokenizer()
    assert tokenizer.get_vocab_size() == 300
    words = tokenizer.decode(row)
    assert task.decode(row) == words
    again = tokenizer.encode(words).ids
    assert again[0] == task.bos == row[0] and tokenizer.decode(again) == words
