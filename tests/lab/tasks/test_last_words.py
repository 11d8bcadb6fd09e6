"""Last words and sliding windows: what is cut where, and that every token counts once."""

import json

import pytest

from heedful_lab.tasks.last_words import detokenised, last_words, passages_of, read_passages
from heedful_lab.tasks.windows import domain_windows, domains, windows


def test_the_last_word_is_what_stands_behind_the_last_space():
    passages = last_words(["One bus and\nanother  bus", "a b c "])
    assert [(x.context, x.word) for x in passages] == [
        ("One bus and\nanother", " bus"), ("a b", " c"),
    ]  # fmt: skip
    assert len(last_words(["a b", "c d", "e f"], 2)) == 2
    first, second, again = (x.key for x in last_words(["a b", "c d", "a b"]))
    assert again == f"{first} 2" and second not in (first, again)
    assert last_words(["c d"])[0].key == second
    with pytest.raises(ValueError, match="passage 2 is 'alone', a single word"):
        last_words(["a b", "alone"])


def test_passages_come_from_lines_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\n three four \n")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in "ab"))
    assert read_passages(str(tmp_path / "a.txt")) == ["one two", "three four"]
    assert read_passages(str(tmp_path / "b.jsonl")) == ["a", "b"]
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="holds no passage"):
        read_passages(str(tmp_path / "a.txt"))


def test_passages_are_cut_where_the_last_word_stands_before(tmp_path):
    sentence = "Many words stand in this sentence about a river and its boats."
    book = [sentence] * 5 + ["It ends with something unheard."] + [sentence] * 6
    book += ["Nothing else is said about this River!"] + [sentence] * 5
    (tmp_path / "book.txt").write_text(" ".join(book))
    passages = passages_of((str(tmp_path),), 50, 0)
    for text in passages:
        words = text.split()
        assert 60 < len(words) < 2 * 60
        assert words[-1] in ("boats", "River")
        assert any(x.strip(".").lower() == words[-1].lower() for x in words[:-1])
    # The sixth sentence is the first to pass 60 words, but its last word is new; the next one does.
    assert passages[0].endswith("unheard. " + sentence[:-1])
    assert passages == passages_of((str(tmp_path),), 50, 1)
    assert len(passages_of((str(tmp_path),), 1, 0)) == 1
    (tmp_path / "book.txt").write_text("too short")
    with pytest.raises(ValueError, match="holds no passage of 60 words"):
        passages_of((str(tmp_path),), 50, 0)


@pytest.mark.parametrize(
    ("apart", "joined"),
    [
        ("`` i do n't know , '' said she , `` but we 'll see ! ''",
         '"i don\'t know," said she, "but we\'ll see!"'),
        ("he 's there ( or not ) ; she is n't .", "he's there (or not); she isn't."),
        ("“ no ” and ‘ yes", "\"no\" and ' yes"),
        ("plain words stay", "plain words stay"),
    ],
)  # fmt: skip
def test_marks_join_their_words(apart, joined):
    assert detokenised(apart) == joined
    assert detokenised(joined) == joined


@pytest.mark.parametrize(
    ("tokens", "length", "stride"), [(10, 4, 2), (9, 4, 3), (7, 10, 5), (33, 8, 1)]
)
def test_every_token_but_the_first_counts_once(tokens, length, stride):
    ids = list(range(tokens))
    ends = [3 * (i + 1) for i in ids]
    result = windows(ids, ends, length, stride)
    scored = [token for x in result for token in x.ids[x.first :]]
    assert scored == ids[1:]
    assert sum(x.nbytes for x in result) == 3 * (tokens - 1)
    for x in result[1:]:
        assert x.first >= length - stride and 1 < len(x.ids) <= length
    assert result[0].first == 1
    assert len({x.key for x in result}) == len(result)
    assert windows([5], [1], length, stride) == []
    with pytest.raises(ValueError, match="stride must be a whole number from 1 to 3, got 4"):
        windows(ids, ends, 4, 4)


@pytest.mark.parametrize("lead", [1, 2])
def test_what_begins_a_text_begins_every_window(lead):
    ids, ends = [99] * lead + list(range(20)), [0] * lead + list(range(2, 42, 2))
    result = windows(ids, ends, 6, 3)
    assert all(x.ids[:lead] == (99,) * lead and len(x.ids) <= 6 for x in result)
    assert [token for x in result for token in x.ids[x.first :]] == list(range(20))
    assert sum(x.nbytes for x in result) == 40
    with pytest.raises(ValueError, match="stride must be a whole number from 1 to"):
        windows(ids, ends, 6, 6 - lead + 1)


def test_domains_are_called_by_their_last_part(tmp_path):
    assert domains(("a/book.txt", "b/essays", "hf:wiki::test")) == {
        "book": ("a/book.txt",), "essays": ("b/essays",), "hf:wiki::test": ("hf:wiki::test",),
    }  # fmt: skip
    assert list(domains(("a/x.txt", "b/x.txt"))) == ["a/x.txt", "b/x.txt"]
    assert domains(()) == {"standard library": ()}

    def encode(text):
        return list(text.encode()), list(range(1, len(text.encode()) + 1))

    (tmp_path / "a.txt").write_text("abcde")
    (tmp_path / "b.txt").write_text("z")
    (tmp_path / "c.txt").write_text("fgh")
    result = domain_windows((str(tmp_path),), encode, 9, 4, 2)
    assert [bytes(x.ids) for x in result] == [b"abcd", b"cde", b"fgh"]  # none over a border
    assert len(domain_windows((str(tmp_path),), encode, 2, 4, 2)) == 2
    with pytest.raises(ValueError, match="holds no two tokens"):
        domain_windows((str(tmp_path / "b.txt"),), encode, 9, 4, 2)
