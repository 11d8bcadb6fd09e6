"""Mechanisms by name, and as plain JSON for checkpoints and result files."""

import dataclasses
import difflib

from heedful.nn.differential import Differential
from heedful.nn.multi_token import MultiToken, TalkingHeads
from heedful.nn.selective import Selective
from heedful.nn.standard import Standard

Mechanism = Standard | MultiToken | TalkingHeads | Selective | Differential

_KINDS = {
    kind.__name__: kind for kind in (Standard, MultiToken, TalkingHeads, Selective, Differential)
}

NAMES = (
    "standard",
    "mta",
    "mta-published",
    "mta-v1",
    "talking-heads",
    "selective",
    "differential",
)


def mechanism(name: str) -> Mechanism:
    """The configuration behind a name; an unknown name raises with the nearest one.

    `standard`; `mta`: both convolutions and full mixing, identity at initialisation;
    `mta-published`: the same with norm and gate; `mta-v1`: the paper's first version;
    `talking-heads`; `selective`: head 0 selects; `differential`.
    """
    made = {
        "standard": Standard(),
        "mta": MultiToken(),
        "mta-published": MultiToken.published(),
        "mta-v1": MultiToken.v1(),
        "talking-heads": TalkingHeads(),
        "selective": Selective(),
        "differential": Differential(),
    }
    if name not in made:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"mechanism must be one of {', '.join(NAMES)}, got {name!r}{hint}")
    return made[name]


def to_json(config: Mechanism) -> dict:
    """A mechanism as a JSON object, `{"kind": ..., **fields}`."""
    return {"kind": type(config).__name__, **dataclasses.asdict(config)}


def from_json(data: dict) -> Mechanism:
    """The mechanism that `to_json` wrote; unknown kinds or fields raise."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(
            f"mechanism kind must be one of {', '.join(_KINDS)}, got {kind!r}; it was written by "
            "another version of heedful"
        )
    known = {field.name for field in dataclasses.fields(_KINDS[kind])}
    if unknown := sorted(set(fields) - known):
        raise ValueError(
            f"{kind} has no field {', '.join(unknown)}; it was written by another heedful version"
        )
    return _KINDS[kind](**fields)
