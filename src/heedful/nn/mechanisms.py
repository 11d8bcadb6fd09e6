"""The table of mechanisms: names, configurations, operators; and JSON for files."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.checks import UserError
from heedful.nn.canon import Canon
from heedful.nn.dex import Dex
from heedful.nn.differential import Differential, DifferentialV2
from heedful.nn.exclusive import Exclusive
from heedful.nn.forgetting import Forgetting
from heedful.nn.gated import Gated
from heedful.nn.grouped import Grouped
from heedful.nn.knocking import KnockingHeads
from heedful.nn.multi_token import MultiToken, TalkingHeads
from heedful.nn.parallax import Parallax
from heedful.nn.retention import RetentionGate
from heedful.nn.selective import Selective
from heedful.nn.simplicial import Simplicial
from heedful.nn.standard import LocalGlobal, Standard
from heedful.ops import (
    LowRank,
    differential_attention,
    grouped_attention,
    multi_token_attention,
    selective_attention,
)

Mechanism = (
    Standard
    | LocalGlobal
    | MultiToken
    | TalkingHeads
    | Selective
    | Differential
    | DifferentialV2
    | Grouped
    | KnockingHeads
    | Canon
    | Gated
    | Exclusive
    | Forgetting
    | Parallax
    | Dex
    | Simplicial
    | RetentionGate
)

Leaves = dict[str, Tensor]
Draw = Callable[[Leaves], Leaves]
"""From q, k and v of one shape, `[B, H, T, D]` in fp64, all tensors of one call of an operator."""


class MechanismRow(NamedTuple):
    """One named mechanism.

    name: for `convert` and the command line.
    config: the configuration behind the name.
    identity: whether a converted model's outputs are those of standard attention at first.
    about: one sentence for people.
    operator: the function of `heedful.ops` that computes it; `None` where SDPA does.
    inputs: what `heedful bench` calls the operator with, by the name of the case.
    """

    name: str
    config: Mechanism
    identity: bool
    about: str
    operator: Callable | None = None
    inputs: Mapping[str, Draw] = MappingProxyType({})


def _inputs(**sizes: tuple[int, int] | str) -> Draw:
    """Random kernels of these sizes, scaled so that logits keep theirs, and full mixing."""

    def draw(leaves: Leaves) -> Leaves:
        heads, more = leaves["q"].shape[1], {}
        for name, size in sizes.items():
            if size == "all":
                more[name] = torch.randn(1, heads, heads, dtype=torch.float64) / heads**0.5
            else:
                more[name] = torch.randn(heads, *size, dtype=torch.float64) / size[0]
        return leaves | more

    return draw


def _low_rank(leaves: Leaves) -> Leaves:
    heads = leaves["q"].shape[1]
    u, w, mix = (torch.randn(*n, dtype=torch.float64) for n in (
        (heads, 2, 6), (heads, 2, 11), (heads // 2, 2, 2)
    ))  # fmt: skip
    return leaves | {"u": u / 6, "w": w, "post_mix": mix / 2**0.5}


def _low_rank_attention(
    q: Tensor, k: Tensor, v: Tensor, *, u: Tensor, w: Tensor, **options: object
) -> Tensor:
    return multi_token_attention(q, k, v, conv=LowRank(u, w), **options)


def _identity_kernels(leaves: Leaves) -> Leaves:
    conv = torch.zeros(leaves["q"].shape[1], 6, 11, dtype=torch.float64)
    conv[:, -1, 5] = 1
    return leaves | {"conv": conv}


def _pairs(leaves: Leaves) -> Leaves:
    joined = torch.cat([leaves["v"][:, ::2], leaves["v"][:, 1::2]], dim=-1)
    return leaves | {"v": joined, "lam": torch.tensor(0.5, dtype=torch.float64)}


_BOTH = {"conv": (6, 11), "post_conv": (6, 11), "mix": "all", "post_mix": "all"}

TABLE = (
    MechanismRow("standard", Standard(), True, "softmax attention, the baseline"),
    MechanismRow(
        "mta",
        MultiToken(),
        True,
        "both convolutions and full head mixing",
        multi_token_attention,
        {
            "mta-pre": _inputs(conv=(6, 11)),
            "mta-identity": _identity_kernels,
            "mta-post": _inputs(post_conv=(6, 11)),
            "mta": _inputs(**_BOTH),
        },
    ),
    MechanismRow(
        "mta-flash",
        MultiToken.flash(),
        True,
        "kernels of rank two before the softmax, pairs mixed after it: attention with wide heads",
        _low_rank_attention,
        {"mta-flash": _low_rank},
    ),
    MechanismRow(
        "mta-published",
        MultiToken.published(),
        False,
        "the same with norm and gate, as in the paper",
        multi_token_attention,
    ),
    MechanismRow(
        "mta-v1", MultiToken.v1(), False, "the paper's first version", multi_token_attention
    ),
    MechanismRow(
        "talking-heads",
        TalkingHeads(),
        True,
        "head mixing without convolutions",
        multi_token_attention,
        {"talking-heads": _inputs(mix="all", post_mix="all")},
    ),
    MechanismRow(
        "selective",
        Selective(),
        False,
        "head 0 hides tokens from later ones",
        selective_attention,
        {"selective": lambda leaves: leaves},
    ),
    MechanismRow(
        "differential",
        Differential(),
        False,
        "the difference of two maps",
        differential_attention,
        {"differential": _pairs},
    ),
    MechanismRow(
        "grouped",
        Grouped(),
        False,
        "near tokens one by one, far ones by summaries of groups",
        grouped_attention,
    ),
    MechanismRow(
        "differential-v2",
        DifferentialV2(),
        False,
        "the difference of two maps over the same keys and values, a lambda per token",
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
        "gated", Gated(), False, "each head's output passes a gate that the layer's input opens"
    ),
    MechanismRow(
        "exclusive",
        Exclusive(),
        False,
        "each head's output without its part along the token's own value",
    ),
    MechanismRow(
        "forgetting",
        Forgetting(),
        False,
        "a forget gate per head and token, whose logarithms add up in the logits",
    ),
    MechanismRow(
        "parallax",
        Parallax(),
        True,
        "a first-order correction of each head's output along a second query",
    ),
    MechanismRow(
        "retention-gate",
        RetentionGate(),
        True,
        "standard attention, and a gate per token that says how long a cache keeps it",
    ),
    MechanismRow("dex", Dex(), True, "each head's output less a learned linear function of it"),
    MechanismRow(
        "simplicial",
        Simplicial(),
        False,
        "in every fourth layer attention to pairs of tokens, one from each of two windows",
    ),
    MechanismRow(
        "local-global",
        LocalGlobal(),
        False,
        "a sliding window, but for every sixth layer",
    ),
)

NAMES = tuple(row.name for row in TABLE)
_KINDS = {type(row.config).__name__: type(row.config) for row in TABLE}


def mechanism(name: str) -> Mechanism:
    """The configuration behind a name of the table; an unknown one raises with the nearest."""
    config = next((row.config for row in TABLE if row.name == name), None)
    if config is None:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"mechanism must be one of {', '.join(NAMES)}, got {name!r}{hint}")
    return config


def to_json(config: Mechanism) -> dict:
    """A mechanism as a JSON object, `{"kind": ..., **fields}`."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def from_json(data: dict) -> Mechanism:
    """The mechanism that `to_json` wrote; unknown kinds or fields raise."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise UserError(
            f"mechanism kind must be one of {', '.join(_KINDS)}, got {kind!r}; it was written by "
            "another version of heedful"
        )
    names = {field.name for field in dataclasses.fields(_KINDS[kind])}
    if unknown := sorted(set(fields) - names):
        raise UserError(
            f"{kind} has no field {', '.join(unknown)}; it was written by another heedful version"
        )
    return _KINDS[kind](**fields)
