"""The state of an unfinished run in a folder: whose it is, and which checkpoints are whole."""

import hashlib
import json
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

from heedful.checks import UserError
from heedful.files import write_whole

_IDENTITY = "run.json"
_SEAL = "whole.json"


class Checkpoints:
    """A folder for the checkpoints of one run.

    A checkpoint counts once `seal` has written down the digest of each of its files, so one that a
    kill or a full disk cut short is distinguished from a whole one.

    Arguments:
        folder: made if absent.
        identity: what makes the run this run, as JSON; kept in the folder.

    Raises:
        ValueError: the folder holds another run's state, or anything else.
    """

    def __init__(self, folder: Path, identity: dict) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise UserError(f"folder must be a folder, got the file {folder}")
        identity = json.loads(json.dumps(identity))
        path = folder / _IDENTITY
        if path.is_file():
            try:
                before = json.loads(path.read_bytes())
            except ValueError as error:
                raise UserError(f"{path} is damaged ({error}); delete {folder}") from error
            if before != identity:
                raise UserError(
                    f"folder={folder} holds the state of another run: "
                    f"{'; '.join(differences(before, identity))}; choose another folder, or delete "
                    "this one"
                )
        elif any(not x.name.startswith(f".{_IDENTITY}.") for x in folder.glob("*")):
            raise UserError(
                f"folder={folder} must be empty or hold this run's state, but it has no "
                f"{_IDENTITY}; choose another folder, or delete this one"
            )
        else:
            write_whole(path, json.dumps(identity, indent=2) + "\n")

    def newest(self) -> Path | None:
        """The newest whole checkpoint; newer ones that are not whole go, with a warning."""
        damaged = 0
        for step, path in reversed(_checkpoints(self.folder)):
            if _is_whole(path):
                if damaged:
                    warnings.warn(f"{self.folder}: going on from step {step}", stacklevel=2)
                return path
            damaged += 1
            warnings.warn(f"{path} is cut short or damaged, and removed", stacklevel=2)
            shutil.rmtree(path)
        if damaged:
            warnings.warn(f"{self.folder}: no whole checkpoint, starting over", stacklevel=2)
        return None

    def seal(self, step: int) -> None:
        """Declare the checkpoint of this step whole."""
        path = self.folder / f"checkpoint-{step}"
        write_whole(path / _SEAL, json.dumps(_digests(path)))

    def remove(self) -> None:
        """Delete the run's state, and the folder if nothing else is in it."""
        for _, path in _checkpoints(self.folder):
            shutil.rmtree(path)
        (self.folder / _IDENTITY).unlink()
        with suppress(OSError):
            self.folder.rmdir()


def saved_step(folder: Path) -> int | None:
    """The step from which a run in this folder would go on; None if from the beginning."""
    whole = (step for step, path in reversed(_checkpoints(folder)) if _is_whole(path))
    return next(whole, None)


def differences(before, now, name: str = "") -> list[str]:
    """In words, where two JSON values differ: the dotted name of each field and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            text
            for key in dict.fromkeys([*before, *now])
            for text in differences(
                before.get(key, _ABSENT), now.get(key, _ABSENT), f"{name}.{key}".lstrip(".")
            )
        ]
    return [] if before == now else [f"{name} was {_short(before)} and is {_short(now)} now"]


_ABSENT = object()


def _short(value) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, dict):
        return "there"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder by step, whole or not."""
    matches = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in folder.glob("*"))
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def _digests(checkpoint: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(checkpoint.iterdir()):
        if path.name != _SEAL:
            with open(path, "rb") as file:  # weights do not fit into memory twice
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _is_whole(checkpoint: Path) -> bool:
    try:
        return json.loads((checkpoint / _SEAL).read_bytes()) == _digests(checkpoint)
    except (OSError, ValueError):
        return False
