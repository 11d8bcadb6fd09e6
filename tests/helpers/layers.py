"""One layer by itself: its shape, its inputs, and parameters away from where they start."""

from torch import Tensor

from heedful.nn import HeadShape, Layer
from helpers.families import stir
from helpers.oracle import draw

SHAPE = HeadShape(heads=4, key_heads=2, dim=6, hidden=20, layer=2)


def stirred(config, by: float = 0.3, shape: HeadShape = SHAPE) -> Layer:
    """Built, in fp64, with noise on the parameters: some start as zeros or identities."""
    layer = config.build(shape).double()
    stir(layer, by)
    return layer


def qkvx(tokens: int, batch: int = 2) -> tuple[Tensor, ...]:
    """Queries, keys and values, and the input of the module."""
    heads = draw(batch, 4, tokens, 6), draw(batch, 2, tokens, 6), draw(batch, 2, tokens, 6)
    return *heads, draw(batch, tokens, 20)
