"""Text to train and measure on: files, folders, Hugging Face datasets, the standard library.

`corpus` reads whole texts, `pieces` texts of any size a piece at a time, `text_pairs` sources with
their targets.
"""

import codecs
import gzip
import importlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from heedful.checks import UserError

_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
_PAIRED = (".tsv", ".jsonl")
_COLUMNS = (("source", "target"), ("document", "summary"), ("article", "highlights"))
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
_HF = "hf:"
_READ = 1 << 16  # bytes read at a time, and so characters of a piece at most


class Document(NamedTuple):
    """One text that belongs together: a file, a line of a JSON-lines file, a row of a dataset.

    Arguments:
        name: where it came from, for messages.
        text: never empty.
    """

    name: str
    text: str


class Piece(NamedTuple):
    """A part of a document that is small enough for memory.

    Arguments:
        name: of the document.
        text: never empty; cut behind the end of a line or a space where there is one.
        first: whether the document begins here.
    """

    name: str
    text: str
    first: bool


class TextPair(NamedTuple):
    """A text and what is to be made of it, such as its translation or its summary.

    Arguments:
        name: where it came from, for messages.
        source, target: never empty.
    """

    name: str
    source: str
    target: str


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
            decompressed, or is read twice (one text could be in the training and the evaluation
            set).
        ImportError: if `hf:` is requested and `datasets` is not installed.
    """
    if isinstance(paths, str | Path):
        raise UserError(f"paths must be a sequence of paths, got {paths!r}; write [{paths!r}]")
    if limit_bytes is not None and (
        not isinstance(limit_bytes, int) or isinstance(limit_bytes, bool) or limit_bytes < 1
    ):
        raise UserError(
            f"limit_bytes must be a whole number of at least 1, got {limit_bytes!r}; use None for "
            "everything"
        )
    documents: list[Document] = []
    room = limit_bytes
    for document in _joined(pieces(paths, streaming=limit_bytes is not None)):
        if room is not None:
            # Slicing characters first keeps a huge document from being encoded whole.
            data = document.text[:room].encode()[:room]
            room -= len(data)
            document = document._replace(text=data.decode(errors="ignore"))
        if document.text:
            documents.append(document)
        if room is not None and room <= 0:
            break
    if not documents and limit_bytes is None:
        raise UserError("paths is empty and this Python has no library sources; name some text")
    if not documents:
        raise UserError(
            f"limit_bytes must leave room for one character, got {limit_bytes}; raise it"
        )
    return documents


def text_pairs(paths: Sequence[str | Path]) -> list[TextPair]:
    """The pairs of files, folders and datasets, always in the same order.

    Each entry of `paths` is one of:

    * a file of UTF-8 text with a source, a tabulator and a target in each line;
    * a `.jsonl` file with strings "source" and "target" in each line;
    * either of them compressed, with `.gz` behind the name;
    * a folder: every `.tsv` and `.jsonl` file (and `.gz` of these) in it and below, sorted by path;
    * `hf:NAME[:CONFIG][:SPLIT][:SOURCE:TARGET]`: two columns of a Hugging Face dataset, through the
      optional package `datasets`. Unless given they are source and target, document and summary, or
      article and highlights, or else the two languages of a column "translation".

    Arguments:
        paths: what to read, in this order; at least one.

    Returns:
        at least one pair.

    Raises:
        ValueError: if a path is missing, is not UTF-8, cannot be read or decompressed, is read
            twice, holds no pair, or holds a line without a source or a target, which is named.
        ImportError: if `hf:` is requested and `datasets` is not installed.
    """
    if isinstance(paths, str | Path):
        raise UserError(f"paths must be a sequence of paths, got {paths!r}; write [{paths!r}]")
    if not paths:
        raise UserError("paths must name at least one file of pairs, got none")
    pairs: list[TextPair] = []
    for path, files in _places(paths, _PAIRED):
        before = len(pairs)
        if files is None:
            pairs += _paired_rows(path)
        else:
            for file in files:
                pairs += _paired_lines(file)
        if len(pairs) == before:
            raise UserError(f"text {path!r} holds no pairs; leave it out")
    return pairs


def pieces(paths: Sequence[str | Path] = (), *, streaming: bool = True) -> Iterator[Piece]:
    """The documents of `corpus` a piece at a time, so that memory does not grow with the text.

    Only one line of a JSON-lines file and one row of a dataset is in memory at a time. A document
    longer than a piece comes in several, whose texts joined are the document's.

    Arguments:
        paths: as for `corpus`.
        streaming: read a Hugging Face dataset as it arrives, instead of fetching all of it first.

    Returns:
        The pieces of the texts in order, one at a time.

    Raises:
        ValueError: as `corpus` does, when what is wrong is met.
        ImportError: if `hf:` is requested and `datasets` is not installed.
    """
    if isinstance(paths, str | Path):
        raise UserError(f"paths must be a sequence of paths, got {paths!r}; write [{paths!r}]")
    if not paths:
        yield from _standard_library()
    for path, files in _places(paths, _SUFFIXES):
        if files is None:
            yield from _hugging_face(path, streaming=streaming)
            continue
        empty = True
        for file in files:
            for piece in _read_pieces(file):
                empty = False
                yield piece
        if empty:
            raise UserError(f"text {path!r} is empty; leave it out or give a file with text")


def _joined(parts: Iterable[Piece]) -> Iterator[Document]:
    name, texts = "", []
    for piece in parts:
        if piece.first and texts:
            yield Document(name, "".join(texts))
            texts = []
        name = piece.name
        texts.append(piece.text)
    if texts:
        yield Document(name, "".join(texts))


def text_files(paths: Sequence[str | Path]) -> list[tuple[str, list[Path] | None]]:
    """The files of each path of a corpus, in the order in which they are read.

    Returns:
        Each path with its files; with `None` for a dataset.

    Raises:
        ValueError: a path is missing, names no text, or is read twice.
    """
    return list(_places(paths, _SUFFIXES))


def _places(
    paths: Sequence[str | Path], suffixes: tuple[str, ...]
) -> Iterator[tuple[str, list[Path] | None]]:
    """Each path with its files, `None` for a dataset; raises where it is missing or there twice."""
    paths_seen: set[str] = set()
    for path in map(str, paths):
        if path.startswith(_HF):
            _once(path, paths_seen)
            yield path, None
            continue
        root = Path(path)
        if not root.exists():
            raise UserError(
                f"text {path!r} does not exist; name a file, a folder or hf:NAME[:CONFIG][:SPLIT]"
            )
        files = _files(root, suffixes) if root.is_dir() else [root]
        for file in files:
            _once(str(file.resolve()), paths_seen)
        if root.is_dir() and not any(file.stat().st_size for file in files):
            raise UserError(
                f"folder {path!r} holds no text in {', '.join(suffixes)} or "
                ".gz of these; name its files one by one if they end otherwise"
            )
        yield path, files


def _once(name: str, earlier: set[str]) -> None:
    if name in earlier:
        raise UserError(f"text {name!r} is named twice, directly or within a folder; name it once")
    earlier.add(name)


def _files(
    folder: Path, suffixes: tuple[str, ...], without: frozenset[str] = frozenset()
) -> list[Path]:
    """The text files below a folder, hidden ones and folders `without` left out, sorted by path."""
    files = []
    for here, folders, names in os.walk(folder):
        # In place: os.walk then never enters them.
        folders[:] = [name for name in folders if name[0] != "." and name not in without]
        for name in names:
            file = Path(here, name)
            if name.removesuffix(".gz").endswith(suffixes) and name[0] != "." and file.is_file():
                files.append((file.relative_to(folder).as_posix(), file))
    return [file for _, file in sorted(files)]


def _read_pieces(file: Path) -> Iterator[Piece]:
    texts = _texts(file)
    if not file.name.removesuffix(".gz").endswith(".jsonl"):
        yield from _cut(str(file), texts)
        return
    for number, (content,) in _json_lines(str(file), _lines(texts), ("text",)):
        yield from _cut(f"{file}:{number}", [content])


def _cut(name: str, texts: Iterable[str]) -> Iterator[Piece]:
    """A document that comes in texts of any size, in pieces."""
    first, rest = True, ""
    for text in texts:
        rest += text
        start = 0
        while len(rest) - start > _READ:
            most = start + _READ
            end = max(rest.rfind("\n", start, most), rest.rfind(" ", start, most)) + 1 or most
            yield Piece(name, rest[start:end], first)
            first, start = False, end
        rest = rest[start:]
    if rest:
        yield Piece(name, rest, first)


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Without their ends. Not splitlines(): JSON strings may hold U+2028 and others unescaped."""
    rest = ""
    for text in texts:
        *whole, rest = (rest + text).split("\n")
        yield from whole
    yield rest


