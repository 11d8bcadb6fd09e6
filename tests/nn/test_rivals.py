"""Baselines against loops over single numbers: what is mixed, convolved, doubled or cut."""

import math

import pytest
import torch
from torch import Tensor

from heedful.nn import (
    Canon,
    Gated,
    HeadShape,
    KnockingHeads,
    LayerInputs,
    LocalGlobal,
    ProjectionContext,
    Standard,
)
from heedful.ops import Visibility
from helpers.layers import SHAPE, attended, stirred
from helpers.oracle import EXACT, draw

ROWS = {"q": 4, "k": 2, "v": 2}


@pytest.mark.parametrize("parts", [("v",), ("q", "k", "v"), ("k",)])
def test_knocking_heads_multiply_every_head_by_one_matrix(parts):
    module = stirred(KnockingHeads(parts))
    assert set(module.shared) == set(parts)
    for part, heads in ROWS.items():
        x = draw(2, 3, heads, 6)
        expected = x.clone()
        if part in parts:
            matrix = module.shared[part].tolist()
            for b, t, h, c in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
                expected[b, t, h, c] = sum(float(x[b, t, h, a]) * matrix[a][c] for a in range(6))
        torch.testing.assert_close(module.before_rotation(part, x), expected, **EXACT)


def test_knocking_heads_with_a_gate():
    module = stirred(KnockingHeads(form="mlp"))
    up, gate, down = (module.shared[name].tolist() for name in ("up", "gate", "down"))
    x = draw(2, 3, 2, 6)
    expected = torch.zeros_like(x)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        row = x[b, t, h].tolist()
        inner = []
        for c in range(6):
            opening = 1 / (1 + math.exp(-sum(row[a] * gate[a][c] for a in range(6))))
            inner.append(2 * opening * sum(row[a] * up[a][c] for a in range(6)))
        for c in range(6):
            expected[b, t, h, c] = sum(inner[a] * down[a][c] for a in range(6))
    torch.testing.assert_close(module.before_rotation("v", x), expected, **EXACT)


def test_linear_knocking_heads_fold_into_the_projection():
    """What the paper says of inference: W' = W T per head."""
    module, weight, x = stirred(KnockingHeads()), draw(2 * 6, 20), draw(2, 3, 20)
    values = (x @ weight.mT).unflatten(-1, (2, 6))
    folded = torch.cat([module.shared["v"].mT @ head for head in weight.split(6)])
    actual = module.before_rotation("v", values).flatten(2)
    torch.testing.assert_close(actual, x @ folded.mT, **EXACT)


def convolved(
    x: Tensor, kernel: Tensor, past: Tensor | None = None, segments: Tensor | None = None
) -> Tensor:
    """x[t] plus a weighted sum of the tokens up to t, `[B, T, C]`, number by number."""
    rows = x if past is None else torch.cat([past, x], dim=1)
    before, width = rows.shape[1] - x.shape[1], kernel.shape[1]
    out = x.clone()
    for b, t, c in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        for back in range(width):
            at = before + t - back
            if at < 0:
                continue
            if segments is not None:
                row = segments[b if len(segments) > 1 else 0]
                if row[at] != row[before + t]:
                    continue
            out[b, t, c] += kernel[c, width - 1 - back] * rows[b, at, c]
    return out


SEGMENTS = {
    "one": None,
    "documents": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]]),
    "left and right padding": torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, -1]]),
}


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("cached", [0, 1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_canon_adds_a_causal_convolution_of_every_channel(kernel, cached, segments):
    module, segments = stirred(Canon(kernel=kernel)), SEGMENTS[segments]
    assert module.past_inputs == kernel - 1
    new = 8 - cached
    x, inputs = draw(2, 8, 4, 6), draw(2, 8, 20)
    past = (None, None) if not cached else (inputs[:, :cached], x[:, :cached])
    beside = ProjectionContext(past=past[0], segments=segments)
    expected = convolved(inputs[:, cached:], module.kernels["input"], past[0], segments)
    actual = module.before_projection(inputs[:, cached:], beside)
    torch.testing.assert_close(actual, expected, **EXACT)
    for part, heads in ROWS.items():
        queries = x[:, :, :heads]
        before = None if not cached else queries[:, :cached]
        expected = convolved(
            queries[:, cached:].flatten(2), module.kernels[part],
            None if before is None else before.flatten(2), segments,
        )  # fmt: skip
        beside = ProjectionContext(past=before, segments=segments)
        actual = module.before_rotation(part, queries[:, cached:], beside)
        assert actual.shape == (2, new, heads, 6)
        torch.testing.assert_close(actual.flatten(2), expected, **EXACT)


def test_what_padding_holds_does_not_reach_a_convolution():
    module, inputs = stirred(Canon("A")), draw(1, 5, 20)
    inputs[:, 1] = float("nan")
    actual = module.before_projection(
        inputs, ProjectionContext(segments=torch.tensor([[-1, -1, 0, 0, 0]]))
    )
    assert bool(actual[:, 2:].isfinite().all())


def test_where_canon_stands_and_how_it_starts():
    def parts(config: Canon) -> set[str]:
        return set(config.build(SHAPE).kernels)

    assert parts(Canon("A")) == {"input"} and parts(Canon("B")) == {"q", "k", "v"}
    assert parts(Canon()) == {"input", "q", "k", "v"}
    module = Canon(start="random").build(SHAPE)
    assert all(0 < kernel.abs().max() <= 0.5 for kernel in module.kernels.values())
    assert all(bool((kernel == 0).all()) for kernel in Canon().build(SHAPE).kernels.values())
    assert module.roles == {"decoder"} and not module.plain_cache


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


def test_parts_may_come_in_any_order():
    assert KnockingHeads(("k", "q")) == KnockingHeads(("q", "k"))
