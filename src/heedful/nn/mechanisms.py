"""The table of mechanisms: names, configurations, operators; and JSON for files."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.checks import UserError
from heedful.nn.differential import Differential
from heedful.nn.forgetting import Forgetting
from heedful.nn.gated import Gated
from heedful.nn.grouped import Grouped
from heedful.nn.layer import MechanismConfig
from heedful.nn.multi_token import MultiToken, TalkingHeads
from heedful.nn.selective import Selective
from heedful.nn.selective_multi_token import SelectiveMultiToken
from heedful.nn.standard import LocalGlobal, Standard
from heedful.ops import (
    LowRank,
    differential_attention,
    grouped_attention,
    multi_token_attention,
    selective_attention,
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
    config: MechanismConfig
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
        "head 0 masks tokens from later ones",
        selective_attention,
        {"selective": lambda leaves: leaves},
    ),
    MechanismRow(
        "mta-selective",
        SelectiveMultiToken(),
        True,
        "kernels of rank two that look back, pairs mixed, and a selector: tokens mask earlier ones",
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
        "gated", Gated(), False, "each head's output passes a gate that the layer's input opens"
    ),
    MechanismRow(
        "forgetting",
        Forgetting(),
        False,
        "a forget gate per head and token, whose logarithms add up in the logits",
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


def mechanism(name: str, table: Sequence[MechanismRow] = TABLE) -> MechanismConfig:
    """The configuration behind a name of a table; an unknown one raises with the nearest."""
    configs = {row.name: row.config for row in table}
    if name not in configs:
        near = difflib.get_close_matches(str(name), configs, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UserError(f"mechanism must be one of {', '.join(configs)}, got {name!r}{hint}")
    return configs[name]


def check_config(config: object) -> MechanismConfig:
    """Check a configuration of any mechanism, heedful's or the caller's own.

    Raises:
        ValueError: it is no instance of a frozen dataclass with `build(shape)`, no JSON file would
            hold its fields, or its class has the name of one of heedful's.
    """
    kind = type(config)
    if kind in _KINDS.values():
        return config
    params = getattr(kind, "__dataclass_params__", None)
    if params is None or not params.frozen or not isinstance(config, MechanismConfig):
        raise UserError(
            "mechanism must be a name or a configuration such as heedful.MultiToken(), or one of "
            f"your own (a frozen dataclass with build(shape)), got {config!r}"
        )
    _check_own_name(kind)
    try:
        same = from_json(json.loads(json.dumps(to_json(config))), (kind,)) == config
    except TypeError:
        same = False
    if not same:
        raise UserError(
            f"mechanism {config!r} must have fields that JSON can hold, so that it can be saved: "
            "numbers, texts, flags, None, and tuples of these"
        )
    return config


def _check_own_name(kind: type) -> None:
    if _KINDS.get(kind.__name__, kind) is not kind:
        raise UserError(
            f"mechanism {kind.__module__}.{kind.__name__} has the name of heedful.{kind.__name__}, "
            "and files know mechanisms by this name alone; call the class otherwise"
        )


def to_json(config: MechanismConfig) -> dict:
    """A mechanism as a JSON object, `{"kind": ..., **fields}`."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def from_json(data: dict, mechanisms: Iterable[type[MechanismConfig]] = ()) -> MechanismConfig:
    """The mechanism that `to_json` wrote; unknown kinds or fields raise.

    Arguments:
        data: the JSON object.
        mechanisms: classes of configurations beside those of the table.
    """
    kinds = dict(_KINDS)
    for own in mechanisms:
        if not isinstance(own, type) or not dataclasses.is_dataclass(own):
            raise UserError(
                f"mechanisms must be classes of configurations such as (Own,), got {own!r}"
            )
        _check_own_name(own)
        if kinds.setdefault(own.__name__, own) is not own:
            raise UserError(f"mechanisms has two classes of the name {own.__name__}; pass one")
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise UserError(
            f"mechanism kind must be one of {', '.join(kinds)}, got {kind!r}: pass the class of "
            "its configuration, as in heedful.load(..., mechanisms=(Own,)), or open it with the "
            "version of heedful that wrote it"
        )
    names = {field.name for field in dataclasses.fields(kinds[kind])}
    if unknown := sorted(set(fields) - names):
        raise UserError(
            f"{kind} has no field {', '.join(unknown)}; it was written by another version of it"
        )
    return kinds[kind](**{name: _hashable(x) for name, x in fields.items()})


def _hashable(x: object) -> object:
    """A value of JSON, its lists as the tuples that were written."""
    return tuple(_hashable(y) for y in x) if isinstance(x, list) else x
