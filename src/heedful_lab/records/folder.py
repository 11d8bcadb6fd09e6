"""Whose run a folder holds: none yet, the same to resume, or another."""

import json
from collections.abc import Callable
from pathlib import Path

from heedful.checks import UserError
from heedful.training.checkpoints import differences

UNFINISHED = "unfinished"
"""Subfolder of a run's folder, for what is there while the run lasts."""
_WAY_OUT = "choose another folder, or delete this one"


def resumed(folder: Path, file: str, identity: Callable[[], dict]) -> dict | None:
    """The content of the file that describes a folder's run; None in a new folder.

    Arguments:
        folder: may be absent.
        file: its name there, of a JSON object.
        identity: makes the fields of it that must be the same, as JSON.

    Raises:
        ValueError: the folder holds another run, or anything else, or the file is damaged.
    """
    path = folder / file
    if not path.is_file():
        others = sorted(x.name for x in folder.glob("*") if not x.name.startswith("."))
        if others and others != [UNFINISHED]:
            raise UserError(
                f"out={str(folder)!r} holds {', '.join(others[:3])} and no {file}, so no run of "
                "this command made it; choose another folder"
            )
        return None
    try:
        about = json.loads(path.read_bytes())
        if not isinstance(about, dict):
            raise ValueError("it holds no object")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); {_WAY_OUT}") from None
    now = identity()
    if absent := now.keys() - about.keys():
        raise UserError(
            f"{path} has no {', '.join(sorted(absent))}: an older version, or another command, "
            f"wrote it; {_WAY_OUT}"
        )
    if changed := differences({name: about[name] for name in now}, now):
        more = f"; and {len(changed) - 6} more" if len(changed) > 6 else ""
        listed = "; ".join(x.removeprefix("options.") for x in changed[:6]) + more
        raise UserError(f"out={str(folder)!r} is the folder of another run: {listed}; {_WAY_OUT}")
    return about
