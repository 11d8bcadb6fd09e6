"""2-simplicial attention: its formula, gradients, windows and memory."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from heedful.nn import (
    HeadShape,
    LayerInputs,
    Standard,
    StandardAttention,
)
from heedful.ops import Queries, Visibility
from heedful_lab.rivals.simplicial import Simplicial, SimplicialAttention
from helpers import layers
from helpers.layers import SHAPE, qkvx
from helpers.oracle import EXACT, draw


def layer(first: int, second: int, **options) -> SimplicialAttention:
    return Simplicial(first, second, every=1, **options).build(SHAPE).double()


def stirred(first: int, second: int, **options) -> SimplicialAttention:
    return layers.stirred(Simplicial(first, second, every=1, **options), 0.2)


def second(module: SimplicialAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Second keys and values, a head after another."""
    offset = 1.0 if module.config.start == "identity" else 0.0
    return tuple(
        torch.stack([x @ w.mT for w in projection.weight.split(6)], dim=1) + offset
        for projection in (module.second_key, module.second_value)
    )


def by_loops(module, q, k, v, x) -> Tensor:
    """The definition, for the last queries of all keys."""
    (more_k, more_v), config = (y.detach() for y in second(module, x)), module.config
    before = k.shape[2] - q.shape[2]
    out = torch.zeros_like(q)
    for b, h, row in itertools.product(*map(range, q.shape[:3])):
        i, g, weights = row + before, h // 2, {}
        for j in range(max(0, i - config.window + 1), i + 1):
            for m in range(max(0, i - config.second_window + 1), i + 1):
                terms = zip(q[b, h, row], k[b, g, j], more_k[b, g, m], strict=True)
                logit = sum(float(a) * float(c) * float(d) for a, c, d in terms)
                weights[j, m] = math.exp(logit / 6**0.5)
        total = sum(weights.values())
        for (j, m), weight in weights.items():
            out[b, h, row] += weight / total * v[b, g, j] * more_v[b, g, m]
    return out


def dense(module, q, k, v, x, visible: Tensor) -> Tensor:
    """All pairs at once, of keys that each query sees, `[1 or B, T, T]`, apart from windows."""
    wide = [y.repeat_interleave(2, 1) for y in (k, v, *second(module, x))]
    back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    near = [
        visible & (back >= 0) & (back < size)
        for size in (module.config.window, module.config.second_window)
    ]
    pairs = near[0][:, None, :, :, None] & near[1][:, None, :, None, :]
    logits = torch.einsum("bhid,bhjd,bhmd->bhijm", q, wide[0], wide[2]) / 6**0.5
    weights = logits.masked_fill(~pairs, -math.inf).flatten(3).softmax(-1).nan_to_num(0)
    weights = weights.view_as(logits)
    return torch.einsum("bhijm,bhjd,bhmd->bhid", weights, wide[1], wide[3])


@pytest.mark.parametrize("start", ["random", "identity"])
@pytest.mark.parametrize("windows", [(4, 2), (2, 3), (1, 1), (9, 9), (100, 3), (3, 100)], ids=str)
def test_by_loops(windows, start):
    module, (q, k, v, x) = stirred(*windows, start=start), qkvx(6)
    expected, inputs = by_loops(module, q, k, v, x), LayerInputs(input=x)
    torch.testing.assert_close(module(q, k, v, inputs=inputs).output, expected, **EXACT)
    last = module(q[:, :, 4:], k, v, inputs=inputs).output
    torch.testing.assert_close(last, expected[:, :, 4:], **EXACT)


VISIBILITIES = {
    "causal": Visibility(),
    "documents": Visibility(documents=torch.tensor([[0] * 7 + [1] * 50 + [-1] * 3 + [2] * 10])),
    "a narrower window": Visibility(window=9),
    "padding": Visibility(padding=(torch.arange(70) > 4)[None]),
}


