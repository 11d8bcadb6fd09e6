"""The state of an unfinished run: whose it is, and which of its checkpoints are whole."""

import pytest

from heedful.training.checkpoints import Checkpoints, differences, saved_step

RUN = {"task": {"kind": "Parity", "bits": 6}, "seed": 0}


def write_checkpoint(state: Checkpoints, step: int, sealed: bool = True) -> None:
    place = state.folder / f"checkpoint-{step}"
    place.mkdir()
    (place / "weights").write_bytes(bytes(range(100)))
    if sealed:
        state.seal(step)


def test_the_newest_whole_checkpoint_counts(tmp_path):
    state = Checkpoints(tmp_path / "run", RUN)
    assert state.newest() is None and saved_step(state.folder) is None
    for step in (9, 10):
        write_checkpoint(state, step)
    assert state.newest() == state.folder / "checkpoint-10" and saved_step(state.folder) == 10
    state.remove()
    assert not state.folder.exists() and saved_step(state.folder) is None


def test_cut_short_checkpoints_go_and_the_one_before_counts(tmp_path):
    state = Checkpoints(tmp_path / "run", RUN)
    for step in (1, 2, 3):
        write_checkpoint(state, step, sealed=step < 3)
    with open(state.folder / "checkpoint-2" / "weights", "r+b") as file:
        file.truncate(50)
    assert saved_step(state.folder) == 1
    with pytest.warns(UserWarning) as warnings:
        assert state.newest() == state.folder / "checkpoint-1"
    texts = [str(warning.message) for warning in warnings]
    assert [text.rpartition("/")[2] for text in texts] == [
        "checkpoint-3 is cut short or damaged, and removed",
        "checkpoint-2 is cut short or damaged, and removed",
        "run: going on from step 1",
    ]
    (state.folder / "checkpoint-1" / "weights").write_bytes(b"")
    with pytest.warns(UserWarning, match="cut short|no whole checkpoint, starting over"):
        assert state.newest() is None


def test_a_folder_belongs_to_one_run(tmp_path):
    Checkpoints(tmp_path / "run", RUN)
    Checkpoints(tmp_path / "run", RUN)
    with pytest.raises(ValueError, match=r"another run: task\.bits was 6 and is 7 now; choose"):
        Checkpoints(tmp_path / "run", {"task": {"kind": "Parity", "bits": 7}, "seed": 0})
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged .* delete .*run"):
        Checkpoints(tmp_path / "run", RUN)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"must be empty or hold this run's state"):
        Checkpoints(mine, RUN)
    with pytest.raises(ValueError, match=r"must be a folder, got the file .*thesis\.txt"):
        Checkpoints(mine / "thesis.txt", RUN)


def test_only_the_run_s_own_files_are_removed(tmp_path):
    state = Checkpoints(tmp_path / "run", RUN)
    write_checkpoint(state, 1)
    (state.folder / "notes.txt").write_text("put here meanwhile")
    state.remove()
    assert [path.name for path in state.folder.iterdir()] == ["notes.txt"]


def test_differences_name_the_field_and_both_values():
    before = {"a": {"b": 1, "c": "x"}, "d": {"e": 1}}
    assert differences(before, {"a": {"b": 2, "c": "x"}, "f": [1]}) == [
        "a.b was 1 and is 2 now",
        "d was there and is absent now",
        "f was absent and is [1] now",
    ]
    assert differences(before, before) == []
