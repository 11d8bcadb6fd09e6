"""Names for what kernels and mixing matrices have learned.

The patterns are those of Golovneva et al., arXiv 2504.00927, section 4.5 and appendix H; the
paper names them without a measure, so that the rules here are ours. Energy is the sum of squares.
"""

import numpy as np
from numpy.typing import ArrayLike

from heedful.checks import UserError

_REST = 0.05  # share of the energy off the identity's entries below which there is nothing else
_MOST = 0.5  # share of what is not the identity that a pattern holds
_SUM = 0.2  # of an edge: |sum| over the sum of absolute values
_ONE = 0.1  # distance from one within which a diagonal is the identity's
_AGAINST = 0.5  # of a contrast: negative entries against the head's own


def kernel_pattern(kernel: ArrayLike, two_sided: bool = False) -> str:
    """The name of one head's kernel: the first of these rules that holds.

    near identity: the entry of the current query and the same key is positive, and all others
        together have less than 5 % of the energy.
    edge: entries cancel: |their sum| is at most 0.2 of the sum of their absolute values.
    diagonal: of the energy beside the identity's entry, at least half is on the diagonal through
        it, where query and key are equally far back: a sequence that repeats.
    priming: at least half of it is in the column of the same key: what earlier queries attended.
    other: anything else.

    Arguments:
        kernel: `[c_q, c_k]`, its last row the current query.
        two_sided: the current query is the middle row, as in encoders.

    Raises:
        ValueError: not a kernel.
    """
    k = np.asarray(kernel, dtype=np.float64)
    if k.ndim != 2 or 0 in k.shape or not np.isfinite(k).all():
        raise UserError(f"kernel must be finite numbers [c_q, c_k], got shape {k.shape}")
    row, column = (len(k) // 2 if two_sided else len(k) - 1), k.shape[1] // 2
    energy = k**2
    whole, rest = energy.sum(), energy.sum() - energy[row, column]
    if k[row, column] > 0 and rest < _REST * whole:
        return "near identity"
    if rest == 0:
        return "other"
    if abs(k.sum()) <= _SUM * np.abs(k).sum():
        return "edge"
    on_diagonal = sum(
        energy[i, column + i - row]
        for i in range(len(k))
        if i != row and 0 <= column + i - row < k.shape[1]
    )
    in_column = energy[:, column].sum() - energy[row, column]
    if on_diagonal >= _MOST * rest:
        return "diagonal"
    return "priming" if in_column >= _MOST * rest else "other"


def mixing_pattern(mix: ArrayLike) -> str:
    """The name of one group's mixing matrix: the first of these rules that holds.

    near identity: entries off the diagonal have less than 5 % of the energy, and all on it are
        within 0.1 of one.
    scaled identity: the same, with another positive diagonal.
    contrasting: some head has others taken away from it: the negative entries of its row add up to
        at least half of the head's own, which is positive.
    other: anything else.

    Arguments:
        mix: `[g, g]`, indexed `[out, in]`.

    Raises:
        ValueError: not a square matrix.
    """
    m = np.asarray(mix, dtype=np.float64)
    if m.ndim != 2 or len(m) == 0 or m.shape[0] != m.shape[1] or not np.isfinite(m).all():
        raise UserError(f"mix must be finite numbers [g, g], got shape {m.shape}")
    own = np.diag(m)
    off = m - np.diag(own)
    if (own > 0).all() and (off**2).sum() < _REST * (m**2).sum():
        return "near identity" if (np.abs(own - 1) <= _ONE).all() else "scaled identity"
    subtracted = -off.clip(max=0).sum(axis=1)
    return "contrasting" if ((own > 0) & (subtracted >= _AGAINST * own)).any() else "other"