def _paired_lines(file: Path) -> Iterator[TextPair]:
    if file.name.removesuffix(".gz").endswith(".jsonl"):
        lines = _json_lines(str(file), _lines(_texts(file)), ("source", "target"))
    else:
        text = "".join(_texts(file))
        whole = text.removesuffix("\n").split("\n") if text else []
        lines = ((number, line.split("\t")) for number, line in enumerate(whole, start=1))
    for number, columns in lines:
        columns = [column.strip() for column in columns]
        if len(columns) != 2:
            raise UserError(
                f"text {str(file)!r}: line {number} has {len(columns)} columns; each "
                "line must be a source, a tabulator and a target"
            )
        yield _pair(f"{str(file)!r}: line {number}", f"{file}:{number}", *columns)


def _pair(what: str, name: str, source: str, target: str) -> TextPair:
    for column, content in (("source", source), ("target", target)):
        if not content:
            raise UserError(f"text {what} has an empty {column}; fill it, or leave the line out")
    return TextPair(name, source, target)


def _texts(file: Path) -> Iterator[str]:
    """Yield a file's text, decompressed and decoded, a part at a time."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read = 0
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as source:
            while True:
                data = source.read(_READ)
                pending = len(decoder.getstate()[0])
                text = decoder.decode(data, final=not data)
                if text:
                    yield text
                if not data:
                    return
                read += len(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"text {str(file)!r} is not a whole gzip file ({error}); compress it "
            "again, or drop .gz from its name if it is plain text"
        ) from error
    except OSError as error:
        raise UserError(
            f"text {str(file)!r} cannot be read ({error.strerror}); check its rights"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"text {str(file)!r} is not UTF-8 at byte {read - pending + error.start};"
            " convert it (iconv -t UTF-8) or leave it out"
        ) from error


def _json_lines(
    name: str, lines: Iterable[str], fields: tuple[str, ...]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The strings of these fields, line by line, each with its number."""
    example = "{" + ", ".join(f'"{field}": "..."' for field in fields) + "}"
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(
                f"text {name!r}: line {number} is not JSON "
                f"({getattr(error, 'msg', error)}); each line must be an object like {example}"
            ) from error
        values = []
        for field in fields:
            content = record.get(field) if isinstance(record, dict) else None
            if not isinstance(content, str):
                raise UserError(
                    f'text {name!r}: line {number} has no string "{field}"; each line '
                    f"must be an object like {example}"
                )
            try:
                content.encode()
            except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
                raise UserError(
                    f"text {name!r}: line {number} is not Unicode text "
                    f"({error.reason}); fix the line or leave it out"
                ) from error
            values.append(content)
        yield number, tuple(values)