@pytest.mark.parametrize("windows", [(12, 8), (8, 12), (100, 30)], ids=str)
@pytest.mark.parametrize("name", VISIBILITIES)
def test_blocks_and_their_gradients(name, windows):
    """Where the rows are several blocks, and the last one is shorter."""
    module, visibility = stirred(*windows), VISIBILITIES[name]
    q, k, v, x = (y.requires_grad_() for y in qkvx(70))
    out = module(q, k, v, visibility=visibility, inputs=LayerInputs(input=x)).output
    expected = dense(module, q, k, v, x, visibility.dense(70, 70, q.device))
    torch.testing.assert_close(out, expected, **EXACT)
    leaves, factor = (q, k, v, x, *module.parameters()), draw(*q.shape)
    slopes = (torch.autograd.grad((y * factor).sum(), leaves) for y in (out, expected))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype):
    """Errors are those of rounding the inputs and the products of queries and second keys."""
    module, (q, k, v, x) = stirred(30, 8).float(), qkvx(70)
    rounded = [y.to(dtype) for y in (q, k, v, x)]
    out = module(*rounded[:3], inputs=LayerInputs(input=rounded[3])).output
    assert out.dtype == dtype
    q, k, v, x = (y.double() for y in rounded)
    exact = module.double()(q, k, v, inputs=LayerInputs(input=x)).output
    error = (out - exact).abs().max() / exact.abs().max()
    assert error < 8 * torch.finfo(dtype).eps


def test_identity_start_is_standard_attention_with_the_first_window():
    (q, k, v, x), module = qkvx(40), layer(7, 5, start="identity")
    inputs = LayerInputs(input=x)
    out = module(q, k, v, inputs=inputs).output
    torch.testing.assert_close(out, Standard(7).build(SHAPE)(q, k, v).output, **EXACT)
    (out * draw(*q.shape)).sum().backward()
    assert all(bool((p.grad != 0).any()) for p in module.parameters()), "it learns from there"
    whole = layer(40, 40, start="identity")(q, k, v, inputs=inputs).output
    torch.testing.assert_close(whole, Standard().build(SHAPE)(q, k, v).output, **EXACT)


def test_random_projections_have_the_size_of_the_inputs():
    wide = Simplicial(every=1).build(HeadShape(8, 8, 64, 400, 0))
    for projection in (wide.second_key, wide.second_value):
        assert projection.weight.std().item() == pytest.approx(400**-0.5, rel=0.02)


def test_layers():
    simplicial = [
        isinstance(Simplicial().build(HeadShape(4, 2, 6, 20, i)), SimplicialAttention)
        for i in range(9)
    ]
    assert [i for i, kind in enumerate(simplicial) if kind] == [3, 7]
    other = Simplicial().build(HeadShape(4, 2, 6, 20, 0))
    assert type(other) is StandardAttention and other.window is None
    assert other.roles == {"decoder"}


def test_maps_are_the_weights_of_keys_over_all_pairs():
    module, (q, k, v, x) = stirred(30, 8), qkvx(70)
    inputs = LayerInputs(input=x)
    maps = module.maps(q[:, :, 20:], k, inputs=inputs).weights
    assert maps.shape == (2, 4, 50, 70)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 50).double(), **EXACT)
    module.second_value.forward = lambda x: x.new_ones(*x.shape[:2], 12)
    out = module(q, k, v, inputs=inputs).output
    torch.testing.assert_close(maps @ v.repeat_interleave(2, 1), out[:, :, 20:], **EXACT)


def test_refused():
    for name in ("window", "second_window", "every"):
        for value in (0, -1, 1.5, True, None):
            with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
                Simplicial(**{name: value})
    with pytest.raises(ValueError, match="start must be one of 'random', 'identity', got 'zero'"):
        Simplicial(start="zero")
    module, (q, k, v, x) = layer(4, 2), qkvx(5)
    with pytest.raises(ValueError, match=r"inputs.input must hold all 5 tokens .* got 3"):
        module(q, k, v, inputs=LayerInputs(input=x[:, :3]))
    terms = {"bias": draw(1, 4, 5, 5), "softcap": 3.0, "sinks": draw(4)}
    for name, value in terms.items():
        for call in (lambda inputs: module(q, k, v, inputs=inputs),
                     lambda inputs: module.maps(q, k, inputs=inputs)):  # fmt: skip
            with pytest.raises(ValueError, match=f"{name} must be None for simplicial attention"):
                call(LayerInputs(input=x, **{name: value}))
    with pytest.raises(ValueError, match=r"dropout must be 0 for simplicial attention.* got 0.1"):
        module(q, k, v, inputs=LayerInputs(input=x, dropout=0.1))
    for name, visibility in {
        "causal": Visibility(causal=False),
        "mutual": Visibility(mutual=torch.zeros(1, 5).long()),
        "positions": Visibility(positions=torch.arange(5)[None]),
        "queries": Visibility(queries=Queries(positions=torch.arange(5)[None])),
    }.items():
        with pytest.raises(ValueError, match=f"visibility.{name} must be its default"):
            module(q, k, v, visibility=visibility, inputs=LayerInputs(input=x))
