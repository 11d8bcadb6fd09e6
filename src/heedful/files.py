"""Files that are there whole or not at all, and folders with one writer at a time."""

import datetime
import errno
import fcntl
import json
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from heedful.checks import UserError

Line = TypeVar("Line")

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # no locks on this file system


@contextmanager
def writing_to(place: str | os.PathLike) -> Iterator[None]:
    """Name `place` where a write fails without a name, as on a full disk.

    Raises:
        OSError: as raised inside, with `place` if it named no file; or what safetensors and
            tokenizers raise in its place.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(place)
        raise
    except Exception as error:
        reason = os.strerror(errno.ENOSPC)
        if reason not in str(error):
            raise
        raise OSError(errno.ENOSPC, reason, os.fspath(place)) from error


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file beside its place and move it there, so that no reader meets half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        with writing_to(path):
            temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_new_folder(out: str | os.PathLike) -> None:
    """Raise if `out` is a file, or a folder with something in it."""
    place = Path(out)
    if not os.fspath(out) or place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise UserError(f"out must be a new or empty folder, got {os.fspath(out)!r}; name another")


@contextmanager
def whole_folder(out: str | os.PathLike) -> Iterator[Path]:
    """A path to make a folder at, which is then moved to `out`: there whole or not at all.

    Raises:
        ValueError: `out` is a file, or a folder that is not empty.
    """
    check_new_folder(out)
    place = Path(out)
    parents = [path for path in place.parents if not path.exists()]  # the innermost first
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}-") as folder:
            whole = Path(folder) / "whole"
            with writing_to(place):
                yield whole
            if place.is_dir():
                place.rmdir()
            os.replace(whole, place)
    except BaseException:
        for path in parents:
            with suppress(OSError):  # something else is in it by now
                path.rmdir()
        raise


def write_lines(path: Path, records: Iterable[dict]) -> None:
    """Write records as JSON lines, whole or not at all."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def append_line(path: str | Path, line: str) -> None:
    """Add one line of JSON to `path`, which has one writer at a time.

    The folder is made where there is none, and the line is on disk when this returns. Where an
    earlier write was cut off, its unfinished line, which nobody can read, is removed with a
    warning; whole lines are never rewritten.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)  # or what took hours to measure would be lost
    with writing_to(path), open(path, "ab+") as file:
        tail = _unfinished_line(file)
        if _cut_off(tail):
            warnings.warn(f"{path}: removed a last line that was cut off", stacklevel=3)
            file.truncate(file.seek(0, os.SEEK_END) - len(tail))
        elif tail.strip():
            file.write(b"\n")
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _unfinished_line(file: BinaryIO) -> bytes:
    """The end of a file from its last newline on, read backwards in blocks."""
    tail, start, block = b"", file.seek(0, os.SEEK_END), 1  # mostly one byte, the newline, tells
    while start and b"\n" not in tail:
        size = min(block, start)
        start = file.seek(start - size)
        tail = file.read(size) + tail
        block = max(4096, 2 * block)
    return tail.rpartition(b"\n")[2]


def read_each(
    path: str | Path, from_json: Callable[[str], Line], kind: str
) -> list[tuple[int, Line]]:
    """Read the lines that `append_line` wrote, each with its number.

    A last line that was cut off is left out with a warning.

    Arguments:
        path: the file.
        from_json: what reads one line; raises a `ValueError` for an invalid one.
        kind: what a line is, for the message.

    Raises:
        ValueError: any other line cannot be read; names the file and the line.
    """
    lines = Path(path).read_bytes().split(b"\n")
    if _cut_off(lines[-1]):
        warnings.warn(f"{path}: left out a last line that was cut off", stacklevel=4)
        lines.pop()
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entries.append((number, from_json(line.decode())))
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: not {kind} ({error}); fix or delete the line"
            ) from error
    return entries


def _cut_off(line: bytes) -> bool:
    """Test whether a last line without its newline was cut off, that is, is not JSON."""
    try:
        json.loads(line or b"null")
    except (ValueError, RecursionError):
        return bool(line.strip())
    return False


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the one process that writes into `folder`, which is made if absent.

    While the context lasts, `.heedful.lock` in it names this process. The system holds the lock, so
    it ends with the process, however that dies. Where the system has none (some network
    file systems) the file alone is the lock, and one left by a crash must be deleted by hand. A new
    folder into which nothing was written is removed at the end.

    Raises:
        ValueError: another process writes there, which the message names; or nobody can.
    """
    path = folder / ".heedful.lock"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file where a folder is needed; choose another name")
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, by_system = _open_locked(path)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written to ({error.strerror}); choose another folder"
        ) from error
    if handle is None:
        way_out = "wait until it ends, or choose another folder"
        if not by_system:
            way_out += f"; if it no longer runs, delete {path}"
        raise UserError(f"{folder} is in use by {_holder(path)}: {way_out}")
    try:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
        with writing_to(path):
            os.ftruncate(handle, 0)
            os.write(handle, json.dumps(about).encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock goes, so that it is still this one's
        os.close(handle)
        with suppress(OSError):  # it is not empty
            for place in new:
                place.rmdir()


def _open_locked(path: Path) -> tuple[int | None, bool]:
    """The locked file's handle, or None if another process has it; whether the system locks it."""
    while True:
        try:
            handle, new = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            try:
                handle, new = os.open(path, os.O_RDWR), False
            except FileNotFoundError:
                continue  # its holder has just ended
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED and new:
                return handle, False
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None, True
            if error.errno in _UNSUPPORTED:
                return None, False
            raise
        # A holder that ended in between has deleted the file: a lock on that one guards nothing.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle, True
        os.close(handle)


def _holder(path: Path) -> str:
    try:
        about = json.loads(path.read_bytes())
        return f"process {about['pid']} on {about['host']} since {about['since']}"
    except (OSError, ValueError, TypeError, KeyError):
        return "another process"  # which has not written yet who it is, or has just ended
