"""What to compare: the configuration of `heedful compare`, in a file that imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from heedful.checks import check_literals, check_whole

TaskName = Literal["blocks", "assignment", "copy", "parity", "text"]
MechanismName = Literal[
    "standard", "mta", "mta-published", "mta-v1", "talking-heads", "selective", "differential"
]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class Comparison:
    """Train several attention mechanisms side by side and write one page about them.

    Without options: block finding (standard, mta), variable assignment (standard, selective) and
    language modelling on the Python standard library's sources (all three). The same command
    called again goes on where an interrupted one stopped, and with more seeds it adds them.
    """

    tasks: tuple[TaskName, ...] = ("blocks", "assignment", "text")
    """What to learn."""
    mechanisms: tuple[MechanismName, ...] = ()
    """What to compare. Default: those that each task tells apart."""
    seeds: int = 1
    """Seeds per task and mechanism; from two on, findings can be told from chance."""
    data: tuple[str, ...] = ()
    """Text for the task text: files, folders, .gz files, or hf:NAME[:CONFIG][:SPLIT]."""
    steps: int | None = None
    """Optimiser steps per run, instead of each task's own."""
    batch: int | None = None
    """Rows per step, instead of each task's own."""
    device: Device = "auto"
    """auto is the GPU where there is one."""

    def __post_init__(self) -> None:
        check_literals(self)
        if not self.tasks:
            raise ValueError("tasks must name at least one task, got none")
        for name in ("steps", "batch"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        check_whole("seeds", self.seeds, 1)
        if self.data and "text" not in self.tasks:
            raise ValueError("data is read by the task 'text': add it to the tasks")
