"""Commands as a shell would call them."""

import pytest

from heedful.cli import main


def status_of(*words: object) -> int:
    """The status with which `heedful` ends, given these words."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words)])
    return stop.value.code
