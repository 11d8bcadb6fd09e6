"""Baselines against loops over single numbers: what is mixed, convolved, doubled or cut."""

import math

import pytest
import torch

from heedful.nn import (
    Gated,
    HeadShape,
    LayerInputs,
    LocalGlobal,
    Standard,
)
from heedful.ops import Visibility
from helpers.layers import SHAPE, attended, stirred
from helpers.oracle import EXACT, draw


@pytest.mark.parametrize("per", ["channel", "head"])
@pytest.mark.parametrize("start", ["published", "identity"])
def test_gates_open_by_the_input_of_their_token(per, start):
    """Also of the newest tokens alone, whose input comes with that of earlier ones."""
    module, inputs = stirred(Gated(per, start)), draw(2, 5, 20)
    weights = module.gate.weight.tolist()
    q, k, v = draw(2, 5, 4, 6), draw(2, 5, 2, 6), draw(2, 5, 2, 6)
    expected = attended(q, k, v)
    for b, t, h, c in torch.cartesian_prod(*map(torch.arange, q.shape)).tolist():
        row = weights[h * 6 + c if per == "channel" else h]
        x = sum(float(inputs[b, t, a]) * row[a] for a in range(20))
        expected[b, t, h, c] *= (2 if start == "identity" else 1) / (1 + math.exp(-x))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    beside = LayerInputs(input=inputs)
    actual = module(q, k, v, inputs=beside).output.transpose(1, 2)
    torch.testing.assert_close(actual, expected, **EXACT)
    last = module(q[:, :, 3:], k, v, inputs=beside).output.transpose(1, 2)
    torch.testing.assert_close(last, expected[:, 3:], **EXACT)


def test_gates_start_as_they_say():
    plain, inputs = Standard().build(SHAPE), draw(2, 5, 20)
    q, k, v = draw(2, 4, 5, 6), draw(2, 2, 5, 6), draw(2, 2, 5, 6)
    identity = Gated(start="identity").build(SHAPE)
    beside = LayerInputs(input=inputs)
    assert torch.equal(identity(q, k, v, inputs=beside).output, plain(q, k, v).output)
    published = Gated().build(HeadShape(heads=4, key_heads=2, dim=60, hidden=200, layer=0))
    assert published.gate.weight.std().item() == pytest.approx(200**-0.5, rel=0.1)


def test_local_global_layers():
    windows = [LocalGlobal().build(HeadShape(4, 2, 6, 20, i)).window for i in range(13)]
    assert windows == [*[1024] * 5, None, *[1024] * 5, None, 1024]
    q, k, v = draw(1, 5, 4, 6), draw(1, 5, 2, 6), draw(1, 5, 2, 6)
    for layer, window in ((0, 2), (1, None)):
        module = LocalGlobal(window=2, every=2).build(HeadShape(4, 2, 6, 20, layer))
        actual = module(*(x.transpose(1, 2) for x in (q, k, v))).output.transpose(1, 2)
        torch.testing.assert_close(actual, attended(q, k, v, window), **EXACT)
    assert module.roles == {"decoder", "encoder"}


def test_a_model_with_a_narrower_window_keeps_it():
    module, plain = (x.build(SHAPE) for x in (LocalGlobal(window=4, every=9), Standard()))
    q, k, v = draw(1, 4, 7, 6), draw(1, 2, 7, 6), draw(1, 2, 7, 6)
    narrow = Visibility(window=2)
    expected = plain(q, k, v, visibility=narrow).output
    torch.testing.assert_close(module(q, k, v, visibility=narrow).output, expected, **EXACT)
