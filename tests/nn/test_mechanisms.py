"""Configurations: names, JSON, and what they refuse."""

import dataclasses
import json

import pytest

from heedful.nn import (
    NAMES,
    Differential,
    Forgetting,
    Gated,
    HeadShape,
    LocalGlobal,
    MultiToken,
    Selective,
    Standard,
    TalkingHeads,
    ablations,
    from_json,
    mechanism,
    to_json,
)

SHAPE = HeadShape(heads=4, key_heads=2, dim=8, hidden=32, layer=0)
SELECTORS = ("head", "mean", "per-head", "bilinear", "extra")
CONFIGS = {
    **{name: mechanism(name) for name in NAMES},
    **{f"ablation {name}": config for name, config in ablations().items()},
    **{f"selector {name}": Selective(selector=name) for name in SELECTORS},
    "another head": Selective(head=3),
    "first tokens hidden": Selective(protect_first=False),
    "pairs": TalkingHeads(group=2),
    "forgetting identity": Forgetting("identity"),
    "gated heads": Gated("head", "identity"),
    "local layers": LocalGlobal(64, 2),
    "pairs before and after": MultiToken((6, 11), None, 1, 2, 2, rank=2),
    "look-back": MultiToken((6, 6), None, 1, None, 2, rank=2, centred=False),
    "everything": MultiToken((2, 3), (4, 9), 3, 2, 4, "depth", "vector", "identity", "depth"),
}


def test_json_gives_the_same_configuration_back():
    for config in CONFIGS.values():
        assert from_json(json.loads(json.dumps(to_json(config)))) == config


