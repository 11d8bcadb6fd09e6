"""Lines that are added to a file, what a line that was cut off leaves, and full disks."""

import builtins
import errno
import json
import re
from pathlib import Path

import pytest
from safetensors import SafetensorError

from heedful import files
from heedful.files import append_line, only_writer, whole_folder, write_whole


@pytest.fixture
def bytes_read(monkeypatch):
    """The size of every read from files that `append_line` opens."""
    sizes = []

    class Counting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

        def read(self, *size):
            data = self.file.read(*size)
            sizes.append(len(data))
            return data

    def counting_open(*arguments, **options):
        return Counting(builtins.open(*arguments, **options))

    monkeypatch.setattr(files, "open", counting_open, raising=False)
    return sizes


def test_a_line_is_added_without_reading_the_lines_before_it(tmp_path, bytes_read):
    path = tmp_path / "lines.jsonl"
    path.write_text((json.dumps({"text": "x" * 1000}) + "\n") * 3000)
    for number in range(100):
        append_line(path, json.dumps({"number": number}))
    assert path.read_text().splitlines()[3000:] == [f'{{"number": {n}}}' for n in range(100)]
    assert sum(bytes_read) <= 100  # the last byte tells that the last line is whole


def test_a_line_makes_its_folder(tmp_path):
    append_line(tmp_path / "runs" / "a.jsonl", "1")
    assert (tmp_path / "runs" / "a.jsonl").read_text() == "1\n"


@pytest.mark.parametrize("length", [0, 1, 4094, 4095, 4096, 4097, 70_000])
def test_a_last_line_that_was_cut_off_is_removed_whatever_its_length(tmp_path, length, bytes_read):
    path = tmp_path / "lines.jsonl"
    whole = '{"text": "äöü"}\n' * 10_000
    path.write_text(whole + '{"text": "' + "x" * length)
    with pytest.warns(UserWarning, match="removed a last line that was cut off"):
        append_line(path, "1")
    assert path.read_text() == whole + "1\n"
    assert sum(bytes_read) < 4 * length + 20_000, "the whole file has 180,000 bytes"


@pytest.mark.parametrize("before", ["", "\n", '{"a": 1}', '{"a": 1}\n', "x" * 5000 + "\n{}"])
def test_whole_lines_stay_as_they_are(tmp_path, before):
    path = tmp_path / "lines.jsonl"
    path.write_text(before)
    append_line(path, "2")
    end = "" if before.endswith("\n") or not before else "\n"
    assert path.read_text() == f"{before}{end}2\n"


def test_a_file_that_is_only_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"a"')
    with pytest.warns(UserWarning, match="cut off"):
        append_line(path, "2")
    assert path.read_text() == "2\n"


def full(*args, **kwargs):
    """As a write that finds no room: the error names no file."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_names_the_file_that_a_line_was_for(tmp_path, monkeypatch):
    path = tmp_path / "lines.jsonl"
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(path))}'"):
        append_line(path, "1")


def test_a_full_disk_names_the_file_that_is_written_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_whole(tmp_path / "page.html", "text")
    assert error.value.filename == str(tmp_path / "page.html")


def test_a_full_disk_names_the_folder_that_would_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "write", full)
    message = r"No space left on device: '.*/run/\.heedful\.lock'"
    with pytest.raises(OSError, match=message), only_writer(tmp_path / "run"):
        raise AssertionError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: I/O error: No space left on device"),
        Exception("No space left on device (os error 28)"),  # of tokenizers
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_names_the_folder_that_is_made_whole(tmp_path, error):
    place = tmp_path / "model"
    with pytest.raises(OSError, match="No space left") as raised, whole_folder(place):
        raise error
    assert raised.value.filename == str(place) and not list(tmp_path.iterdir())
    with pytest.raises(SafetensorError, match="damaged"), whole_folder(place):
        raise SafetensorError("damaged")
