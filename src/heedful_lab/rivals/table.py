"""The table of baselines: mechanisms by name that are compared and not in the library."""

from heedful import nn
from heedful.nn import MechanismConfig, MechanismRow
from heedful_lab.rivals.canon import Canon
from heedful_lab.rivals.dex import Dex
from heedful_lab.rivals.differential_v2 import DifferentialV2
from heedful_lab.rivals.exclusive import Exclusive
from heedful_lab.rivals.knocking import KnockingHeads
from heedful_lab.rivals.parallax import Parallax
from heedful_lab.rivals.retention import RetentionGate
from heedful_lab.rivals.simplicial import Simplicial

RIVALS = (
    MechanismRow(
        "retention-gate",
        RetentionGate(),
        True,
        "standard attention, and a gate per token that says how long a cache keeps it",
    ),
    MechanismRow(
        "knocking-heads",
        KnockingHeads(),
        True,
        "values of all heads through one matrix that they share",
    ),
    MechanismRow(
        "canon",
        Canon(),
        True,
        "short convolutions over tokens before attention, of its input and of q, k and v",
    ),
    MechanismRow(
        "simplicial",
        Simplicial(),
        False,
        "in every fourth layer attention to pairs of tokens, one from each of two windows",
    ),
    MechanismRow(
        "differential-v2",
        DifferentialV2(),
        False,
        "the difference of two maps over the same keys and values, a lambda per token",
    ),
    MechanismRow(
        "exclusive",
        Exclusive(),
        False,
        "each head's output without its part along the token's own value",
    ),
    MechanismRow(
        "parallax",
        Parallax(),
        True,
        "a first-order correction of each head's output along a second query",
    ),
    MechanismRow("dex", Dex(), True, "each head's output less a learned linear function of it"),
)
TABLE = (*nn.TABLE, *RIVALS)
"""All mechanisms, those of the library first."""

MECHANISMS: tuple[type[MechanismConfig], ...] = tuple(type(row.config) for row in RIVALS)
"""Configurations of the baselines, which files name by class."""


def mechanism(name: str) -> MechanismConfig:
    """The configuration behind a name; an unknown one raises with the nearest."""
    return nn.mechanism(name, TABLE)


def from_json(data: dict) -> MechanismConfig:
    """The mechanism that `heedful.nn.to_json` wrote; unknown kinds or fields raise."""
    return nn.from_json(data, MECHANISMS)