def test_json_names_kind_and_every_field():
    assert to_json(MultiToken.v1()) == {
        "kind": "MultiToken",
        "conv": (6, 11),
        "post_conv": None,
        "conv_every": 4,
        "mix": None,
        "post_mix": 2,
        "norm": "depth",
        "gate": "none",
        "gate_start": "published",
        "input_scaling": "none",
        "rank": None,
        "centred": True,
    }


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"kind": "Clustered"},
            "mechanism kind must be one of Standard, .* got 'Clustered': .* mechanisms=",
        ),
        ({"head": 1}, "mechanism kind must be one of .* got None"),
        ({"kind": "Selective", "heads": 1, "n": 2}, "Selective has no field heads, n; .* another"),
        ({"kind": "MultiToken", "conv": [6, 10]}, r"conv must be .* got \(6, 10\)"),
    ],
    ids=["kind", "no kind", "fields", "value"],
)
def test_json_of_another_version(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(data)


def test_names():
    assert mechanism("standard") == Standard()
    assert mechanism("mta") == MultiToken()
    assert mechanism("mta-published") == MultiToken(norm="plain", gate="scalar")
    assert mechanism("mta-v1") == MultiToken(post_conv=None, mix=None, post_mix=2, norm="depth")
    assert mechanism("talking-heads") == TalkingHeads()
    assert mechanism("selective") == Selective()
    assert mechanism("differential") == Differential()


@pytest.mark.parametrize(
    ("name", "nearest"), [("selectve", "selective"), ("talking_heads", "talking-heads")]
)
def test_an_unknown_name_is_answered_with_the_nearest(name, nearest):
    expected = f"mechanism must be one of standard, .* got '{name}'; did you mean '{nearest}'"
    with pytest.raises(ValueError, match=expected):
        mechanism(name)
    with pytest.raises(ValueError, match=r"got 'xyz'$"):
        mechanism("xyz")


REFUSED = {
    r"conv must be \(c_q, c_k\) .* got \(6, 10\); keys are centred, so take the next odd": (
        lambda: MultiToken(conv=(6, 10))
    ),
    r"post_conv must be .* got \(0, 3\)": lambda: MultiToken(post_conv=(0, 3)),
    r"conv must be .* got \(3,\)": lambda: MultiToken(conv=(3,)),
    "conv must be .* got 6; keys": lambda: MultiToken(conv=6),
    r"conv must be .* got \(2\.5, 3\)": lambda: MultiToken(conv=(2.5, 3)),
    "conv_every must be a whole number of at least 1 .* got 0": lambda: MultiToken(conv_every=0),
    r"conv_every must be .* got 2\.5": lambda: MultiToken(conv_every=2.5),
    "post_mix must be 'all', a group size or None, got 0": lambda: MultiToken(post_mix=0),
    "mix must be 'all', a group size or None, got 'every'": lambda: MultiToken(mix="every"),
    r"rank must be a whole number from 1 to c_q and c_k of conv, which is 6 for .* got 7": (
        lambda: MultiToken((6, 11), None, 1, None, 2, rank=7)
    ),
    "rank must be .* which is None; got 2": lambda: MultiToken(None, None, 1, None, 2, rank=2),
    "post_conv must be None with rank, got .* MultiToken.flash": lambda: MultiToken(rank=2),
    "mix must be a group size or None with rank, got 'all'": (
        lambda: MultiToken((6, 11), None, 1, "all", 2, rank=2)
    ),
    "post_mix must be a group size or None with rank, got 'all'": (
        lambda: MultiToken((6, 11), None, 1, None, "all", rank=2)
    ),
    "centred=False needs a rank": lambda: MultiToken(centred=False),
    "centred must be True or False, got 0": lambda: MultiToken(centred=0),
    "post_mix mixes heads of 2 key heads, which do not divide the model's 3; use a divisor": (
        lambda: MultiToken.flash().build(HeadShape(9, 3, 4, 36, 0))
    ),
    "norm must be one of 'none', 'plain', 'depth', got 'rms'": lambda: MultiToken(norm="rms"),
    "gate must be one of 'none', 'scalar', 'vector', got None": lambda: MultiToken(gate=None),
    "gate_start must be one of .* got 'zero'": lambda: MultiToken(gate_start="zero"),
    "selector must be one of 'head', .* got 'first'": lambda: Selective(selector="first"),
    "head must be a head index, .* got -1": lambda: Selective(head=-1),
    "head must be .* got 2 with selector='mean'": lambda: Selective(selector="mean", head=2),
    "mix must be 'all', a group size or None, got True": lambda: MultiToken(mix=True),
    "conv must be .* got .2, True.": lambda: MultiToken(conv=(2, True)),
    "group must be 'all' or a group size, got -2": lambda: TalkingHeads(-2),
    "group must be 'all' or a group size, got 'x'": lambda: TalkingHeads("x"),
    "head must be a head index, .* got 1.5": lambda: Selective(head=1.5),
    "head must be a head index, .* got 'a'": lambda: Selective(head="a"),
    "protect_first must be True or False, got 1": lambda: Selective(protect_first=1),
    "per must be one of 'channel', 'head', got 'token'": lambda: Gated("token"),
    "start must be one of 'published', 'identity', got 'zero'": lambda: Gated(start="zero"),
    "window must be a whole number of at least 1, got 0": lambda: LocalGlobal(window=0),
    "every must be a whole number of at least 1, got 1.5": lambda: LocalGlobal(every=1.5),
    "dim must be None or a whole number of at least 1": lambda: Selective("mean", dim=4),
    "dim must be None .* got 0 with": lambda: Selective("extra", dim=0),
    "dim must be None .* got 2.5 with": lambda: Selective("bilinear", dim=2.5),
    "dim must be None .* got True with": lambda: Selective("extra", dim=True),
    # Configurations that do not fit a model.
    "mix groups of 3 heads do not divide the model's 4 heads; use a divisor": (
        lambda: TalkingHeads(3).build(SHAPE)
    ),
    "post_mix groups of 8 heads do not divide the model's 4 heads": (
        lambda: MultiToken(post_mix=8).build(SHAPE)
    ),
    "head must be below the model's 4 heads, got 4": lambda: Selective(head=4).build(SHAPE),
    "differential attention pairs heads, .* heads must be even, got 3": (
        lambda: Differential().build(HeadShape(3, 3, 8, 32, 0))
    ),
    "differential attention pairs heads, .* key heads .* 1": (
        lambda: Differential().build(HeadShape(4, 1, 8, 32, 0))
    ),
}


def test_refused_values():
    for message, make in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            make()


def test_configurations_cannot_change():
    for config in CONFIGS.values():
        assert dataclasses.is_dataclass(config)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.norm = "plain"
