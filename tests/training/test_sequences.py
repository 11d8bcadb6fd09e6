"""Text as sequences of tokens: nothing lost, nothing twice, documents apart."""

import json

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from heedful.data import ByteTokenizer
from heedful.training.sequences import (
    IGNORE,
    EvaluationSequences,
    TokenFile,
    TrainingSequences,
    encode,
    leading_bos,
    shuffled,
)
from heedful_lab.commands.train.start import _with_ends
from heedful_lab.tasks.vocabulary import byte_pairs, bytes_alone
from helpers.small_models import tokenizer_of_words


def lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 1000])
@pytest.mark.parametrize("seed", [0, 7, 1 << 40])
def test_a_shuffled_order_has_every_place_once(count, seed):
    order = [shuffled(i, count, seed) for i in range(count)]
    assert sorted(order) == list(range(count))
    if count == 1000:
        assert order != [shuffled(i, count, seed + 1) for i in range(count)]
        # No trace of the order: neighbours are as far apart as in a random permutation (a third).
        assert 0.3 < np.abs(np.diff(order)).mean() / count < 0.37


def test_an_epoch_predicts_every_token_of_the_text_once(tmp_path):
    texts = [f"text number {i} " * (i % 5 + 1) for i in range(60)]
    data = lines(tmp_path / "a.jsonl", texts)
    other = lines(tmp_path / "b.jsonl", ["held out " * 9])
    tokenizer = _with_ends(bytes_alone())
    encoded = encode([data], [other], tokenizer, tmp_path / "made", length=16, most_tokens=10**6)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    stream = [i for text in texts for i in (bos, *text.encode(), eos)]
    ids, first, silent = encoded.train.read(0, encoded.train.tokens)
    assert ids.tolist() == stream and not silent.any()
    assert np.flatnonzero(first).tolist() == [i for i, token in enumerate(stream) if token == bos]
    assert encoded.train.text_bytes == sum(len(text) for text in texts)
    rows = TrainingSequences(encoded.train, 16, 1, seed=3)
    epoch = [rows[i] for i in range(rows.in_epoch)]
    predicted = sorted(i for row in epoch for i in row["labels"][1:].tolist())
    whole = stream[1 : rows.in_epoch * 15 + 1]
    assert predicted == sorted(IGNORE if token == bos else token for token in whole)
    assert [row["input_ids"].tolist() for row in epoch] != sorted(
        row["input_ids"].tolist() for row in epoch
    )
    again = [rows[rows.in_epoch + i]["input_ids"].tolist() for i in range(rows.in_epoch)]
    assert again != [
        row["input_ids"].tolist() for row in epoch
    ]  # another order, the same sequences
    assert sorted(again) == sorted(row["input_ids"].tolist() for row in epoch)


def test_positions_start_anew_in_each_document(tmp_path):
    path = tmp_path / "made"
    raw = np.array([5, 6, 7, 8, 9, 10], np.uint32)
    raw[[0, 2]] |= 1 << 31
    raw.tofile(path)
    row = TrainingSequences(TokenFile(path, 6, 6), 6, 1, 0)[0]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9, 10]
    assert row["position_ids"].tolist() == [0, 1, 0, 1, 2, 3]
    assert row["labels"].tolist() == [IGNORE, 6, IGNORE, 8, 9, 10]


def test_sequences_begin_with_bos_where_the_tokenizer_puts_it_before_a_text(tmp_path):
    data = lines(tmp_path / "a.jsonl", ["abcdefgh" * 9])
    other = lines(tmp_path / "b.jsonl", ["kl" * 9])
    tokenizer, made = tokenizer_of_words(), tmp_path / "made"
    assert leading_bos(tokenizer) == tokenizer.bos_token_id == 256
    without = PreTrainedTokenizerFast(tokenizer_object=bytes_alone(), bos_token="a")
    assert leading_bos(without) is None is leading_bos(ByteTokenizer())
    for _ in range(2):  # the second time they are read back
        text = encode([data], [other], tokenizer, made, length=16, most_tokens=10**6)
    assert text.train.bos == text.held_out.bos == 256
    letters = tokenizer("abcdefgh" * 9, add_special_tokens=False)["input_ids"]
    rows = TrainingSequences(text.train, 16, 4, seed=0)
    ids = torch.stack([rows[i]["input_ids"] for i in range(4)])
    assert (ids[:, 0] == 256).all() and not (ids[:, 1:] == 256).any()
    assert sorted(ids[:, 1:].flatten().tolist()) == sorted(letters[:60])
    assert rows[0]["position_ids"].tolist() == list(range(16))
    held_out = EvaluationSequences(text.held_out, 16)[1]
    letters = tokenizer("kl" * 9, add_special_tokens=False)["input_ids"][15:]
    assert held_out["input_ids"].tolist()[:4] == [256, *letters]


def test_held_out_rows_ask_for_each_token_once_and_are_filled_up(tmp_path):
    path = tmp_path / "made"
    np.arange(100, 123, dtype=np.uint32).tofile(path)
    rows = EvaluationSequences(TokenFile(path, 23, 23), 8, multiple=3)
    assert len(rows) == 6
    labels = torch.cat([rows[i]["labels"][1:] for i in range(len(rows))])
    assert labels[labels != IGNORE].tolist() == list(range(101, 123))
    assert all(len(rows[i]["input_ids"]) == 8 for i in range(6))


