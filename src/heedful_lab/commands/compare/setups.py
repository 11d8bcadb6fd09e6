"""A comparison's tasks with the sizes of their models and training, and what is compared there."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from heedful.checks import UserError
from heedful.nn import Layer, LocalGlobal
from heedful_lab.commands.compare.options import WITH_MEMORY_LOSS, Changes
from heedful_lab.commands.compare.scratch import (
    Attention,
    Hyperparameters,
    Size,
    from_scratch,
    local_global,
    simplicial,
)
from heedful_lab.commands.compare.small_caches import evictable
from heedful_lab.rivals.simplicial import Simplicial
from heedful_lab.rivals.table import mechanism
from heedful_lab.tasks import TASKS, Task


class Setup(NamedTuple):
    """A task as `compare` runs it: sizes at which it can be learnt within a minute or two."""

    task: Task
    size: Size
    hyperparameters: Hyperparameters
    mechanisms: tuple[str, ...]
    """What is compared by default: where the papers claim a difference."""
    memory_loss: float = 0.0
    """Factor of the memory loss for those whose name says that they are trained with it."""

    def mechanism(self, name: str) -> Attention:
        """The configuration behind a name, in the form that this task takes."""
        name = name.removesuffix(WITH_MEMORY_LOSS)
        config = mechanism(name)
        if isinstance(config, LocalGlobal):  # the published window is longer than these sequences
            return local_global(self.size.layers, self.task.length)
        if isinstance(config, Simplicial):  # so are these, and cost 16,384 pairs per query
            return simplicial(self.size.layers)
        return replace(config, **self.task.recipe.changes.get(name, {}))

    def memory_factor(self, name: str) -> float:
        """The factor of the memory loss with which this one is trained; 0 is none."""
        return self.memory_loss if name.endswith(WITH_MEMORY_LOSS) else 0.0

    def reports_memory(self, name: str) -> bool:
        """Test whether this mechanism can be trained with the memory loss."""
        model = from_scratch(self.task, self.mechanism(name), self.size, 0)
        return any(isinstance(x, Layer) and x.reports_memory for x in model.modules())

    def evictable(self, name: str) -> bool:
        """Test whether this mechanism can be scored under small caches."""
        return evictable(from_scratch(self.task, self.mechanism(name), self.size, 0))


def setups(data: Iterable[str] = ()) -> dict[str, Setup]:
    """Every task by name, with the sizes of the default comparison; `data` feeds `text`."""
    return {name: _setup(kind.default(tuple(data))) for name, kind in TASKS.items()}


def _setup(task: Task) -> Setup:
    recipe = task.recipe
    hyperparameters = Hyperparameters(
        recipe.steps,
        recipe.batch,
        recipe.learning_rate,
        mechanism_rate=recipe.mechanism_rate,
        held_out=recipe.held_out,
    )
    return Setup(
        task, Size(recipe.hidden, recipe.layers, recipe.heads), hyperparameters, recipe.mechanisms
    )


def _changed(setup: Setup, changes: Changes, steps: int | None) -> Setup:
    """A task's setup with these changes, and so many steps unless they say."""
    names, factor = changes.mechanisms or setup.mechanisms, changes.memory_loss
    training = {"steps": changes.steps or steps, "batch": changes.batch}
    size = {"hidden": changes.hidden, "layers": changes.layers, "heads": changes.heads}
    setup = setup._replace(
        task=setup.task.cut(changes.length, changes.tokenizer),
        size=replace(setup.size, **_named(size)),
        hyperparameters=replace(setup.hyperparameters, **_named(training)),
    )
    if factor:
        both = ((x, x + WITH_MEMORY_LOSS) if setup.reports_memory(x) else (x,) for x in names)
        names = tuple(x for pair in both for x in pair)
    return setup._replace(mechanisms=names, memory_loss=factor)


def _named(values: dict[str, int | None]) -> dict[str, int]:
    return {name: value for name, value in values.items() if value is not None}


def chosen_setups(tasks: Mapping[str, int | None], changes: Changes) -> dict[str, Setup]:
    """Tasks by name, each in so many steps, with the changes of a comparison.

    Raises:
        ValueError: no mechanism among them can be trained with the memory loss.
    """
    defaults, factor = setups(changes.data), changes.memory_loss
    result = {name: _changed(defaults[name], changes, steps) for name, steps in tasks.items()}
    names = [name for setup in result.values() for name in setup.mechanisms]
    if factor and not any(name.endswith(WITH_MEMORY_LOSS) for name in names):
        raise UserError(
            f"memory_loss={factor} needs a mechanism that reports memory, and "
            f"{', '.join(dict.fromkeys(names))} do not: add selective to the mechanisms"
        )
    return result


def check_evictable(overridden: dict[str, Setup]) -> None:
    """Raise where budgets would score nothing, warn where they leave a mechanism out."""
    names = {name: setup for setup in overridden.values() if setup.task.under_budgets()
             for name in setup.mechanisms}  # fmt: skip
    left_out = [name for name, setup in names.items() if not setup.evictable(name)]
    listed = ", ".join(left_out)
    if len(left_out) == len(names):
        raise UserError(
            f"budgets need a mechanism whose cache can evict tokens, and {listed} cannot (a "
            "convolution over keys, or summaries): add standard or selective to the mechanisms"
        )
    if left_out:
        warnings.warn(
            f"budgets: tokens cannot be evicted from the caches of {listed} (a convolution "
            "over keys, or summaries): they are trained, and not scored under budgets",
            stacklevel=3,
        )
