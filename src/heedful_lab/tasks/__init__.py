"""Tasks: one file per question. Each builds samples from a seed and scores predictions."""

from heedful_lab.tasks.assignment import Assignment
from heedful_lab.tasks.blocks import Blocks
from heedful_lab.tasks.copy import Copy
from heedful_lab.tasks.magic_numbers import MagicNumbers
from heedful_lab.tasks.pairs import Pairs
from heedful_lab.tasks.parity import Parity
from heedful_lab.tasks.recall import Recall
from heedful_lab.tasks.samples import (
    Recipe,
    Samples,
    Task,
    sequence_error,
    token_error,
    token_losses,
)
from heedful_lab.tasks.selective_copy import SelectiveCopy
from heedful_lab.tasks.spans import Spans
from heedful_lab.tasks.summarise import Summarise
from heedful_lab.tasks.text import Text
from heedful_lab.tasks.translate import Translate

TASKS: dict[str, type[Task]] = {
    "blocks": Blocks,
    "assignment": Assignment,
    "copy": Copy,
    "parity": Parity,
    "text": Text,
    "recall": Recall,
    "magic-numbers": MagicNumbers,
    "selective-copy": SelectiveCopy,
    "translate": Translate,
    "summarise": Summarise,
    "spans": Spans,
}

__all__ = [
    "TASKS",
    "Assignment",
    "Blocks",
    "Copy",
    "MagicNumbers",
    "Pairs",
    "Parity",
    "Recall",
    "Recipe",
    "Samples",
    "SelectiveCopy",
    "Spans",
    "Summarise",
    "Task",
    "Text",
    "Translate",
    "sequence_error",
    "token_error",
    "token_losses",
]
