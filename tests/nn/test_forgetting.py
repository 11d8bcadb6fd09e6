"""Forgetting attention: its formula, state, precision and memory."""

import math

import pytest
import torch
from torch import Tensor

from heedful.nn import (
    Forgetting,
    HeadShape,
    Layer,
    LayerInputs,
    Selective,
    Standard,
)
from heedful.ops import Visibility
from heedful.ops.visibility import Queries
from helpers.layers import SHAPE, qkvx, stirred
from helpers.oracle import EXACT, draw

STARTS = pytest.mark.parametrize("start", ["published", "identity"])


def forgetting(start: str = "published", bias: float = 1.0) -> Layer:
    layer = stirred(Forgetting(start))
    layer.forget.bias.data.add_(bias)
    return layer


def gates(module, x: Tensor) -> Tensor:
    """log f, `[B, H, T]`, from the parameters."""
    logs = torch.log(torch.sigmoid(x @ module.forget.weight.mT + module.forget.bias)).transpose(
        1, 2
    )
    return logs if module.strength is None else logs * module.strength.abs()[:, None]


def defined(module, q: Tensor, k: Tensor, v: Tensor, x: Tensor, visible: Tensor | None = None):
    """The definition, dense: the sum of the gates between each key and each query."""
    length, logs = k.shape[2], gates(module, x)
    bias = torch.zeros(*logs.shape, length, dtype=q.dtype)
    for i in range(length):
        for j in range(i):
            bias[:, :, i, j] = logs[:, :, j + 1 : i + 1].sum(2)
    logits = q @ k.repeat_interleave(2, 1).mT / 6**0.5 + bias
    visible = torch.ones(length, length).bool().tril() if visible is None else visible
    return logits.masked_fill(~visible, -math.inf).softmax(-1) @ v.repeat_interleave(2, 1)


@STARTS
@pytest.mark.parametrize("length", [1, 5, 41])
def test_the_sum_of_the_gates_between_key_and_query_is_added(start, length):
    module, (q, k, v, x) = forgetting(start), qkvx(length)
    expected = defined(module, q, k, v, x)
    inputs = LayerInputs(input=x)
    torch.testing.assert_close(module(q, k, v, inputs=inputs).output, expected, **EXACT)
    last = module(q[:, :, -3:], k, v, inputs=inputs).output
    torch.testing.assert_close(last, expected[:, :, -3:], **EXACT)


def test_a_scale_and_the_bias_of_a_family():
    module, (q, k, v, x), bias = forgetting(), qkvx(9), draw(1, 4, 9, 9)
    for scale in (0.37, -1.4):
        logits = q @ k.repeat_interleave(2, 1).mT * scale + bias
        c = gates(module, x).cumsum(2)
        logits = logits + c[..., None] - c[:, :, None]
        logits = logits.masked_fill(~torch.ones(9, 9).bool().tril(), -math.inf)
        expected = logits.softmax(-1) @ v.repeat_interleave(2, 1)
        inputs = LayerInputs(input=x, bias=bias)
        actual = module(q, k, v, inputs=inputs, scale=scale).output
        torch.testing.assert_close(actual, expected, **EXACT)


@STARTS
def test_gradients_are_those_of_the_definition(start):
    module, tensors = forgetting(start), [y.requires_grad_() for y in qkvx(37)]
    leaves, weight = [*tensors, *module.parameters()], draw(2, 4, 37, 6)
    q, k, v, x = tensors
    outputs = module(q, k, v, inputs=LayerInputs(input=x)).output, defined(module, *tensors)
    actual, expected = (torch.autograd.grad((y * weight).sum(), leaves) for y in outputs)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@STARTS
