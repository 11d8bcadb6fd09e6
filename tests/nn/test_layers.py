"""Layers against explicit formulas: initial values, placement, norm, gate, lambda, selectors."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful import ops
from heedful.nn import (
    NAMES,
    Differential,
    Forgetting,
    Grouped,
    HeadShape,
    Layer,
    LayerInputs,
    MultiToken,
    Selective,
    Standard,
    TalkingHeads,
    ablations,
    mechanism,
)
from heedful.ops import Visibility, selective_attention
from heedful.testing import assert_matches_oracle
from helpers.families import stir
from helpers.layers import SHAPE, stirred
from helpers.oracle import EXACT, draw


def qkv(tokens: int = 9, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, 4, queries or tokens, 6), draw(2, 2, tokens, 6), draw(2, 2, tokens, 6)


def layer(config, shape: HeadShape = SHAPE) -> torch.nn.Module:
    """Built, initialised, in fp64."""
    return config.build(shape).double()


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


IDENTITIES = {
    "standard": Standard(),
    "mta": MultiToken(),
    "mta in groups": MultiToken(mix=2, post_mix=2, conv=(2, 3)),
    "mta with a gate": MultiToken(gate="scalar", gate_start="identity"),
    "mta with a gate per channel": MultiToken(gate="vector", gate_start="identity"),
    "talking heads": TalkingHeads(),
    "talking heads in pairs": TalkingHeads(group=2),
    "forgetting": Forgetting("identity"),
    "selective with an extra head": Selective(selector="extra"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity_at_initialisation(name):
    q, k, v = qkv()
    out = layer(IDENTITIES[name])(q, k, v, inputs=LayerInputs(input=draw(2, 9, 20))).output
    torch.testing.assert_close(out, standard(q, k, v), **EXACT)


ALL = {name: mechanism(name) for name in NAMES} | {
    name: config for name, config in ablations().items()
}
ALL["selective, bilinear"] = Selective(selector="bilinear")
ALL["grouped"] = Grouped(size=2, window=2)  # short enough for these rows


def beside(tokens: int = 9) -> LayerInputs:
    """What some layers need of these tokens."""
    return LayerInputs(input=draw(2, tokens, SHAPE.hidden))


@pytest.mark.parametrize("name", ALL)
def test_every_preset_runs_and_trains_all_its_parameters(name):
    attention = stirred(ALL[name])
    q, k, v = (x.requires_grad_() for x in qkv())
    inputs = beside()
    out = attention(q, k, v, inputs=inputs)
    out.output.square().sum().backward()
    for parameter, p in [("q", q), ("k", k), ("v", v), *attention.named_parameters()]:
        assert p.grad is not None and bool((p.grad != 0).any()), parameter


@pytest.mark.parametrize("name", [x for x in ALL if "input" in layer(ALL[x]).needs])
def test_the_input_of_the_module_is_asked_for(name):
    attention = layer(ALL[name])
    expected = f"{type(attention).__name__} needs input beside q, k and v: pass inputs"
    with pytest.raises(ValueError, match=expected):
        attention(*qkv())


@pytest.mark.parametrize("name", [*NAMES, "pre+post conv, pre+post mix, vector gate"])
def test_built_means_initialised(name):
    assert bool(torch.empty(3).isnan().all()), "uninitialised memory is poisoned"
    assert all(bool(p.isfinite().all()) for p in ALL[name].build(SHAPE).parameters())


def test_the_ablation_has_the_rows_of_the_paper():
    rows = ablations()
    assert len(rows) == 5 * 5 + 3 + 1
    assert rows["pre+post conv, pre+post mix, scalar gate"] == MultiToken.published()
    assert rows["pre conv, post mix, depth scaling"] == MultiToken(
        post_conv=None, mix=None, norm="depth"
    )
    assert rows["8x13 pre conv only, depth scaling"].conv == (8, 13)
    assert len(set(rows.values())) == len(rows)


@pytest.mark.parametrize(
    ("every", "layers"),
    [(4, [2, 6, 10, 14, 18, 22]), (1, list(range(24))), (2, list(range(1, 24, 2))), (24, [12])],
)
def test_layers_with_convolutions(every, layers):
    config = MultiToken(conv_every=every)
    assert [index for index in range(24) if config.convolves(index)] == layers
    for index in range(24):
        attention = config.build(HeadShape(4, 2, 6, 20, index))
        assert (
            (attention.conv is not None) == (attention.post_conv is not None) == (index in layers)
        )
        assert attention.mix is not None and attention.post_mix is not None
        assert (attention.tails.get("queries", 0) > 0) == (index in layers)


def test_what_layers_declare():
    """Earlier query rows, what is kept beside keys and values, and what is given."""
    nothing, inputs = frozenset(), frozenset({"input"})
    for config, declared in {
        Standard(): (0, (), nothing),
        TalkingHeads(): (0, (), nothing),
        Differential(): (0, (), nothing),
        MultiToken(conv=(1, 5), post_conv=None): (0, (), nothing),
        MultiToken(conv=(4, 3), post_conv=None): (3, (), nothing),
        MultiToken(conv=None, post_conv=(2, 1)): (1, (), nothing),
        MultiToken(): (10, (), nothing),
        Selective(): (0, ("F",), nothing),
        Selective(selector="extra"): (0, ("F", "selector keys"), inputs),
        Forgetting(): (0, ("F",), inputs),
    }.items():
        attention = config.build(SHAPE)
        assert isinstance(attention, Layer)
        streams = tuple(stream.name for stream in attention.streams)
        actual = attention.tails.get("queries", 0), streams, attention.needs
        assert actual == declared, config
        assert attention.running == next(iter(streams), None)
        assert attention.plain_cache == (declared[:2] == (0, ())), config


@pytest.mark.parametrize("config", [MultiToken(conv=(3, 5), post_conv=(2, 3)), TalkingHeads()])
def test_the_newest_output_needs_no_more_than_the_declared_past_queries(config):
    attention = stirred(config)
    q, k, v = qkv(12)
    whole = attention(q, k, v).output[:, :, -1]
    rows = attention.tails["queries"] + 1 if attention.tails else 1
    torch.testing.assert_close(attention(q[:, :, -rows:], k, v).output[:, :, -1], whole, **EXACT)
    if rows > 1:
        fewer = attention(q[:, :, 1 - rows :], k, v).output[:, :, -1]
        assert not torch.allclose(fewer, whole, atol=1e-6)


@pytest.mark.parametrize("name", [*NAMES])
def test_maps_are_what_multiplies_the_values(name):
    attention, inputs = stirred(ALL[name]), beside()
    if getattr(attention, "norm", None) is not None:
        attention.norm.forward = lambda x: x
    if name == "gated":  # whose gate acts behind the map: wide open
        attention.gate.forward = lambda x: x.new_full(
            (*x.shape[:2], attention.gate.out_features), 40.0
        )
    else:
        attention.gate = None
    q, k, v = qkv()
    maps = attention.maps(q, k, visibility=Visibility(window=5), inputs=inputs).weights
    out = attention(q, k, v, visibility=Visibility(window=5), inputs=inputs).output
    if name == "differential":
        joined = torch.cat([v[:, 0::2], v[:, 1::2]], dim=-1)
        pairs = maps @ joined.repeat_interleave(2, dim=1)
        actual = pairs.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)
    else:
        actual = maps @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(actual, out, **EXACT)


def test_what_a_selective_layer_returns_for_caches_and_losses():
    q, k, v = qkv()
    attention = layer(Selective())
    plain = attention(q, k, v)
    attention.tau = 0.5
    actual = attention(q, k, v)
    expected = selective_attention(q, k, v, tau=0.5)
    assert plain.memory is None and torch.equal(actual.output, plain.output)
    assert torch.equal(actual.state, expected.state)
    assert torch.equal(actual.memory, expected.memory)


def test_a_window_of_ones_own_counts_by_positions():
    """Five keys that are left of forty: a window of ten hides all but the newest."""
    q, k, v = qkv(5, queries=1)
    positions = torch.tensor([[0, 9, 20, 29, 39]])
    actual = layer(Standard(window=10))(q, k, v, visibility=Visibility(positions=positions)).output
    newest = v[:, :, -1:].repeat_interleave(2, dim=1)
    torch.testing.assert_close(actual, newest, **EXACT)


@pytest.mark.parametrize("theirs", [None, 3, 7])
def test_a_window_of_ones_own_narrows_the_models(theirs):
    q, k, v = qkv()
    inputs = Visibility(window=theirs)
    actual = layer(Standard(window=5))(q, k, v, visibility=inputs).output
    narrow = Visibility(window=min(theirs or 9, 5))
    torch.testing.assert_close(
        actual, layer(Standard())(q, k, v, visibility=narrow).output, **EXACT
    )


@pytest.mark.parametrize(
    ("norm", "factor"), [("plain", 1.0), ("depth", 1 - (0.8 - 0.6 * math.exp(-0.3 * 2)))]
)
def test_norm_is_an_rms_norm_of_each_head(norm, factor):
    attention = layer(MultiToken(norm=norm, conv=None, post_conv=None))
    weight = draw(6)
    attention.norm.weight.data.copy_(weight)
    q, k, v = qkv()
    expected = standard(q, k, v)
    for head in expected.view(-1, 6):
        scale = (sum(x * x for x in head.tolist()) / 6 + 1e-5) ** -0.5
        head.copy_(head * scale * weight * factor)
    torch.testing.assert_close(attention(q, k, v).output, expected, **EXACT)


def test_depth_factors_are_the_published_ones():
    factors = [1 - HeadShape(1, 1, 1, 1, index).depth_factor for index in range(4)]
    assert [round(x, 4) for x in factors] == [0.8, 0.6445, 0.5293, 0.4439]


@pytest.mark.parametrize("start", ["published", "identity"])
@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_gate_is_a_sigmoid_of_the_normed_head(gate, start):
    attention = layer(
        MultiToken(norm="plain", gate=gate, gate_start=start, conv=None, post_conv=None)
    )
    stir(attention.gate, 0.3)
    weight, bias = attention.gate.weight.detach(), attention.gate.bias.detach()
    assert weight.shape == {"scalar": (1, 6), "vector": (6, 6)}[gate]
    q, k, v = qkv()
    expected = standard(q, k, v)
    for head in expected.view(-1, 6):
        normed = head * (head.square().mean() + 1e-5) ** -0.5
        opening = torch.tensor(
            [1 / (1 + math.exp(-(w @ normed + b))) for w, b in zip(weight, bias, strict=True)],
            dtype=torch.float64,
        )
        head.copy_(normed * opening * (2 if start == "identity" else 1))
    torch.testing.assert_close(attention(q, k, v).output, expected, **EXACT)


def test_a_published_gate_starts_near_one_half():
    attention = layer(MultiToken.published())
    std = 20**-0.5
    assert bool((attention.gate.bias == 0).all())
    assert 0 < attention.gate.weight.abs().max() <= 3 * std
    wide = MultiToken.published().build(HeadShape(1, 1, 4096, 100, 0))
    assert wide.gate.weight.std().item() == pytest.approx(0.1 * 0.9867, rel=0.05)


def test_lambda():
    attention = layer(Differential())
    vectors = [attention.lambda_q1, attention.lambda_k1, attention.lambda_q2, attention.lambda_k2]
    assert all(v.shape == (6,) for v in vectors)
    q1, k1, q2, k2 = (v.tolist() for v in vectors)
    first = math.exp(sum(a * b for a, b in zip(q1, k1, strict=True)))
    second = math.exp(sum(a * b for a, b in zip(q2, k2, strict=True)))
    start = 0.8 - 0.6 * math.exp(-0.3 * 2)
    assert attention.lam.item() == pytest.approx(first - second + start, abs=1e-12)
    wide = Differential().build(HeadShape(2, 2, 10_000, 20, 0))
    assert wide.lambda_q2.std().item() == pytest.approx(0.1, rel=0.05)


def test_differential_layer():
    """Heads 2p and 2p + 1 share their joined values, and one norm over both."""
    attention = layer(Differential(), HeadShape(heads=4, key_heads=4, dim=6, hidden=20, layer=1))
    attention.norm.weight.data.copy_(weight := draw(12))
    q, k, v = draw(2, 4, 7, 6), draw(2, 4, 7, 6), draw(2, 4, 7, 6)
    maps = (q @ k.mT / 6**0.5).masked_fill(~torch.ones(7, 7).bool().tril(), float("-inf"))
    maps = maps.softmax(-1)
    out = attention(q, k, v).output
    for pair in (0, 1):
        joined = torch.cat([v[:, 2 * pair], v[:, 2 * pair + 1]], dim=-1)
        wide = (maps[:, 2 * pair] - attention.lam * maps[:, 2 * pair + 1]) @ joined
        wide = wide * (wide.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * weight
        wide = wide * (1 - (0.8 - 0.6 * math.exp(-0.3)))
        torch.testing.assert_close(out[:, 2 * pair], wide[..., :6], **EXACT)
        torch.testing.assert_close(out[:, 2 * pair + 1], wide[..., 6:], **EXACT)


def selected(q, k, v, logits: Tensor, protect_first: bool = True) -> Tensor:
    """Selective attention from the logits `[B, 1 or H, T, T]` of what selects."""
    visible = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    s = logits.clamp(min=0).tril(-1)
    if protect_first:
        s[..., 0] = 0
    scores = q @ k.repeat_interleave(2, 1).mT / 6**0.5 - (s.cumsum(2) - s)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)


def test_selectors():
    q, k, v = qkv()
    hidden = draw(2, 9, 20)
    logits = q @ k.repeat_interleave(2, 1).mT / 6**0.5
    own = layer(Selective(selector="bilinear"))
    projected = hidden @ own.query.weight.mT @ (hidden @ own.key.weight.mT).mT / 6**0.5
    expected = {
        Selective(): logits[:, :1],
        Selective(head=3): logits[:, 3:],
        Selective(selector="mean"): logits.mean(1, keepdim=True),
        Selective(selector="per-head"): logits,
        Selective(selector="bilinear"): projected[:, None],
    }
    actual = []
    for config, by in expected.items():
        attention = own if config.selector == "bilinear" else layer(config)
        actual.append(attention(q, k, v, inputs=LayerInputs(input=hidden)).output)
        torch.testing.assert_close(actual[-1], selected(q, k, v, by), **EXACT)
    for i, part in enumerate(actual):
        for other in actual[:i]:
            assert (part - other).abs().max() > 1e-3, "selectors must differ to be told apart"


def test_unprotected_first_tokens():
    q, k, v = qkv()
    logits = (q @ k.repeat_interleave(2, 1).mT / 6**0.5)[:, :1]
    out = layer(Selective(protect_first=False))(q, k, v).output
    torch.testing.assert_close(out, selected(q, k, v, logits, protect_first=False), **EXACT)


def test_own_selectors_project_the_last_queries_of_a_longer_input():
    q, k, v = qkv(9, queries=3)
    hidden = draw(2, 9, 20)
    attention = layer(Selective(selector="bilinear"))
    expected = selective_attention(
        q, k, v,
        selector_q=(hidden[:, -3:] @ attention.query.weight.mT)[:, None],
        selector_k=(hidden @ attention.key.weight.mT)[:, None],
    )  # fmt: skip
    torch.testing.assert_close(
        attention(q, k, v, inputs=LayerInputs(input=hidden)).output, expected.output, **EXACT
    )


def test_an_extra_head_is_the_identity_and_its_keys_learn_first():
    attention = layer(Selective(selector="extra"))
    assert bool((attention.key.weight == 0).all()) and bool((attention.query.weight != 0).any())
    q, k, v = qkv()
    (
        attention(q, k, v, inputs=LayerInputs(input=draw(2, 9, 20))).output * draw(2, 4, 9, 6)
    ).sum().backward()
    assert attention.key.weight.grad.abs().max() > 1e-3
    assert bool((attention.query.weight.grad == 0).all()), "behind keys of zero"


@pytest.mark.parametrize(
    "visibility",
    [
        None,
        Visibility(),
        Visibility(window=3),
        Visibility(causal=False),
        Visibility(padding=torch.tensor([[False] * 2 + [True] * 7])),
        Visibility(documents=torch.tensor([[0] * 4 + [1] * 5])),
    ],
    ids=["default", "causal", "window", "not causal", "padding", "documents"],
)
@pytest.mark.parametrize("queries", [9, 4, 1])
def test_the_standard_layer_is_multi_token_attention_without_its_steps(visibility, queries):
    """Two routes, SDPA and this package's own operator, under every visibility."""
    q, k, v = qkv(9, queries=queries)
    bare = layer(MultiToken(conv=None, post_conv=None, mix=None, post_mix=None))
    expected = bare(q, k, v, visibility=visibility).output
    actual = layer(Standard())(q, k, v, visibility=visibility).output
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_inputs_beside_fp32_parameters(name, monkeypatch):
    attention, dtype = ALL[name].build(SHAPE), torch.bfloat16
    inputs = LayerInputs(input=draw(2, 40, SHAPE.hidden).to(dtype))
    stir(attention, 0.3)
    rounded = [x.to(dtype) for x in qkv(40)]
    actual = attention(*rounded, inputs=inputs).output
    assert actual.dtype == dtype
    for api in (ops.mta.api, ops.selective.api, ops.differential.api, ops.grouped.api):
        monkeypatch.setattr(api, "choose", lambda *_, **__: "reference")
    plain = attention(*rounded, inputs=inputs).output
    exact, attention = LayerInputs(input=inputs.input.double()), attention.double()
    oracle = attention(*(x.double() for x in rounded), inputs=exact).output
    assert_matches_oracle(name, actual, plain, oracle, terms=40)
