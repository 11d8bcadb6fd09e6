"""Text to train and measure on: files, folders, Hugging Face datasets, the standard library."""

import gzip
import importlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_HF = "hf:"


class Document(NamedTuple):
    """One text that belongs together: a file, a line of a JSON-lines file, a row of a dataset.

    Arguments:
        name: where it came from, for messages.
        text: never empty.
    """

    name: str
    text: str


def corpus(paths: Sequence[str | Path] = (), limit_bytes: int | None = None) -> list[Document]:
    """The documents of files, folders and datasets, always in the same order.

    Each entry of `paths` is one of:

    * a file of UTF-8 text: one document;
    * a `.jsonl` file: one document from the string "text" of each line;
    * either of them compressed, with `.gz` behind the name;
    * a folder: every `.txt`, `.md`, `.py` and `.jsonl` file (and `.gz` of these) in it and below,
      sorted by path; hidden and empty files are left out;
    * `hf:NAME[:CONFIG][:SPLIT]`: the column "text" of a Hugging Face dataset, through the optional
      package `datasets`; the split is "train" unless given, and `hf:NAME::test` leaves the
      configuration at its default.

    No paths stand for the sources of the Python standard library on this machine, without its
    tests: text that every machine has, but not the same on every Python version.

    Arguments:
        paths: what to read, in this order.
        limit_bytes: stop after so many bytes of UTF-8; the last document is cut between two
            characters.

    Returns:
        at least one document.

    Raises:
        ValueError: if a path is missing, names no text, is not UTF-8, cannot be read or
            decompressed, or is read twice (one text could be trained on and held out at once).
        ImportError: if `hf:` is asked for and `datasets` is not installed.
    """
    if isinstance(paths, str | Path):
        raise ValueError(f"paths must be a sequence of paths, got {paths!r}; write [{paths!r}]")
    if limit_bytes is not None and (
        not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool) or limit_bytes < 1
    ):
        raise ValueError(
            f"limit_bytes must be a whole number of at least 1, got {limit_bytes!r}; use None for "
            "everything"
        )
    found: list[Document] = []
    room = limit_bytes
    for document in _documents(paths, streaming=limit_bytes is not None):
        if room is not None:
            # Slicing characters first keeps a huge document from being encoded whole.
            data = document.text[:room].encode()[:room]
            room -= len(data)
            document = document._replace(text=data.decode(errors="ignore"))
        if document.text:
            found.append(document)
        if room is not None and room <= 0:
            break
    if not found and limit_bytes is None:
        raise ValueError("paths is empty and this Python has no library sources; name some text")
    if not found:
        raise ValueError(
            f"limit_bytes must leave room for one character, got {limit_bytes}; raise it"
        )
    return found


def _documents(paths: Sequence[str | Path], *, streaming: bool) -> Iterator[Document]:
    if not paths:
        yield from _standard_library()
        return
    seen: set[str] = set()
    for path in paths:
        if str(path).startswith(_HF):
            _once(str(path), seen)
            yield from _hugging_face(str(path), streaming=streaming)
            continue
        root = Path(path)
        if not root.exists():
            raise ValueError(
                f"paths names {str(path)!r}, which does not exist; give a file, a folder or "
                "hf:NAME[:CONFIG][:SPLIT]"
            )
        files = _files(root) if root.is_dir() else [root]
        empty = True
        for file in files:
            _once(str(file.resolve()), seen)
            for document in _read_document(file):
                empty = False
                yield document
        if empty:
            what = (
                f"the folder {str(path)!r}, which holds no text in {', '.join(_SUFFIXES)} or "
                ".gz of these; name its files one by one if they end otherwise"
                if root.is_dir()
                else f"{str(path)!r}, which is empty; leave it out or give a file with text"
            )
            raise ValueError(f"paths names {what}")


def _once(name: str, seen: set[str]) -> None:
    if name in seen:
        raise ValueError(f"paths names {name!r} twice, directly or within a folder; name it once")
    seen.add(name)


def _files(folder: Path, without: frozenset[str] = frozenset()) -> list[Path]:
    """The text files below a folder, hidden ones and folders `without` left out, sorted by path."""
    files = []
    for here, folders, names in os.walk(folder):
        # In place: os.walk then never enters them.
        folders[:] = [name for name in folders if name[0] != "." and name not in without]
        for name in names:
            file = Path(here, name)
            if name.removesuffix(".gz").endswith(_SUFFIXES) and name[0] != "." and file.is_file():
                files.append((file.relative_to(folder).as_posix(), file))
    return [file for _, file in sorted(files)]


def _read_document(file: Path) -> Iterator[Document]:
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"paths names {str(file)!r}, which is not a whole gzip file ({error}); compress it "
            "again, or drop .gz from its name if it is plain text"
        ) from error
    except OSError as error:
        raise ValueError(
            f"paths names {str(file)!r}, which cannot be read ({error.strerror}); check its rights"
        ) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"paths names {str(file)!r}, which is not UTF-8 at byte {error.start}; convert it "
            "(iconv -t UTF-8) or leave it out"
        ) from error
    if file.name.removesuffix(".gz").endswith(".jsonl"):
        yield from _json_lines(str(file), text)
    elif text:
        yield Document(str(file), text)


def _json_lines(name: str, text: str) -> Iterator[Document]:
    # Not splitlines(): JSON strings may hold U+2028 and other line ends unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f"paths names {name!r}, whose line {number} is not JSON "
                f"({getattr(error, 'msg', error)}); each line must be an object like "
                '{"text": "..."}'
            ) from error
        content = record.get("text") if isinstance(record, dict) else None
        if not isinstance(content, str):
            raise ValueError(
                f'paths names {name!r}, whose line {number} has no string "text"; each line must '
                'be an object like {"text": "..."}'
            )
        try:
            content.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
            raise ValueError(
                f"paths names {name!r}, whose line {number} is no Unicode text ({error.reason}); "
                "mend the line or leave it out"
            ) from error
        if content:
            yield Document(f"{name}:{number}", content)


def _standard_library() -> Iterator[Document]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for file in _files(folder, without=_NOT_LIBRARY):
        if file.suffix != ".py":
            continue
        # A few sources of some distributions declare another encoding; they are no loss.
        text = file.read_bytes().decode(errors="replace")
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            yield Document(file.relative_to(folder).as_posix(), text)


def _hugging_face(path: str, *, streaming: bool) -> Iterator[Document]:
    name, config, split = (*path.removeprefix(_HF).split(":"), "", "", "")[:3]
    if not name or path.removeprefix(_HF).count(":") > 2:
        raise ValueError(f"paths names {path!r}; a dataset is written hf:NAME[:CONFIG][:SPLIT]")
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"paths names {path!r}, which needs the package datasets: pip install heedful[data]"
        ) from error
    try:
        # Streaming fetches only what a limit lets through.
        table = datasets.load_dataset(
            name, config or None, split=split or "train", streaming=streaming
        )
    except Exception as error:
        raise ValueError(
            f"paths names {path!r}, which datasets could not load: {error}; check name, "
            "configuration and split (hf:NAME::SPLIT for the default configuration) and the network"
        ) from error
    empty = True
    for number, row in enumerate(table):
        if not isinstance(row.get("text"), str):
            raise ValueError(
                f'paths names {path!r}, whose row {number} has no string "text" but '
                f'{", ".join(row)}; only datasets with a column "text" can be read'
            )
        if row["text"]:
            empty = False
            yield Document(f"{path}[{number}]", row["text"])
    if empty:
        raise ValueError(f"paths names {path!r}, which holds no text; take another split")
