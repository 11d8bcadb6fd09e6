"""Whose cache it is: the layer that it belongs to, which it does not keep alive."""

import weakref

from heedful.checks import UserError
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


class Owner:
    """The layer that a cache belongs to, and what another one must have in common with it."""

    def __init__(self, layer: Layer) -> None:
        self._kind, self.layer = kind_of(layer), Reference(layer)

    def check(self, layer: Layer, used: bool) -> None:
        """Raise unless the cache belongs to that layer; one without an owner does from now on.

        Arguments:
            layer: that wants to use it.
            used: whether tokens are in it.
        """
        owner = self.layer()
        if owner is layer:
            return
        if self._kind != kind_of(layer) or (owner is not None and used):
            raise UserError(
                f"the cache belongs to another model or mechanism ({self._kind}, and this "
                f"layer is {kind_of(layer)}); make one with heedful.new_cache(model)"
            )
        self.layer = Reference(layer)

    def for_undo(self, undoable: int) -> Layer:
        """The layer, to compute anew what `crop` leaves of `undoable` tokens."""
        if (layer := self.layer()) is None:
            raise UserError(
                "crop cannot compute a part of a call anew in a cache that comes from a file: call "
                f"the model with it first, or take back all {undoable} tokens"
            )
        return layer


def kind_of(layer: Layer) -> str:
    """Describe the layer that a cache must fit: the mechanism and the heads."""
    # PEFT puts a module of its own around a layer that it saves.
    mechanism = next(type(x).__name__ for x in layer.modules() if isinstance(x, Layer))
    shape = layer.shape
    return (
        f"{mechanism} {shape.layer} with {shape.heads} heads, {shape.key_heads} key "
        f"heads of {shape.dim}, {layer.tails.get('queries', 0)} query rows"
    )
