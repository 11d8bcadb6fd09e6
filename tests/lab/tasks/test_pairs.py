"""Pairs that the user gives: read, split, cut into tokens, refused where they do not fit."""

import gzip
import json
import re
import sys
import types

import pytest

from heedful.data import TextPair, text_pairs
from heedful_lab.tasks import Summarise, Translate

LINES = [(f"source {i % 40} né", f"the target is {i} {'x' * (i % 7)}..") for i in range(100)]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{a}\t{b}\n" for a, b in LINES))
    return (str(path),)


def test_lines_and_json_and_folders_in_order(tmp_path):
    (tmp_path / "b.tsv").write_bytes("\ufeffein Haus\ta house\r\nzwei\ttwo".encode())
    lines = [{"source": "drei", "target": "three\u2028"}, {"source": "vier ", "target": "four"}]
    data = "\n\n".join(json.dumps(x, ensure_ascii=False) for x in lines).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "notes.txt").write_text("no pairs")
    pairs = text_pairs([tmp_path])
    assert pairs == [
        TextPair(f"{tmp_path}/a.jsonl.gz:1", "drei", "three"),
        TextPair(f"{tmp_path}/a.jsonl.gz:3", "vier", "four"),
        TextPair(f"{tmp_path}/b.tsv:1", "ein Haus", "a house"),
        TextPair(f"{tmp_path}/b.tsv:2", "zwei", "two"),
    ]
    path = tmp_path / "any.name"
    path.write_text("one\teins\n")
    assert text_pairs([str(path)]) == [TextPair(f"{path}:1", "one", "eins")]


BAD = {
    ": line 2 has 1 columns; each line must be a source, a tabulator": b"a\tb\nc d\n",
    ": line 3 has 3 columns": b"a\tb\nc\td\ne\tf\tg\n",
    ": line 2 has 1 columns": b"a\tb\n\nc\td\n",
    ": line 1 has an empty target; fill it, or leave the line out": b"a\t \nc\td\n",
    ": line 2 has an empty source": b"a\tb\n\td\n",
    " holds no pairs; leave it out": b"",
    " is not UTF-8 at byte 2": b"a\t\xff\n",
}


@pytest.mark.parametrize("message", BAD)
def test_columns_that_are_empty_or_unequal_are_named_by_their_line(tmp_path, message):
    path = tmp_path / "pairs.tsv"
    path.write_bytes(BAD[message])
    with pytest.raises(ValueError, match=re.escape(f"'{path}'" + message)):
        text_pairs([path])


BAD_JSON = {
    ': line 1 has no string "target"': {"source": "a"},
    ": line 1 has an empty source": {"source": " ", "target": "b"},
    'each line must be an object like {"source": "...", "target": "..."}': [1],
}


@pytest.mark.parametrize("message", BAD_JSON)
def test_json_lines_that_are_no_pairs_are_named(tmp_path, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(BAD_JSON[message]))
    with pytest.raises(ValueError, match=re.escape(message)):
        text_pairs([path])


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.tsv").write_text("a\tb\n")
    for paths, message in {
        (): "paths must name at least one file of pairs",
        "x": "paths must be a sequence of paths, got 'x'",
        (tmp_path / "none.tsv",): " does not exist",
        (tmp_path / "empty",): " holds no text in .tsv, .jsonl",
        (tmp_path, tmp_path / "a.tsv"): "twice",
    }.items():
        with pytest.raises(ValueError, match=message):
            text_pairs(paths)


ROWS = {
    "wmt": [{"translation": {"de": "ein Haus", "en": "a house"}}],
    "cnn": [{"article": "long", "highlights": "short", "id": "7"}],
    "xsum": [{"document": "long", "summary": "short"}],
    "own": [{"question": "why", "answer": "because", "n": 3}],
    "half": [{"source": "a", "target": None}],
    "blank": [{"source": "a", "target": " "}],
}


