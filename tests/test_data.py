import gzip
import json
import re
import sys
import sysconfig
import types
from itertools import pairwise
from pathlib import Path

import pytest

from heedful.data import Document, corpus, pieces


def texts(*paths, **options):
    return [document.text for document in corpus(paths, **options)]


def test_files_and_folders_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    files = {
        "b/two.md": "2",
        "b/one.txt": "1",
        "z.py": "z",
        "image.png": "no",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
        "a.txt": "á\r\n",
        "empty.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"zipped"))
    assert texts(tmp_path) == ["á\r\n", "1", "2", "zipped", "z"]
    assert texts(tmp_path / "z.py", str(tmp_path / "image.png")) == ["z", "no"]
    assert corpus([tmp_path / "z.py"]) == [Document(str(tmp_path / "z.py"), "z")]


def test_byte_order_mark_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert texts(tmp_path) == ["hello"]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path, suffix):
    # U+2028 ends a line for str.splitlines but not in JSON.
    lines = [{"text": "one\u2028more\n", "id": 7}, {"text": ""}, {"text": "two"}]
    data = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    file = tmp_path / f"d{suffix}"
    file.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    assert corpus([file]) == [
        Document(f"{file}:1", "one\u2028more\n"),
        Document(f"{file}:5", "two"),
    ]


def test_limit_cuts_between_characters(tmp_path):
    (tmp_path / "a.txt").write_text("aé")
    (tmp_path / "b.txt").write_text("ééé")
    assert texts(tmp_path, limit_bytes=100) == ["aé", "ééé"]
    assert texts(tmp_path, limit_bytes=9) == ["aé", "ééé"]
    assert texts(tmp_path, limit_bytes=6) == ["aé", "é"]
    assert texts(tmp_path, limit_bytes=4) == ["aé"]
    assert texts(tmp_path, limit_bytes=3) == ["aé"]
    assert texts(tmp_path, limit_bytes=1) == ["a"]
    with pytest.raises(ValueError, match="limit_bytes must leave room for one character, got 1"):
        texts(tmp_path / "b.txt", limit_bytes=1)


def test_pieces_of_long_texts_join_to_the_texts(tmp_path):
    word = "ä" * 9
    long = "\n".join(f"{word} {i}" for i in range(20_000))
    solid = "x" * 200_000  # no place to cut at
    (tmp_path / "long.txt").write_text(long)
    (tmp_path / "solid.txt.gz").write_bytes(gzip.compress(solid.encode()))
    (tmp_path / "lines.jsonl").write_text(json.dumps({"text": long}) + '\n{"text": "short"}')
    parts = list(pieces([tmp_path]))
    assert max(len(piece.text) for piece in parts) <= 1 << 16
    assert [piece.name.rpartition("/")[2] for piece in parts if piece.first] == [
        "lines.jsonl:1", "lines.jsonl:2", "long.txt", "solid.txt.gz",
    ]  # fmt: skip
    cut = [a.text for a, b in pairwise(parts) if a.name == b.name]
    assert len(cut) > 8 and all(text[-1] in "\n x" for text in cut)
    assert texts(tmp_path) == [long, "short", long, solid]


def test_a_wrong_byte_behind_the_first_piece_is_found_where_it_is(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "é".encode() * 100_000 + b"\xff")
    with pytest.raises(ValueError, match="not UTF-8 at byte 200003;"):
        corpus([path])


def test_standard_library():
    some = corpus(limit_bytes=300_000)
    assert sum(len(document.text.encode()) for document in some) == 300_000
    names = [document.name for document in some]
    assert names == sorted(names)
    folder = Path(sysconfig.get_paths()["stdlib"])
    for document in some[:-1]:
        assert document.text == (folder / document.name).read_bytes().decode()
    assert not [n for n in names if {"site-packages", "test", "tests"} & set(n.split("/"))]
    assert corpus(limit_bytes=300_000) == some


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the package datasets that notes how it was asked."""
    calls = []
    rows = [{"text": "one"}, {"text": ""}, {"text": "two"}]

    def load_dataset(name, config, *, split, streaming):
        calls.append((name, config, split, streaming))
        if name == "missing":
            raise FileNotFoundError("no such dataset")
        return {"columns": [{"body": "x", "id": 1}], "hollow": [{"text": ""}]}.get(name, rows)

    fake = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return calls


def test_hugging_face(hub):
    assert corpus(["hf:me/books"]) == [
        Document("hf:me/books[0]", "one"),
        Document("hf:me/books[2]", "two"),
    ]
    assert texts("hf:books:en", "hf:books::test", "hf:books:en:test", limit_bytes=8) == [
        "one",
        "two",
        "on",
    ]
    assert hub == [
        ("me/books", None, "train", False),
        ("books", "en", "train", True),
        ("books", None, "test", True),
    ]


def test_hugging_face_errors(hub, monkeypatch):
    for path, message in [
        ("hf:missing", "'hf:missing' could not be loaded by datasets: no such dataset; check name"),
        ("hf:columns", "'hf:columns': row 0 has no string \"text\" but body, id"),
        ("hf:hollow", "'hf:hollow' holds no text; take another split"),
        ("hf:", "'hf:' is not a dataset; write hf:NAME[:CONFIG][:SPLIT]"),
        ("hf:a:b:c:d", "'hf:a:b:c:d' is not a dataset; write hf:NAME[:CONFIG][:SPLIT]"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"text {message}")):
            corpus([path])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"needs the package datasets: pip install heedful\[data"):
        corpus(["hf:me/books"])


def test_errors_name_the_path_and_the_way_out(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.bin").write_bytes(b"x")
    bad = {
        "empty.txt": (b"", " is empty; leave it out"),
        "latin.txt": (b"caf\xe9", " is not UTF-8 at byte 3; convert it"),
        "plain.gz": (b"plain text", " is not a whole gzip file"),
        "cut.txt.gz": (gzip.compress(b"a" * 1000)[:-9], " is not a whole gzip file"),
        "torn.txt.gz": (gzip.compress(b"abc")[:10] + b"\xff" * 20, " is not a whole gzip"),
        "bad.jsonl": (b'{"text": "a"}\n{oops', ": line 2 is not JSON"),
        "other.jsonl": (b'{"body": "a"}', ': line 1 has no string "text"; each line must be'),
        "list.jsonl": (b"[1]", ': line 1 has no string "text"'),
        "none.jsonl": (b'{"text": ""}', " is empty"),
        "half.jsonl": (b'{"text": "\\ud800"}', ": line 1 is not Unicode text"),
        "deep.jsonl": (b"[" * 100_000, ": line 1 is not JSON (maximum recursion depth"),
    }
    for name, (data, message) in bad.items():
        (tmp_path / name).write_bytes(data)
        pattern = re.escape(f"text {str(tmp_path / name)!r}{message}")
        with pytest.raises(ValueError, match=pattern):
            corpus([tmp_path / name])
    for path, message in [
        ("nowhere", " does not exist; name a file, a folder or hf:NAME"),
        ("folder", " holds no text in .txt, .md, .py, .jsonl or .gz of these"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            corpus([tmp_path / path])


def test_a_text_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ValueError, match=r"a.txt' is named twice, directly or within a folder"):
        corpus([tmp_path, tmp_path / "a.txt"])


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"paths must be a sequence of paths, got 'a.txt'; write "):
        corpus("a.txt")
    for limit in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="limit_bytes must be a whole number of at least 1"):
            corpus(limit_bytes=limit)
