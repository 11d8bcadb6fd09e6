"""Layers in encoders and cross-attention, and with a bias of the family's: maps and outputs."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.nn import (
    Differential,
    Grouped,
    HeadShape,
    Layer,
    LayerInputs,
    LayerOutput,
    MultiToken,
    Selective,
    Standard,
    TalkingHeads,
)
from heedful.ops import Queries, Visibility
from helpers.layers import stirred

CONFIGS = {
    "standard": Standard(),
    "local": Standard(window=3),
    "mta": MultiToken(conv=(4, 3), post_conv=(3, 5), conv_every=1),
    "talking heads": TalkingHeads(group=2),
    "selective": Selective(),
    "selective per head": Selective(selector="per-head"),
    "differential": Differential(),
}
CASES = [
    (name, role)
    for name, config in CONFIGS.items()
    for role in ("decoder", "encoder", "cross")
    if role in config.build(HeadShape(4, 2, 6, 20, 0, role)).roles
]
VISIBILITIES = {
    "decoder": Visibility(),
    "encoder": Visibility(causal=False),
    "cross": Visibility(causal=False, queries=Queries()),
}
every = pytest.mark.parametrize(("name", "role"), CASES)


def layer_of(name: str, role: str) -> Layer:
    """With parameters that are no identities."""
    return stirred(CONFIGS[name], shape=HeadShape(4, 2, 6, 20, 0, role))


def draw(queries: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = ((4, queries, 6), (2, 9, 6), (2, 9, 6), (4, queries, 9))
    return tuple(torch.randn(2, *size, dtype=torch.float64) for size in sizes)


def test_where_mechanisms_are_defined():
    roles = {name: {p for n, p in CASES if n == name} for name in CONFIGS}
    everywhere = {"decoder", "encoder", "cross"}
    selective = {"selective": {"decoder"}, "selective per head": {"decoder"}}
    expected = dict.fromkeys(CONFIGS, everywhere) | selective | {"local": {"decoder", "encoder"}}
    assert roles == expected
    assert Layer.roles == {"decoder"}
    assert Layer.takes == frozenset()


@pytest.mark.crossed
@every
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("sunk", [False, True])
def test_maps_are_what_multiplies_the_values(name, role, biased, softcap, sunk):
    layer, (q, k, v, bias) = layer_of(name, role), draw(5 if role == "cross" else 9)
    sinks = torch.randn(4, dtype=torch.float64) if sunk else None
    inputs = LayerInputs(bias=bias if biased else None, softcap=softcap, sinks=sinks)
    out = layer(q, k, v, visibility=VISIBILITIES[role], scale=0.7, inputs=inputs).output
    weights = layer.maps(q, k, visibility=VISIBILITIES[role], scale=0.7, inputs=inputs).weights
    if name == "differential":
        joined = torch.cat([v[:, 0::2], v[:, 1::2]], dim=-1).repeat_interleave(2, dim=1)
        expected = layer.norm(weights @ joined).unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2)
    else:
        expected = weights @ v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@every
def test_terms_change_outputs_and_a_bias_and_sinks_get_gradients(name, role):
    layer, (q, k, v, bias) = layer_of(name, role), draw()
    assert {"bias", "softcap", "sinks"} <= layer.takes
    plain = layer(q, k, v, visibility=VISIBILITIES[role]).output
    terms = {"bias": bias, "sinks": torch.randn(4, dtype=torch.float64), "softcap": 0.5}
    for term, value in terms.items():
        learned = term != "softcap"
        inputs = LayerInputs(**{term: value.requires_grad_() if learned else value})
        actual = layer(q, k, v, visibility=VISIBILITIES[role], inputs=inputs).output
        assert not torch.allclose(actual, plain), term
        if learned:
            (grad,) = torch.autograd.grad(actual.square().sum(), value)
            assert bool((grad != 0).any() if term == "bias" else (grad != 0).all()), term


@pytest.mark.parametrize(
    ("name", "value", "default"),
    [("softcap", 2.0, None), ("sinks", torch.zeros(4), None), ("dropout", 0.1, 0)],
)
def test_what_grouped_attention_refuses(name, value, default):
    layer, (q, k, v, _) = Grouped(refine="mean").build(HeadShape(4, 2, 6, 20, 0)), draw()
    assert name not in layer.takes
    with pytest.raises(ValueError, match=f"{name} must be {default} for grouped attention"):
        layer(q, k, v, inputs=LayerInputs(**{name: value}))


@pytest.mark.parametrize("impl", ["auto", "reference", "tiled"])
def test_standard_attention_with_a_bias(impl):
    layer, (q, k, v, bias) = layer_of("standard", "decoder"), draw()
    layer.impl = impl
    mask = bias.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    actual = layer(q, k, v, inputs=LayerInputs(bias=bias)).output
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_an_even_kernel_gets_a_middle_row_in_an_encoder():
    encoder, decoder = (layer_of("mta", role) for role in ("encoder", "decoder"))
    assert encoder.conv.shape == (4, 5, 3) and decoder.conv.shape == (4, 4, 3)
    assert encoder.post_conv.shape == decoder.post_conv.shape == (4, 3, 5)
    assert (dict(encoder.tails), decoder.tails) == ({}, {"queries": 5})
    encoder.reset_parameters()
    assert bool((encoder.conv[:, 2, 1] == 1).all()) and encoder.conv.sum() == 4


@pytest.mark.parametrize("name", ["mta", "talking heads"])
@pytest.mark.parametrize("role", ["encoder", "cross"])
def test_identity_at_initialisation(name, role):
    layer, (q, k, v, _) = CONFIGS[name].build(HeadShape(4, 2, 6, 20, 0, role)), draw()
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    actual = layer.double()(q, k, v, visibility=VISIBILITIES[role]).output
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_what_is_given_is_cut_with_its_tokens():
    bias = torch.arange(5 * 9.0).view(1, 1, 5, 9)
    cut = LayerInputs(input=torch.zeros(1, 5, 3), bias=bias).before(2, 2)
    assert cut.input.shape == (1, 2, 3) and torch.equal(cut.bias, bias[:, :, 1:3, :7])


def test_depth_scaling_is_of_self_attention():
    config = MultiToken(input_scaling="depth")
    factors = {
        role: config.build(HeadShape(4, 2, 6, 20, 1, role)).input_factor
        for role in ("decoder", "encoder", "cross")
    }
    assert factors["decoder"] == factors["encoder"] < 1 == factors["cross"]
    assert isinstance(layer_of("mta", "cross")(*draw()[:3]), LayerOutput)
