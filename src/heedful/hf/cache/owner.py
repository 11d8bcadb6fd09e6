"""Whose cache it is: the layer that it belongs to, which it does not keep alive."""

import weakref

from heedful.nn import Layer


class Reference:
    """A weak reference to a module; copies have it too, and what comes from a file has none."""

    def __init__(self, target: object | None) -> None:
        self._target = None if target is None else weakref.ref(target)

    def __call__(self) -> object | None:
        """The module, or `None`."""
        return None if self._target is None else self._target()

    def __deepcopy__(self, memo: dict) -> "Reference":
        return self

    def __reduce__(self) -> tuple:
        return Reference, (None,)


def kind_of(layer: Layer) -> str:
    """What a cache must fit: the mechanism and the heads."""
    shape = layer.shape
    return (
        f"{type(layer).__name__} {shape.layer} with {shape.heads} heads, {shape.key_heads} key "
        f"heads of {shape.dim}, {layer.past_queries} query rows"
    )
