"""Tasks: one file per question. Each builds samples from a seed and scores predictions."""

from heedful.tasks.assignment import Assignment
from heedful.tasks.blocks import Blocks
from heedful.tasks.copy import Copy
from heedful.tasks.magic_numbers import MagicNumbers
from heedful.tasks.pairs import Pairs
from heedful.tasks.parity import Parity
from heedful.tasks.recall import Recall
from heedful.tasks.samples import Recipe, Samples, Task, sequence_error, token_error, token_losses
from heedful.tasks.selective_copy import SelectiveCopy
from heedful.tasks.spans import Spans
from heedful.tasks.summarise import Summarise
from heedful.tasks.text import Text
from heedful.tasks.translate import Translate

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