def _standard_library() -> Iterator[Piece]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for file in _files(folder, _SUFFIXES, without=_NOT_LIBRARY):
        if file.suffix != ".py":
            continue
        # A few sources of some distributions declare another encoding; they are no loss.
        text = file.read_bytes().decode(errors="replace")
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            yield from _cut(file.relative_to(folder).as_posix(), [text])


def _hugging_face(path: str, *, streaming: bool) -> Iterator[Piece]:
    parts = path.removeprefix(_HF).split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"text {path!r} is not a dataset; write hf:NAME[:CONFIG][:SPLIT]")
    empty = True
    for number, row in enumerate(_dataset(path, parts, streaming=streaming)):
        if not isinstance(row.get("text"), str):
            raise UserError(
                f'text {path!r}: row {number} has no string "text" but '
                f'{", ".join(row)}; only datasets with a column "text" can be read'
            )
        if row["text"]:
            empty = False
            yield from _cut(f"{path}[{number}]", [row["text"]])
    if empty:
        raise UserError(f"text {path!r} holds no text; take another split")


def _paired_rows(path: str) -> Iterator[TextPair]:
    parts = path.removeprefix(_HF).split(":")
    if not parts[0] or len(parts) not in (1, 2, 3, 5):
        raise UserError(
            f"text {path!r} is not a dataset of pairs; write "
            "hf:NAME[:CONFIG][:SPLIT][:SOURCE:TARGET]"
        )
    pair_columns = tuple(parts[3:])
    for number, row in enumerate(_dataset(path, parts[:3], streaming=False)):
        if isinstance(row.get("translation"), dict):
            row = row["translation"]
            choices = (pair_columns,) if pair_columns else (tuple(row),)
        else:
            choices = (pair_columns,) if pair_columns else _COLUMNS
        pair = next((names for names in choices if all(x in row for x in names)), ())
        columns = [row[name] for name in pair]
        if len(columns) != 2 or not all(isinstance(x, str) for x in columns):
            raise UserError(
                f"text {path!r}: row {number} has no two texts "
                f"{' and '.join(pair_columns) or 'source and target'} but {', '.join(row)}; name "
                "the columns: hf:NAME:CONFIG:SPLIT:SOURCE:TARGET"
            )
        columns = [column.strip() for column in columns]
        yield _pair(f"{path!r}: row {number}", f"{path}[{number}]", *columns)


def _dataset(path: str, parts: list[str], *, streaming: bool):
    """The rows of `NAME`, `CONFIG` and `SPLIT`; what is empty or left out is the default."""
    name, config, split = (*parts, "", "")[:3]
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            f"text {path!r} needs the package datasets: pip install heedful[data]"
        ) from error
    try:
        # Streaming fetches only what a limit lets through.
        return datasets.load_dataset(
            name, config or None, split=split or "train", streaming=streaming
        )
    except Exception as error:
        raise UserError(
            f"text {path!r} could not be loaded by datasets: {error}; check name, "
            "configuration and split (hf:NAME::SPLIT for the default configuration) and the network"
        ) from error


class ByteTokenizer:
    """Every byte is a token, as in the models that `heedful compare` trains on text."""

    chat_template = None
    eos_token_id = None

    def __len__(self) -> int:
        return 256

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(int(token) for token in tokens if token < 256).decode(errors="replace")
