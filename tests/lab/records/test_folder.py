"""Whose run a folder holds: none yet, the same, or another."""

import json

import pytest

from heedful_lab.records.folder import UNFINISHED, resumed

NOW = {"options": {"steps": 3, "seed": 0}, "inputs": {"data": "a1"}}


def resume(folder, now=NOW):
    return resumed(folder, "run.json", lambda: now)


def test_a_new_folder_has_no_run(tmp_path):
    assert resume(tmp_path / "absent") is None
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / ".lock").touch()
    assert resume(tmp_path) is None


def test_the_same_run_is_resumed_with_what_its_file_says(tmp_path):
    about = NOW | {"ended": None}
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert resume(tmp_path) == about


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("notes.txt", "mine", r"holds notes\.txt and no run\.json, so no run of this command"),
        ("run.json", "{bad", r"run\.json is damaged .*; choose another folder, or delete this"),
        ("run.json", "", r"run\.json is damaged"),
        ("run.json", "[1]", r"run\.json is damaged \(it holds no object\)"),
        ("run.json", '{"options": {}}', r"has no inputs: an older version, or another command"),
        (
            "run.json",
            '{"options": {"steps": 3, "seed": 1}, "inputs": {"data": "b2"}}',
            r"of another run: seed was 1 and is 0 now; inputs\.data was \"b2\" and is \"a1\" now",
        ),
    ],
)
def test_another_s_folder_is_refused_and_stays(tmp_path, file, content, message):
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        resume(tmp_path)
    assert (tmp_path / file).read_text() == content
    assert [x.name for x in tmp_path.iterdir()] == [file]


def test_of_many_differences_six_are_named(tmp_path):
    before = {"options": {f"x{i}": 0 for i in range(8)}}
    (tmp_path / "run.json").write_text(json.dumps(before))
    now = {"options": {f"x{i}": 1 for i in range(8)}}
    with pytest.raises(ValueError, match=r"x5 was 0 and is 1 now; and 2 more; choose"):
        resume(tmp_path, now)
