"""Text of any size as sequences of tokens: encoded once into a file, read one at a time."""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm

from heedful.checks import UserError
from heedful.data import Piece, pieces
from heedful.files import write_whole, writing_to

IGNORE = -100
_FIRST = 1 << 31  # on the first token of a document; no vocabulary is as large
_SILENT = 1 << 30  # on a token that is read and not learned
_ID = _SILENT - 1
_TOGETHER = 1 << 20  # characters that are encoded at a time
_SHARE = 20  # one document in so many is for evaluation
_MOST_HELD_OUT = 1 << 17  # tokens
_ABOUT = "tokens.json"


class TokenFile(NamedTuple):
    """Tokens in a file, four bytes each, of which the highest two say what else a token is.

    Arguments:
        path: the file.
        tokens: how many it has.
        text_bytes: of the text that they stand for, in UTF-8.
        bos: what every sequence begins with, in place of its first token, which nothing predicts;
            with `None` that token stays.
    """

    path: Path
    tokens: int
    text_bytes: int
    bos: int | None = None

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids from `start` on, which are the first of a document, and which are not learned."""
        raw = np.fromfile(self.path, np.uint32, count, offset=4 * start)
        return (raw & _ID).astype(np.int64), raw & _FIRST != 0, raw & _SILENT != 0


class EncodedText(NamedTuple):
    """Tokens of an encoded text, to train and to evaluate on."""

    train: TokenFile
    held_out: TokenFile


def encode(
    data: Sequence[str],
    held_out: Sequence[str],
    tokenizer,
    folder: Path,
    *,
    length: int,
    most_tokens: int,
    show: bool = False,
) -> EncodedText:
    """Encode a text into two files of `folder`; a folder that holds them already is read back.

    Documents begin with the tokenizer's BOS, or with EOS where it has none, and end with EOS. What
    a text spells never becomes such a token. Sequences begin with BOS too where the tokenizer puts
    one before a text, since a model that always had one predicts badly without it. Reading stops
    once there are `most_tokens`, so that of a text without end only what is needed is fetched;
    memory does not grow with the text.

    Without `held_out` a twentieth of the text is the evaluation set: of many documents every
    twentieth or so that fits into a piece (64 KiB), always the same ones, and where these are too
    few the end.

    Arguments:
        data, held_out: what `heedful.data.pieces` takes.
        tokenizer: of transformers, or a `ByteTokenizer`.
        folder: where `train.tokens`, `held-out.tokens` and `tokens.json` are written.
        length: tokens of a sequence; there must be at least one sequence of each.
        most_tokens: to train on.
        show: a bar with what has been read.

    Returns:
        The tokens to train on and those to evaluate on.

    Raises:
        ValueError: the text cannot be read, or is too short for a sequence.
    """
    if (folder / _ABOUT).is_file():
        return EncodedText(*_read_back(folder))
    folder.mkdir(parents=True, exist_ok=True)
    room = max(min(_MOST_HELD_OUT, most_tokens // _SHARE), length)
    apart = not held_out
    with (
        writing_to(folder),
        _Writer(folder / "train.tokens") as train,
        _Writer(folder / "held-out.tokens") as others,
        tqdm(unit="B", unit_scale=True, desc="reading", disable=not show, leave=False) as bar,
    ):
        for number, (part, ids) in enumerate(_encoded(pieces(data), tokenizer)):
            kept_apart = apart and part.alone and _chosen(number) and others.tokens < room
            (others if kept_apart else train).add(ids, part)
            bar.update(part.text_bytes)
            if train.tokens >= most_tokens + (room if apart and others.tokens < length else 0):
                break
        for part, ids in _encoded(pieces(held_out), tokenizer) if held_out else ():
            others.add(ids, part)
            if others.tokens >= _MOST_HELD_OUT:
                break
        if apart and others.tokens < length:
            _move_end(train, others, tokenizer, min(room, max(train.tokens // _SHARE, length)))
        for name, writer in (("data", train), ("held_out", others)):
            if writer.tokens < length:
                whole = train.tokens + others.tokens if apart else writer.tokens
                raise UserError(
                    f"{'data' if apart else name} has {whole} tokens, too few for sequences of "
                    f"{length}{' to train and to evaluate on' if apart else ''}; give more "
                    "text, or a shorter length"
                )
    bos = leading_bos(tokenizer)
    about = {
        name: {"tokens": writer.tokens, "text_bytes": writer.text_bytes, "bos": bos}
        for name, writer in (("train", train), ("held-out", others))
    }
    write_whole(folder / _ABOUT, json.dumps(about))
    return EncodedText(*_read_back(folder))


def _read_back(folder: Path) -> list[TokenFile]:
    about = json.loads((folder / _ABOUT).read_text())
    files = []
    for name, numbers in about.items():
        file = TokenFile(folder / f"{name}.tokens", **numbers)
        if not file.path.is_file() or file.path.stat().st_size != 4 * file.tokens:
            raise UserError(f"{file.path} is cut short or gone; delete {folder / _ABOUT}")
        files.append(file)
    return files


class EncodedDocument(NamedTuple):
    """A document that is encoded already.

    ids: its tokens.
    learned: which of them are predicted; all by default.
    text_bytes: that they stand for.
    """

    ids: list[int]
    learned: list[bool] | None = None
    text_bytes: int = 0


def encode_documents(
    documents: Iterable[EncodedDocument],
    folder: Path,
    *,
    most_tokens: int,
    bos: int | None = None,
) -> TokenFile:
    """Write documents into a file of `folder`; a folder that holds them already is read back.

    Arguments:
        documents: taken until there are `most_tokens`.
        folder: where `train.tokens` and `tokens.json` are written.
        most_tokens: to train on.
        bos: what every sequence begins with, of `leading_bos`.

    Raises:
        ValueError: there is no document.
    """
    if (folder / _ABOUT).is_file():
        return _read_back(folder)[0]
    folder.mkdir(parents=True, exist_ok=True)
    with writing_to(folder), _Writer(folder / "train.tokens") as train:
        for document in documents:
            part = _Part(True, True, document.text_bytes)
            train.add(document.ids, part, document.learned)
            if train.tokens >= most_tokens:
                break
        if not train.tokens:
            raise UserError("data has a part without a document; leave it out")
    about = {"train": {"tokens": train.tokens, "text_bytes": train.text_bytes, "bos": bos}}
    write_whole(folder / _ABOUT, json.dumps(about))
    return _read_back(folder)[0]


def leading_bos(tokenizer) -> int | None:
    """The BOS that a tokenizer puts before every text, if it does."""
    if not callable(tokenizer):  # bytes
        return None
    ids = tokenizer("")["input_ids"]
    return ids[0] if ids and ids[0] == tokenizer.bos_token_id else None


class _Part(NamedTuple):
    """Options to encode a piece of a document with."""

    first: bool
    alone: bool  # the whole document
    text_bytes: int  # that are predicted


def _encoded(parts: Iterable[Piece], tokenizer) -> Iterator[tuple[_Part, list[int]]]:
    """Every piece with its tokens, several at a time, as tokenizers are fastest with."""
    start = getattr(tokenizer, "bos_token_id", None)
    end = tokenizer.eos_token_id
    start = end if start is None else start
    for batch in _batches(_ends_known(parts)):
        rows = _ids(tokenizer, [piece.text for piece, _ in batch])
        for (piece, ends), ids in zip(batch, rows, strict=True):
            before = [start] if piece.first and start is not None else []
            after = [end] if ends and end is not None else []
            size = len(piece.text.encode())
            if piece.first and start is None:  # nothing predicts its first token
                size -= len(tokenizer.decode(ids[:1]).encode())
            yield _Part(piece.first, piece.first and ends, size), [*before, *ids, *after]


def _ids(tokenizer, texts: list[str]) -> list[list[int]]:
    if not callable(tokenizer):
        return [tokenizer.encode(text) for text in texts]
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    return tokenizer(texts, return_attention_mask=False, **options)["input_ids"]


def _ends_known(parts: Iterable[Piece]) -> Iterator[tuple[Piece, bool]]:
    """Each piece, and whether its document ends with it."""
    waiting: deque[Piece] = deque()
    for piece in parts:
        waiting.append(piece)
        if len(waiting) > 1:
            yield waiting.popleft(), piece.first
    if waiting:
        yield waiting.popleft(), True


def _batches(parts: Iterable[tuple[Piece, bool]]) -> Iterator[list[tuple[Piece, bool]]]:
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part[0].text)
        if size >= _TOGETHER:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _chosen(number: int) -> bool:
    return _mixed(number) % _SHARE == 0


class _Writer:
    """Appends tokens to a file, which is there under its name only once it is whole."""

    def __init__(self, path: Path) -> None:
        self.path, self.tokens, self.text_bytes = path, 0, 0
        self._unfinished = path.with_name(f".{path.name}")

    def __enter__(self) -> "_Writer":
        self._file = open(self._unfinished, "wb+")
        return self

    def __exit__(self, kind, *_) -> None:
        self._file.close()
        if kind is None:
            self._unfinished.replace(self.path)
        else:
            self._unfinished.unlink()

    def add(self, ids: list[int], part: _Part, learned: list[bool] | None = None) -> None:
        raw = np.array(ids, np.uint32)
        if learned is not None:
            raw[~np.array(learned)] |= _SILENT
        if part.first:
            raw[:1] |= _FIRST
        self._file.write(raw.tobytes())
        self.tokens += len(raw)
        self.text_bytes += part.text_bytes

    def cut_end(self, count: int) -> np.ndarray:
        """Take the newest tokens away again."""
        self._file.flush()
        self.tokens -= count
        self._file.seek(4 * self.tokens)
        raw = np.frombuffer(self._file.read(), np.uint32)
        self._file.truncate(4 * self.tokens)
        return raw

    def put(self, raw: np.ndarray) -> None:
        self._file.write(raw.tobytes())
        self.tokens += len(raw)


def _move_end(train: _Writer, held_out: _Writer, tokenizer, count: int) -> None:
    """Move the newest tokens to the evaluation set; the bytes that they stand for are decoded."""
    if train.tokens < count:
        return
    raw = train.cut_end(count)
    ids = (raw[1:] & _ID).tolist()  # nothing predicts the first
    size = len(tokenizer.decode(ids, skip_special_tokens=True).encode())
    train.text_bytes -= size
    held_out.text_bytes += size
    held_out.put(raw)


class TrainingSequences(torch.utils.data.Dataset):
    """The sequences of a whole training run in their order: epoch after epoch, each shuffled.

    Sequence i of `length` tokens begins with the last one of another sequence, or with the file's
    BOS in its place, so that in an epoch every token is predicted once; a rest shorter than a
    sequence is left out. What sequence i is depends on the file, the length and the seed alone, so
    a run can resume at any step, on any number of processes.

    Arguments:
        file: the tokens.
        length: tokens of a sequence.
        rows: sequences of the whole run.
        seed: of the order.
    """

    def __init__(self, file: TokenFile, length: int, rows: int, seed: int) -> None:
        self.file, self.length, self.rows, self.seed = file, length, rows, seed
        self.in_epoch = (file.tokens - 1) // (length - 1)

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Int[Tensor, " T"]]:
        epoch, place = divmod(index, self.in_epoch)
        place = shuffled(place, self.in_epoch, self.seed + epoch)
        return _row(*self.file.read(place * (self.length - 1), self.length), self.file.bos)


class MixedSequences(torch.utils.data.Dataset):
    """The sequences of a run from several files, each in its share, in an order from the seed.

    Of every so many sequences in a row, as the weights have in sum, each file gives as many as its
    weight.

    Arguments:
        files: the tokens.
        weights: whole numbers, one for each file.
        length: tokens of a sequence.
        rows: sequences of the whole run.
        seed: of the order.
    """

    def __init__(
        self, files: Sequence[TokenFile], weights: Sequence[int], length: int, rows: int, seed: int
    ) -> None:
        self.parts = [TrainingSequences(file, length, rows, seed) for file in files]
        self.weights, self.rows, self.seed = tuple(weights), rows, seed

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Int[Tensor, " T"]]:
        if index >= self.rows:
            raise IndexError(f"index must be below {self.rows}, got {index}")
        turn, place = divmod(index, sum(self.weights))
        place = shuffled(place, sum(self.weights), self.seed + turn)
        part = 0
        while place >= self.weights[part]:
            place -= self.weights[part]
            part += 1
        return self.parts[part][turn * self.weights[part] + place]


class EvaluationSequences(torch.utils.data.Dataset):
    """Sequences that cover a file once, in order; the last is filled up with tokens without loss.

    Arguments:
        file: the tokens.
        length: tokens of a sequence.
        multiple: sequences without loss are added until this divides their number.
    """

    def __init__(self, file: TokenFile, length: int, multiple: int = 1) -> None:
        self.file, self.length = file, length
        rows = -(-(file.tokens - 1) // (length - 1))
        self.rows = -(-rows // multiple) * multiple

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Int[Tensor, " T"]]:
        ids, first, silent = self.file.read(index * (self.length - 1), self.length)
        room = (0, self.length - len(ids))
        first = np.pad(first, room, constant_values=True)
        return _row(np.pad(ids, room), first, np.pad(silent, room), self.file.bos)


def _row(
    ids: np.ndarray, first: np.ndarray, silent: np.ndarray, bos: int | None
) -> dict[str, Int[Tensor, " T"]]:
    """Tokens with their positions, which start anew in each document, and what is predicted."""
    if bos is not None:
        ids[0] = bos
    at = np.arange(len(ids))
    positions = at - np.maximum.accumulate(np.where(first, at, 0))
    labels = np.where(first | silent, IGNORE, ids)  # no document tells how the next one begins
    arrays = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def shuffled(index: int, count: int, seed: int) -> int:
    """Place of `index` in a random order of 0 to count - 1, without storing that order.

    A Feistel network over the next even number of bits, walked until it is below `count`.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask, key = (1 << half) - 1, _mixed(seed)
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            left, right = right, left ^ (_mixed((right ^ key) + turn) & mask)
        index = left << half | right
        if index < count:
            return index


def _mixed(number: int) -> int:
    """64 bits that depend on all bits of a number (the finaliser of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) % (1 << 64)
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    number = (number ^ number >> 27) * 0x94D049BB133111EB % (1 << 64)
    return number ^ number >> 31
