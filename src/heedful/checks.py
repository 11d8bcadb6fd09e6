"""Errors of users, and checks of configurations, for packages that must not import each other."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Literal, get_args, get_origin, get_type_hints


class UserError(ValueError):
    """Input that is not supported, with a message for whoever gave it.

    The command line prints it as one line; any other error of the library keeps its traceback.
    """


def is_whole(value: object, least: int) -> bool:
    """A whole number of at least `least`; `True` and `False` are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_whole(
    name: str, value: object, least: int, most: int | None = None, *, way_out: str = ""
) -> None:
    """Raise unless `value` is a whole number from `least` to `most`."""
    if not is_whole(value, least) or (most is not None and value > most):
        bound = f"of at least {least}" if most is None else f"from {least} to {most}"
        tail = f"; {way_out}" if way_out else ""
        raise UserError(f"{name} must be a whole number {bound}, got {value!r}{tail}")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        near = get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{name} must be one of {listed}, got {value!r}{hint}")


def check_literals(config: object) -> None:
    """Raise unless each field of a dataclass that is a `Literal`, or a tuple of such, holds one.

    A tuple must hold each value once.
    """
    for name, kind in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal:
            check_choice(name, value, get_args(kind))
        if get_origin(kind) is not tuple:
            continue
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise UserError(f"{name} must be a tuple, got {value!r}; write ({value!r},)")
        if get_origin(get_args(kind)[0]) is Literal:
            for item in value:
                check_choice(name, item, get_args(get_args(kind)[0]))
            if len(set(value)) < len(value):
                raise UserError(f"{name} must be different, got {value}")