def test_steps_with_a_state_are_the_whole(start):
    """F of every key is what later tokens have let a head forget of it."""
    module, (q, k, v, x) = forgetting(start), qkvx(90)
    whole = module(q, k, v, inputs=LayerInputs(input=x))
    logs, state, position = gates(module, x), None, 0
    for step in (1, 40, 1, 1, 34, 2, 1, 10):
        new = slice(position, position + step)
        position += step
        part = module(
            q[:, :, new], k[:, :, :position], v[:, :, :position],
            inputs=LayerInputs(input=x[:, new], state=state),
        )  # fmt: skip
        state = part.state
        torch.testing.assert_close(part.output, whole.output[:, :, new], **EXACT)
        for j in range(position):
            f = -logs[:, :, j + 1 : position].sum(2)
            torch.testing.assert_close(state[:, :, j], f, **EXACT)
    torch.testing.assert_close(state, whole.state, **EXACT)


def test_packed_documents_are_the_documents():
    module, (q, k, v, x) = forgetting(), qkvx(60)
    documents = torch.tensor([[0] * 7 + [1] * 35 + [-1] * 3 + [2] * 15])
    packed = module(
        q, k, v, visibility=Visibility(documents=documents), inputs=LayerInputs(input=x)
    ).output
    for start, stop in ((0, 7), (7, 42), (45, 60)):
        alone = [y[:, :, start:stop] for y in (q, k, v)]
        expected = module(*alone, inputs=LayerInputs(input=x[:, start:stop])).output
        torch.testing.assert_close(packed[:, :, start:stop], expected, **EXACT)


@pytest.mark.parametrize("places", [range(5), range(55, 60), range(20, 29)], ids=str)
def test_padding_anywhere_forgets_nothing(places):
    module, (q, k, v, x) = forgetting(), qkvx(60)
    padding = torch.ones(1, 60).bool()
    padding[:, list(places)] = False
    visibility, inputs = Visibility(padding=padding), LayerInputs(input=x)
    padded = module(q, k, v, visibility=visibility, inputs=inputs)
    real = padding[0].nonzero()[:, 0]
    alone = module(*(y[:, :, real] for y in (q, k, v)), inputs=LayerInputs(input=x[:, real]))
    torch.testing.assert_close(padded.output[:, :, real], alone.output, **EXACT)
    torch.testing.assert_close(padded.state[:, :, real], alone.state, **EXACT)


@pytest.mark.parametrize("documents", [False, True], ids=["SDPA", "tiled"])
@pytest.mark.parametrize("bias", [6.0, 0.0, -4.0])
def test_fp32_errs_as_standard_attention_does(bias, documents):
    """Gates of 0.998, 0.5 and 0.018: over 3,000 tokens a head forgets e^-7 to e^-12,000.

    Of one channel per key, as large as that sum, fp32 would round off up to 1e-3.
    """
    module, (q, k, v, x) = forgetting(bias=bias), qkvx(3000, batch=1)
    options = {"visibility": Visibility(documents=torch.zeros(1, 3000).long())} if documents else {}
    exact = module(q, k, v, inputs=LayerInputs(input=x), **options)
    plain = Standard().build(SHAPE)
    narrow, module = [y.float() for y in (q, k, v)], module.float()
    out = module(*narrow, inputs=LayerInputs(input=x.float()), **options)
    error = (out.output - exact.output).abs().max().item()
    standard = (plain(*narrow).output - plain(q, k, v).output).abs().max().item()
    assert error < 10 * standard
    if bias < 0:
        assert exact.state.max() > 10_000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_as_standard_attention_does(dtype):
    """Over 2,000 tokens a head forgets hundreds, of which bf16 alone would round off whole ones."""
    module, (q, k, v, x) = forgetting(bias=0.0).float(), qkvx(2000, batch=1)
    narrow, x = [y.to(dtype) for y in (q, k, v)], x.to(dtype)
    out = module(*narrow, inputs=LayerInputs(input=x)).output
    exact = module.double()(*(y.double() for y in narrow), inputs=LayerInputs(input=x.double()))
    plain = Standard().build(SHAPE)
    standard = plain(*narrow).output - plain(*(y.double() for y in narrow)).output
    assert exact.state.max() > 500
    # Of fewer keys, so of larger outputs, than standard attention has here.
    largest = exact.output.abs().max()
    assert (out - exact.output).abs().max() < 4 * standard.abs().max() + largest * 2.0**-8


