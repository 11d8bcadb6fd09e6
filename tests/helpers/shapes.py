"""Shapes in annotations are checked at every call: both packages but the public operators."""

import importlib.util

import jaxtyping
from jaxtyping import AbstractArray, install_import_hook

CHECKED = importlib.util.find_spec("beartype") is not None
"""Not so on a machine that is lent for its GPU and has no package for it."""
_LEFT_OUT = ".api"  # public operators answer a wrong shape themselves


def install() -> None:
    """Before the package is imported, if beartype is there.

    Functions whose annotations have no shape stay as they are: to check everything else of them too
    would take most of the time of many tests.
    """
    if not CHECKED:
        return
    decorate = jaxtyping.jaxtyped

    def jaxtyped(*, typechecker):
        def choose(target):
            return decorate(typechecker=typechecker)(target) if _has_shapes(target) else target

        return choose

    jaxtyping.jaxtyped = jaxtyped
    install_import_hook(["heedful", "heedful_lab"], f"{__name__}.check")


def check(function):
    """Of the annotations of a function only those with a shape are checked."""
    hints = function.__annotations__
    from beartype import beartype

    function.__annotations__ = {name: x for name, x in hints.items() if _is_shape(x)}
    return beartype(function)


def _has_shapes(target) -> bool:
    if isinstance(target, type) or target.__module__.endswith(_LEFT_OUT):
        return False
    return any(map(_is_shape, getattr(target, "__annotations__", {}).values()))


def _is_shape(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(map(_is_shape, getattr(hint, "__args__", ())))
