"""One layer that is multi-token and selective: its definition, and what each part alone gives."""

import pytest
import torch
from torch import Tensor

from heedful.nn import HeadShape, LayerInputs, Selective, SelectiveMultiToken
from heedful.ops import LowRank, Visibility
from heedful.ops.common.standard import masked_softmax
from heedful.ops.common.terms import Terms
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.reference import mix_heads, multi_token_attention_map
from heedful.ops.selective.reference import selection

SHAPE = HeadShape(heads=4, key_heads=2, dim=8, hidden=32, layer=0)
TOKENS = 37
PADDING = torch.arange(TOKENS) >= torch.tensor([[0], [5]])
VISIBILITIES = {
    "causal": Visibility(),
    "window": Visibility(window=9),
    "padding": Visibility(padding=PADDING),
    "documents": Visibility(documents=torch.arange(TOKENS)[None] // 11),
}


def layer_of(config=None, std=0.5):
    torch.manual_seed(3)
    layer = (config or SelectiveMultiToken()).build(SHAPE).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=std)
    return layer


def drawn() -> tuple[list[Tensor], LayerInputs]:
    draw = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, h, TOKENS, 8, generator=draw).double() for h in (4, 2, 2))
    x = torch.randn(2, TOKENS, 32, generator=draw).double()
    return [x.requires_grad_() for x in (q, k, v)], LayerInputs(input=x)


def defined(layer, q, k, v, inputs: LayerInputs, visibility: Visibility) -> tuple[Tensor, Tensor]:
    """The whole map, convolved, less F, mixed after the softmax; and F after the last query."""
    selectors = layer.own_selector(q, inputs)
    masking = selection(*selectors, layer.keeps_first, visibility, 8**-0.5)
    steps: dict[str, Tensor] = {}
    conv, terms = LowRank(layer.u, layer.w, False), Terms(visibility, 8**-0.5)
    multi_token_attention_map(q, k, Parameters(conv), terms, steps=steps)
    logits = steps["conv"] - (masking.cumsum(2) - masking)
    visible = visibility.dense(TOKENS, TOKENS, q.device)[:, None]
    weights = masked_softmax(logits, visible, None)
    if layer.post_mix is not None:
        weights = mix_heads(weights, layer.post_mix, 2)
    return weights @ v.repeat_interleave(2, dim=1), masking.sum(2)


@pytest.mark.parametrize("name", VISIBILITIES)
@pytest.mark.parametrize("post_mix", [None, 2])
def test_the_definition_and_every_gradient(post_mix, name):
    layer = layer_of(SelectiveMultiToken(conv=(4, 5), rank=3, post_mix=post_mix, dim=5))
    (q, k, v), inputs = drawn()
    visibility = VISIBILITIES[name]
    actual = layer(q, k, v, visibility=visibility, inputs=inputs)
    output, state = defined(layer, q, k, v, inputs, visibility)
    torch.testing.assert_close(actual.output, output, rtol=0, atol=1e-12)
    torch.testing.assert_close(actual.state, state, rtol=0, atol=1e-12)
    assert state.max() > 1
    leaves = [q, k, v, *layer.parameters()]
    toward = torch.randn_like(output)
    for x, y in zip(
        torch.autograd.grad((actual.output * toward).sum(), leaves),
        torch.autograd.grad((output * toward).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-11)
    maps = layer.maps(q, k, visibility=visibility, inputs=inputs)
    spread = v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(maps.weights @ spread, output, rtol=0, atol=1e-12)


def test_without_kernels_and_mixing_it_is_selective_attention():
    layer = layer_of(SelectiveMultiToken(post_mix=None, dim=5))
    layer.u.data.zero_()[:, 0, -1] = 1
    layer.w.data.zero_()[:, 0, -1] = 1
    alone = Selective("extra", dim=5).build(SHAPE).double()
    alone.load_state_dict({x: layer.state_dict()[x] for x in ("query.weight", "key.weight")})
    (q, k, v), inputs = drawn()
    actual, expected = layer(q, k, v, inputs=inputs), alone(q, k, v, inputs=inputs)
    torch.testing.assert_close(actual.output, expected.output, rtol=0, atol=1e-13)
    assert torch.equal(actual.state, expected.state)


def test_it_changes_nothing_at_first():
    layer = SelectiveMultiToken().build(SHAPE).double()
    (q, k, v), inputs = drawn()
    spread = (x.repeat_interleave(2, dim=1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *spread, is_causal=True)
    actual = layer(q, k, v, inputs=inputs)
    torch.testing.assert_close(actual.output, expected, rtol=0, atol=1e-13)
    assert not actual.state.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 9}, "rank must be a whole number from 1 to"),
        ({"post_mix": "all"}, "post_mix must be a group size or None with rank"),
        ({"dim": 0}, "dim must be None or a whole number"),
        ({"protect_first": 1}, "protect_first must be True or False"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SelectiveMultiToken(**fields)
