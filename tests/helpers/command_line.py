"""Commands as a shell would call them, and comparisons that take seconds."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from heedful_lab.cli import main
from heedful_lab.commands.compare import setups
from heedful_lab.commands.compare.options import Comparison
from heedful_lab.commands.compare.scratch import Size


def status_of(*words: object) -> int:
    """The status with which `heedful` ends, given these words."""
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words)])
    return stop.value.code


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line that `heedful` says when it refuses these words."""
    capsys.readouterr()  # what was said before
    assert status_of(*words) == 1
    printed = capsys.readouterr()
    assert printed.out == "", printed
    (line,) = printed.err.splitlines()
    assert line.startswith("heedful: ")
    return line


def change_setups(
    patch: pytest.MonkeyPatch, size: Callable[[Size], Size] = lambda size: size, **changes
) -> None:
    """Give every task of `heedful compare` another size of model and other hyperparameters."""
    real = setups.setups

    def changed(data=()) -> dict[str, setups.Setup]:
        return {
            name: x._replace(
                size=size(x.size), hyperparameters=replace(x.hyperparameters, **changes)
            )
            for name, x in real(data).items()
        }

    patch.setattr(setups, "setups", changed)


def setups_of(comparison: Comparison) -> dict[str, setups.Setup]:
    """The tasks of a comparison, with what is compared on each."""
    return setups.chosen_setups(comparison.planned(), comparison.changes())
