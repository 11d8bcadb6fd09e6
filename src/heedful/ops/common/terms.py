"""Arguments that the operators share: what queries see, the scale, and terms around the softmax."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from heedful.ops.common.checks import check_bias, check_scale, check_sinks, check_softcap
from heedful.ops.common.dropout import Dropout, dropout_of
from heedful.ops.visibility import Visibility, check_visibility


class Terms(NamedTuple):
    """Visibility and scale of a call, and what changes its logits and weights, as of the operators.

    dropout: its share and its seed in one; `None` where nothing is dropped.
    """

    visibility: Visibility
    scale: float
    bias: Float[Tensor, "#B #H Tq Tk"] | None = None
    softcap: float | None = None
    sinks: Float[Tensor, " H"] | None = None
    dropout: Dropout | None = None

    @property
    def plain(self) -> bool:
        """True where nothing but the scale changes logits and weights."""
        return self.bias is self.softcap is self.sinks is self.dropout is None

    @property
    def learned(self) -> tuple[Tensor | None, Tensor | None]:
        """Terms that have a gradient."""
        return self.bias, self.sinks


def checked_terms(
    q: Tensor,
    keys: int,
    visibility: Visibility | None,
    scale: float | None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
) -> Terms:
    """The terms of a call with these queries and so many keys; raises for a wrong one.

    Arguments as of the public operators; shapes are checked here, and so are not in annotations.
    """
    visibility = check_visibility(visibility, q, keys)
    check_bias(bias, q, keys)
    softcap = check_softcap(softcap)
    check_sinks(sinks, q)
    scale = check_scale(scale, q)
    return Terms(visibility, scale, bias, softcap, sinks, dropout_of(dropout_p, seed, q))
