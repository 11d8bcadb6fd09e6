"""What checks shapes and types at every call of the package, while tests run."""

from collections.abc import Callable
from pathlib import Path

from beartype import BeartypeConf, beartype

from helpers import ROOT

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int where a float is asked for


def module_of(path: Path) -> str:
    """As it is imported, of a file of the package."""
    return ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)


def checked(function: Callable) -> Callable:
    """The same function, its annotations checked, but for constructors without shapes.

    Configurations answer what they cannot be themselves.
    """
    if function.__name__ == "__init__" and not _has_shapes(function):
        return function
    return _check(function)


def _has_shapes(function: Callable) -> bool:
    return any("jaxtyping" in str(hint) for hint in function.__annotations__.values())