@pytest.fixture
def hub(monkeypatch):
    module = types.ModuleType("datasets")
    calls = []

    def load_dataset(name, config, split, streaming):
        calls.append((name, config, split, streaming))
        return ROWS[name]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_columns_of_data_sets(hub):
    columns_by_path = {
        "hf:wmt:de-en:test": ("ein Haus", "a house"),
        "hf:wmt:de-en::en:de": ("a house", "ein Haus"),
        "hf:cnn": ("long", "short"),
        "hf:xsum": ("long", "short"),
        "hf:own:::question:answer": ("why", "because"),
    }
    for path, columns in columns_by_path.items():
        assert text_pairs([path]) == [TextPair(f"{path}[0]", *columns)]
    assert hub[0] == ("wmt", "de-en", "test", False) and hub[1] == ("wmt", "de-en", "train", False)
    wrong = {
        "hf:own": "has no two texts source and target but question, answer, n; name the columns",
        "hf:half": "row 0 has no two texts",
        "hf:blank": "row 0 has an empty target",
        "hf:own:::question:reply": "has no two texts question and reply",
        "hf:own:a:b:c": "is not a dataset of pairs; write hf:NAME",
    }
    for path, message in wrong.items():
        with pytest.raises(ValueError, match=message):
            text_pairs([path])


def decoded(task, rows) -> set[tuple[str, str]]:
    both = zip(rows.input_ids, rows.labels, strict=True)
    return {(task.decode(source), task.decode(target)) for source, target in both}


@pytest.mark.parametrize("options", [{}, {"tokenizer": "bpe", "vocab_size": 300}], ids=str)
def test_given_pairs_are_split_by_source(pairs, options):
    """40 sources in 100 pairs: 4 are for evaluation, with all their targets."""
    task = Translate(pairs, length=40, **options)
    rows = task.held_out()
    held_out = decoded(task, rows)
    sources = {source for source, _ in held_out}
    assert len(sources) == 4
    assert held_out == {pair for pair in LINES if pair[0] in sources}
    sample = task.sample(400, 1)
    trained = decoded(task, sample)
    assert trained <= {pair for pair in LINES if pair[0] not in sources} and len(trained) > 80
    few = task.held_out(3)
    assert len(few.labels) == 3 and {task.decode(x) for x in few.input_ids} <= sources
    judged = task.evaluations()["held-out"]
    assert judged.held_out().labels.equal(rows.labels)
    assert judged._tokens is task._tokens, "read and trained once"
    assert task.vocab_size == (300 if options else 258) and task.eos == task.vocab_size - 1


def test_given_pairs_are_judged_by_their_own_measures(pairs):
    task = Translate(pairs, length=40)
    assert (task.metric, task.also) == ("bleu", ("error", "loss"))
    labels = task.held_out().labels
    assert task.score(task.references(labels), labels)["bleu"] == pytest.approx(100)
    other = Summarise(pairs, length=40)
    assert (other.metric, other.also) == ("rouge_l", ("loss",)) and other.target_length == 10
    assert set(other.score(other.references(labels), labels)) == {"rouge_l"}
    with pytest.raises(ValueError, match="texts are generated pairs"):
        task.texts(1, 0)


def test_a_pair_that_is_too_long_is_named(pairs):
    message = (
        rf"{pairs[0]}:1: its source has 13 tokens with the end, and sequences have room for 12"
    )
    with pytest.raises(ValueError, match=message):
        Translate(pairs, length=12).sample(1, 0)
    with pytest.raises(ValueError, match=r"its target has .* tokens with the end"):
        Translate(pairs, length=40, target_length=10).sample(1, 0)
    assert Translate(pairs, length=40).sample(1, 0).labels.shape[0] == 1


def test_one_source_alone_cannot_be_held_out(tmp_path):
    path = tmp_path / "one.tsv"
    path.write_text("a\tb\na\tc\n")
    with pytest.raises(ValueError, match=r"at least 2 different sources, .* got 1"):
        Translate((str(path),)).sample(1, 0)


@pytest.mark.parametrize("task", [Translate(), Summarise()], ids=str)
def test_a_saved_tokenizer_makes_the_rows(task):
    tokenizer = task.saved_tokenizer()
    rows = task.sample(20, 1)
    for (source, _), row in zip(task.texts(20, 1), rows.input_ids.tolist(), strict=True):
        assert tokenizer.encode(source).ids == [x for x in row if x != task.pad]
    assert tokenizer.token_to_id("</s>") == task.eos and tokenizer.token_to_id("<pad>") == task.pad