@pytest.mark.parametrize("scale", [2.0**-7, 40.0])
def test_fp16_at_the_ends_of_its_range(scale):
    """A scale of 1 / D, or far above one, and forty gates of e^-500."""
    module, (q, k, v, x) = forgetting(bias=-500.0).float(), qkvx(40, batch=1)
    narrow = [(0.1 * y).half() for y in (q, k, v)]
    out = module(*narrow, scale=scale, inputs=LayerInputs(input=x.float()))
    exact = module.double()(*(y.double() for y in narrow), scale=scale, inputs=LayerInputs(input=x))
    assert exact.state.max() > 18_000
    torch.testing.assert_close(out.output.double(), exact.output, rtol=0, atol=1e-3)


def test_autocast_computes_in_its_precision_and_gates_in_fp32():
    module, (q, k, v, x) = forgetting(bias=0.0).float(), qkvx(700, batch=1)
    q, k, v, x = (y.to(torch.bfloat16).float() for y in (q, k, v, x))
    expected = module(*(y.bfloat16() for y in (q, k, v)), inputs=LayerInputs(input=x))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(q, k, v, inputs=LayerInputs(input=x))
    assert out.output.dtype == torch.bfloat16
    torch.testing.assert_close(out.output, expected.output, rtol=0, atol=2e-2)


def test_starts():
    (q, k, v, x), module = qkvx(9), Forgetting("identity").build(SHAPE).double()
    out = module(q, k, v, inputs=LayerInputs(input=x))
    torch.testing.assert_close(out.output, Standard().build(SHAPE)(q, k, v).output, **EXACT)
    assert bool((out.state == 0).all())
    (out.output * draw(2, 4, 9, 6)).sum().backward()
    assert bool((module.strength.grad != 0).all()), "strengths learn from zero"
    assert bool((module.forget.weight.grad == 0).all()), "behind strengths of zero"
    module.strength.data.fill_(-0.1)
    assert bool((module(q, k, v, inputs=LayerInputs(input=x)).state >= 0).all()), "nothing grows"
    published = Forgetting().build(HeadShape(heads=40, key_heads=8, dim=6, hidden=200, layer=0))
    assert published.forget.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert bool((published.forget.bias == 0).all())


def test_maps_hide_what_is_forgotten():
    module, (q, k, v, x) = forgetting(), qkvx(9)
    maps = module.maps(q, k, inputs=LayerInputs(input=x))
    expected = -gates(module, x)[..., None] * torch.ones(9, 9, dtype=torch.float64).tril(-1)
    torch.testing.assert_close(maps.masking, expected, **EXACT)
    state = module(q, k, v, inputs=LayerInputs(input=x)).state
    torch.testing.assert_close(maps.masking.sum(2), state, **EXACT)


def test_refused():
    module, (q, k, v, x) = Forgetting().build(SHAPE).double(), qkvx(5)
    inputs = LayerInputs(input=x)
    with pytest.raises(ValueError, match="start must be one of 'published', 'identity', got 'one'"):
        Forgetting("one")
    with pytest.raises(ValueError, match=r"input must hold all 5 tokens .* got 2"):
        module(q, k, v, inputs=LayerInputs(input=x[:, :2]))
    places = Queries(positions=torch.arange(5)[None])
    for name, visibility in {
        "causal must be its default, got False": Visibility(causal=False),
        "mutual must be its default": Visibility(mutual=torch.zeros(1, 5).long()),
        "queries must be its default": Visibility(queries=places),
    }.items():
        with pytest.raises(ValueError, match=f"visibility.{name}"):
            module(q, k, v, visibility=visibility, inputs=inputs)
    assert Selective().build(SHAPE).streams == module.streams, "policies that read F serve both"
