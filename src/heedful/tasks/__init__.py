"""Tasks: one file per question. Each builds samples from a seed and scores predictions."""

from heedful.tasks.assignment import Assignment
from heedful.tasks.blocks import Blocks
from heedful.tasks.copy import Copy
from heedful.tasks.parity import Parity
from heedful.tasks.recall import Recall
from heedful.tasks.samples import Recipe, Samples, Task, sequence_error, token_error, token_losses
from heedful.tasks.text import Text

TASKS: dict[str, type[Task]] = {
    "blocks": Blocks,
    "assignment": Assignment,
    "copy": Copy,
    "parity": Parity,
    "text": Text,
    "recall": Recall,
}

__all__ = [
    "TASKS",
    "Assignment",
    "Blocks",
    "Copy",
    "Parity",
    "Recall",
    "Recipe",
    "Samples",
    "Task",
    "Text",
    "sequence_error",
    "token_error",
    "token_losses",
]
