"""Parallax and Dex: their formulas, gradients and memory."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import jvp

from heedful.nn import LayerInputs, Standard
from heedful.ops import Visibility
from heedful_lab.rivals.dex import Dex
from heedful_lab.rivals.parallax import Parallax
from helpers.layers import SHAPE, qkvx, stirred
from helpers.oracle import EXACT, draw


def second(module, x: Tensor) -> Tensor:
    return (x @ module.second.weight.mT).unflatten(2, (4, 6)).transpose(1, 2)


def test_parallax_by_loops():
    module, (q, k, v, x) = stirred(Parallax()), qkvx(5)
    r, expected = second(module, x).detach(), torch.zeros_like(q)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        dots = [
            [sum(float(y[b, h, i, c] * k[b, h // 2, j, c]) for c in range(6)) for j in range(i + 1)]
            for y in (q, r)
        ]
        weights = [math.exp(x / 6**0.5) for x in dots[0]]
        p = [w / sum(weights) for w in weights]
        mean = sum(w * s for w, s in zip(p, dots[1], strict=True))
        for j, (w, s) in enumerate(zip(p, dots[1], strict=True)):
            expected[b, h, i] += (w * (1 + mean) - w * s) * v[b, h // 2, j]
    inputs = LayerInputs(input=x)
    torch.testing.assert_close(module(q, k, v, inputs=inputs).output, expected, **EXACT)
    last = module(q[:, :, 3:], k, v, inputs=inputs).output
    torch.testing.assert_close(last, expected[:, :, 3:], **EXACT)


def test_the_correction_is_the_slope_of_attention_along_the_second_query():
    module, (q, k, v, x) = stirred(Parallax()), qkvx(70)
    plain, scale = Standard().build(SHAPE), 0.4
    wide = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)

    def attend(q: Tensor) -> Tensor:
        hidden = torch.ones(70, 70).bool().triu(1)
        return (q @ wide[0].mT * scale).masked_fill(hidden, -math.inf).softmax(-1) @ wide[1]

    slope = jvp(attend, (q,), (second(module, x) / scale,))[1]
    out = module(q, k, v, scale=scale, inputs=LayerInputs(input=x)).output
    expected = plain(q, k, v, scale=scale).output - slope
    torch.testing.assert_close(out, expected, **EXACT)


def test_cap_bias_and_sinks_of_a_family():
    module, (q, k, v, x) = stirred(Parallax()), (y.requires_grad_() for y in qkvx(70))
    bias, sinks = draw(1, 4, 70, 70).requires_grad_(), draw(4).requires_grad_()
    r = second(module, x)
    wide = k.repeat_interleave(2, 1)
    logits = 3 * torch.tanh(q @ wide.mT / 6**0.5 / 3) + bias
    logits = logits.masked_fill(torch.ones(70, 70).bool().triu(1), -math.inf)
    column = sinks[:, None, None].expand(2, 4, 70, 1)
    p = torch.cat([logits, column], -1).softmax(-1)[..., :70]
    other = r @ wide.mT
    weights = p * (1 + (p * other).sum(-1, keepdim=True) - other)
    inputs = LayerInputs(input=x, bias=bias, sinks=sinks, softcap=3.0)
    actual, expected = module(q, k, v, inputs=inputs).output, weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(actual, expected, **EXACT)
    leaves, factor = (q, k, v, x, bias, sinks, module.second.weight), draw(*q.shape)
    slopes = (torch.autograd.grad((y * factor).sum(), leaves) for y in (actual, expected))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    torch.testing.assert_close(module.maps(q, k, inputs=inputs).weights, weights, **EXACT)


def test_second_queries_are_rotated_to_their_positions():
    module, (q, k, v, x) = stirred(Parallax()), qkvx(5)
    turns = []

    def rotation(r: Tensor, positions: Tensor) -> Tensor:
        turns.append(positions)
        return r.flip(-1)

    inputs = LayerInputs(input=x, positions=torch.arange(3, 8)[None], rotation=rotation)
    actual = module(q[:, :, 2:], k, v, inputs=inputs).output
    rows = module.second.weight.unflatten(0, (4, 6)).flip(1).flatten(0, 1).detach()
    module.second.weight.data.copy_(rows)
    expected = module(q, k, v, inputs=LayerInputs(input=x)).output
    torch.testing.assert_close(actual, expected[:, :, 2:], **EXACT)
    assert turns[0].tolist() == [[5, 6, 7]]


VISIBILITIES = {
    "documents": Visibility(documents=torch.tensor([[0] * 7 + [1] * 70 + [-1] * 3 + [2] * 10])),
    "window": Visibility(window=9),
    "padding": Visibility(padding=(torch.arange(90) > 4)[None]),
    "mutual": Visibility(mutual=torch.where(torch.arange(90) // 20 == 3, 0, -1)[None]),
    "positions": Visibility(window=40, positions=torch.arange(90)[None] * 2),
}


@pytest.mark.parametrize("name", VISIBILITIES)
def test_blocks_see_what_they_may(name):
    """Also where the rows are more than one block."""
    module, visibility = stirred(Parallax()), VISIBILITIES[name]
    q, k, v, x = (y.requires_grad_() for y in qkvx(90))
    inputs = LayerInputs(input=x)
    out = module(q, k, v, visibility=visibility, inputs=inputs).output
    visible = visibility.dense(90, 90, q.device)[:, None]
    wide = k.repeat_interleave(2, 1)
    logits = (q @ wide.mT / 6**0.5).masked_fill(~visible, -math.inf)
    p = logits.softmax(-1).nan_to_num(0)
    other = second(module, x) @ wide.mT
    weights = p * (1 + (p * other).sum(-1, keepdim=True) - other)
    expected = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out, expected, **EXACT)
    factor = draw(*q.shape)
    slopes = (torch.autograd.grad((y * factor).sum(), (q, k, v, x)) for y in (out, expected))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("config", [Parallax(), Dex()], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_new_layer_changes_no_bit(config, dtype):
    (q, k, v, x), module = qkvx(70), config.build(SHAPE)
    q, k, v, x = (y.to(dtype) for y in (q, k, v, x))
    plain = Standard().build(SHAPE)(q, k, v).output
    out = module(q, k, v, inputs=LayerInputs(input=x)).output
    assert torch.equal(out, plain)
    (out.float() * torch.randn(out.shape)).sum().backward()
    slopes = [bool((p.grad != 0).any()) for p in module.parameters()]
    assert any(slopes), "it learns from there"


@pytest.mark.parametrize("heads", [None, (2,), (3, 0)])
def test_dex_by_loops(heads):
    module, (q, k, v, _) = stirred(Dex(heads)), qkvx(5)
    plain = Standard().build(SHAPE)(q, k, v).output
    matrix, factor = module.matrix.tolist(), module.factor.item()
    expected = plain.clone()
    for b, h, i, c in torch.cartesian_prod(*map(torch.arange, plain.shape)).tolist():
        if heads is None or h in heads:
            row = plain[b, h, i].tolist()
            expected[b, h, i, c] -= factor * sum(row[a] * matrix[a][c] for a in range(6))
    torch.testing.assert_close(module(q, k, v).output, expected, **EXACT)


def test_refused():
    for heads in ((), 3, (-1,), (0.5,), ("all",)):
        with pytest.raises(ValueError, match="heads must be a tuple of head numbers from 0 on"):
            Dex(heads)
    with pytest.raises(ValueError, match="heads must name each head once"):
        Dex((1, 1))
    with pytest.raises(ValueError, match="heads must be below the model's 4 heads, got 7"):
        Dex((0, 7)).build(SHAPE)
