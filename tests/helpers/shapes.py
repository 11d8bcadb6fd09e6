"""What checks shapes and types at every call of the package, while tests run."""

from collections.abc import Callable
from pathlib import Path

from beartype import BeartypeConf, beartype

from helpers import ROOT

# What answers wrong input itself, beside the public operators and constructors.
REFUSING = (
    "heedful.hf.convert.convert",
    "heedful.hf.plan._layers",
    "heedful.hf.plan._mechanism",
    "heedful.hf.plan.make_plan",
    "heedful.ops.grouped.groups.sentence_groups",
    "heedful.ops.visibility.Visibility.__init__",
    "heedful.ops.visibility.Visibility.packed",
    "heedful.ops.visibility.check_visibility",
    "heedful.tasks.spans.Spans.score",
)
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int where a float is asked for


def module_of(path: Path) -> str:
    """As it is imported, of a file of the package."""
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


def checked(function: Callable) -> Callable:
    """The same function, its annotations checked, unless it answers wrong input itself.

    So do the constructors of configurations; those that take tensors are checked.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    plain = function.__name__ == "__init__" and not _has_shapes(function)
    return function if plain or name in REFUSING else _check(function)


def _has_shapes(function: Callable) -> bool:
    return any("jaxtyping" in str(hint) for hint in function.__annotations__.values())