def test_documents_are_held_out_whole_and_always_the_same(tmp_path):
    texts = [f"document {i}: " + "words " * 20 for i in range(200)]
    data, tokenizer = lines(tmp_path / "a.jsonl", texts), _with_ends(bytes_alone())
    encodings = [
        encode([data], (), tokenizer, tmp_path / str(n), length=32, most_tokens=10**6)
        for n in range(2)
    ]
    ids = [
        encoding.held_out.read(0, encoding.held_out.tokens)[0].tolist() for encoding in encodings
    ]
    assert ids[0] == ids[1]
    apart = [
        text for text in bytes(i if i < 256 else 0 for i in ids[0]).decode().split("\0") if text
    ]
    assert set(apart) < set(texts) and 4 <= len(apart) <= 20
    trained = encodings[0].train.read(0, encodings[0].train.tokens)[0]
    assert encodings[0].train.tokens + encodings[0].held_out.tokens == sum(
        len(t) + 2 for t in texts
    )
    assert encodings[0].held_out.text_bytes == sum(map(len, apart))
    assert apart[0].encode() not in bytes(i if i < 256 else 0 for i in trained.tolist())


@pytest.mark.parametrize("kind", ["bytes", "pairs"])
def test_of_one_text_the_end_is_held_out(tmp_path, kind):
    text = "".join(f"línea {i}\n" for i in range(900))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = ByteTokenizer() if kind == "bytes" else _with_ends(byte_pairs([text], 300))
    encoding = encode(
        [tmp_path / "a.txt"], (), tokenizer, tmp_path / "made", length=32, most_tokens=10**6
    )
    total = encoding.train.tokens + encoding.held_out.tokens
    assert encoding.held_out.tokens == pytest.approx(total / 20, abs=1)
    ids = encoding.held_out.read(0, encoding.held_out.tokens)[0]
    decoded = tokenizer.decode(ids[1:].tolist(), skip_special_tokens=True)
    assert text.endswith(decoded.lstrip("\N{REPLACEMENT CHARACTER}"))
    assert encoding.held_out.text_bytes == len(decoded.encode())
    # What is predicted in both parts: all bytes but the first of the evaluation part, and, where no
    # BOS stands before it, the first of the text.
    first = len(tokenizer.decode(ids[:1].tolist()).encode())
    unpredicted = first + (kind == "bytes")
    assert encoding.train.text_bytes + encoding.held_out.text_bytes == pytest.approx(
        len(text.encode()) - unpredicted, abs=3 + first
    )


def test_text_that_spells_a_special_token_is_text(tmp_path):
    tokenizer = _with_ends(bytes_alone())
    text = "one <eos> two <bos> three "
    data = lines(tmp_path / "a.jsonl", [text * 5] * 4)
    other = lines(tmp_path / "b.jsonl", [text])
    encoding = encode([data], [other], tokenizer, tmp_path / "made", length=16, most_tokens=10**6)
    ids = encoding.train.read(0, encoding.train.tokens)[0].tolist()
    assert ids.count(tokenizer.bos_token_id) == ids.count(tokenizer.eos_token_id) == 4
    assert bytes(i for i in ids if i < 256).decode() == text * 20


def test_no_more_is_read_than_the_run_needs(tmp_path):
    data = lines(tmp_path / "a.jsonl", ["text " * 1000] * 2000)  # 10 MB
    (tmp_path / "bad.txt").write_bytes(b"\xff")  # would raise if it were read
    tokenizer = ByteTokenizer()
    encoding = encode(
        [data, str(tmp_path / "bad.txt")], (), tokenizer, tmp_path / "made", length=64,
        most_tokens=50_000,
    )  # fmt: skip
    assert 50_000 <= encoding.train.tokens <= 56_000


def test_too_little_text_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ValueError, match=r"data has 5 tokens, too few for sequences of 64"):
        encode([tmp_path / "a.txt"], (), ByteTokenizer(), tmp_path / "made", length=64,
               most_tokens=100)  # fmt: skip
    assert not list((tmp_path / "made").iterdir())
    (tmp_path / "b.txt").write_text("long " * 100)
    with pytest.raises(ValueError, match=r"held_out has 5 tokens, too few for sequences of 64"):
        encode([tmp_path / "b.txt"], [tmp_path / "a.txt"], ByteTokenizer(), tmp_path / "made",
               length=64, most_tokens=100)  # fmt: skip
    assert not list((tmp_path / "made").iterdir())


def test_a_file_cut_short_is_reported(tmp_path):
    (tmp_path / "a.txt").write_text("long " * 1000)
    options = {"length": 64, "most_tokens": 10**6}
    encoding = encode([tmp_path / "a.txt"], (), ByteTokenizer(), tmp_path / "made", **options)
    again = encode(["gone"], (), ByteTokenizer(), tmp_path / "made", **options)  # read back
    assert again == encoding
    encoding.train.path.write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"train\.tokens is cut short or gone; delete"):
        encode([tmp_path / "a.txt"], (), ByteTokenizer(), tmp_path / "made", **options)
