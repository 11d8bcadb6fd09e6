"""What these scripts share: reading the results that are there."""

import json
from pathlib import Path

from heedful.records.files import read_each


def lines(path: Path) -> list[dict]:
    """The lines of a results file, none where there is no file; one that was cut off is left out.

    Raises:
        ValueError: any other line is not JSON; names the file and the line.
    """
    return [line for _, line in read_each(path, json.loads, "a result")] if path.exists() else []
