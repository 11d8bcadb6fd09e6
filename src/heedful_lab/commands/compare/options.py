"""The options of `heedful compare`; imports nothing heavy."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from heedful.checks import UserError, check_literals, check_whole
from heedful_lab.commands.options import Device, check_memory_loss

TaskName = Literal[
    "blocks", "assignment", "copy", "parity", "text", "recall", "magic-numbers",
    "selective-copy", "translate", "summarise", "spans",
]  # fmt: skip
MechanismName = Literal[
    "standard", "mta", "mta-flash", "mta-published", "mta-v1", "mta-selective", "talking-heads",
    "selective", "differential", "grouped", "differential-v2", "knocking-heads", "canon", "gated",
    "exclusive", "forgetting", "parallax", "retention-gate", "dex", "simplicial", "local-global",
]  # fmt: skip

TEXT_TASKS, PAIR_TASKS = ("text", "spans"), ("translate", "summarise")
"""What reads texts, and what reads pairs of them."""
LEAST_TOKENS = 13
"""The smallest budget of an eviction policy with its usual protection."""
WITH_MEMORY_LOSS = " + memory loss"
"""What the name of a mechanism ends with where its model is trained with the memory loss."""


TOURS: dict[str, dict[TaskName, int | None]] = {
    "short": {"magic-numbers": 150, "assignment": 450, "text": 50},
    "full": {"blocks": None, "assignment": None, "text": None},
}
"""What is learned where no task is named, and in how many steps; `None` is a task's own number."""


@dataclass(frozen=True)
class Comparison:
    """Train several attention mechanisms side by side and write one page about them.

    Without options, a short tour: retrieval of numbers (standard, mta), variable assignment
    (standard, selective) and language modelling on the Python standard library's sources (all
    three). The same command called again goes on where an interrupted one stopped, and with more
    seeds it adds them.
    """

    tasks: tuple[TaskName, ...] = ()
    """What to learn. Default: the tasks of the tour."""
    mechanisms: tuple[MechanismName, ...] = ()
    """What to compare. Default: those that differ most on each task."""
    seeds: int = 1
    """Seeds per task and mechanism; from two on, findings can be distinguished from chance."""
    data: tuple[str, ...] = ()
    """For text and spans: files of text, folders, .gz files, or hf:NAME[:CONFIG][:SPLIT]. For
    translate and summarise: files with a source, a tabulator and a target in each line, .jsonl
    files with "source" and "target", or hf:NAME[:CONFIG][:SPLIT][:SOURCE:TARGET]."""
    steps: int | None = None
    """Optimiser steps per run, instead of each task's own."""
    batch: int | None = None
    """Sequences per step, instead of each task's own."""
    memory_loss: float = 0.0
    """Factor of the memory loss (the paper has 0.1): beside each mechanism that can report memory,
    a second model of it is trained with the loss, "selective + memory loss"."""
    budgets: tuple[float, ...] = ()
    """Score the trained models of text and recall also under caches that hold such a share of a
    sequence, such as 0.5 0.25 0.1, with every eviction policy; numbers of tokens if above 1. A
    layer holds at least 13: the first 4, the newest 8 and the next one."""
    length: int | None = None
    """Tokens of a sequence, instead of each task's own."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """What text, and pairs from --data, are cut into: bytes, or 2048 byte pairs."""
    hidden: int | None = None
    """Width of the models, instead of each task's own."""
    layers: int | None = None
    """Their layers."""
    heads: int | None = None
    """Their heads."""
    device: Device = "auto"
    """auto is the GPU where there is one."""
    tour: Literal["short", "full"] = "short"
    """Without --tasks: short is the default comparison, two and a half minutes on two CPU cores;
    full has the tasks blocks, assignment and text with all of their steps."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs/compare"
    """Folder for report.html, results.jsonl, config.json and the trained models."""

    def planned(self) -> dict[TaskName, int | None]:
        """The tasks, and how many steps they have here; `None` is each task's own number."""
        if not self.tasks:
            return TOURS[self.tour]
        return dict.fromkeys(self.tasks)

    def __post_init__(self) -> None:
        check_literals(self)
        if self.tasks and self.tour != "short":
            raise UserError(
                f"tour={self.tour!r} chooses the tasks, and tasks names {', '.join(self.tasks)}: "
                "leave one of both out"
            )
        tasks = self.planned()
        for name in ("steps", "batch", "length", "hidden", "layers", "heads"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name), 1)
        for share in self.budgets:
            number = isinstance(share, int | float) and not isinstance(share, bool)
            if not number or not 0 < share < math.inf:
                raise UserError(
                    "budgets must be shares of a sequence such as 0.25, or numbers of tokens "
                    f"above 1, got {share!r}"
                )
            if share > 1 and (share != int(share) or share < LEAST_TOKENS):
                raise UserError(
                    f"budgets above 1 are whole numbers of tokens, at least {LEAST_TOKENS} (the "
                    f"first 4, the newest 8 and the next one), got {share!r}"
                )
        if self.budgets and not {"text", "recall"} & tasks.keys():
            raise UserError("budgets are for the tasks text and recall: add one to the tasks")
        paired = [task for task in PAIR_TASKS if task in tasks]
        reading = [task for task in TEXT_TASKS if task in tasks] + paired
        if self.tokenizer != "byte" and not (reading if self.data else reading != paired):
            raise UserError(
                "tokenizer is for the tasks text and spans, and for translate and summarise with "
                "data: add one to the tasks"
            )
        if self.data and not reading:
            raise UserError(
                f"data is read by the tasks {', '.join(TEXT_TASKS + PAIR_TASKS)}: add one to the "
                "tasks"
            )
        if self.data and paired and reading != paired:
            raise UserError(
                f"data are texts for {' and '.join(TEXT_TASKS)}, and pairs for "
                f"{' and '.join(PAIR_TASKS)}: compare {', '.join(reading)} in two calls"
            )
        check_whole("seeds", self.seeds, 1)
        check_memory_loss(self.memory_loss)
