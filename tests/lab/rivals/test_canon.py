"""Canon layers against loops over single numbers."""

import pytest
import torch
from torch import Tensor

from heedful_lab.rivals.canon import Canon
from helpers.layers import SHAPE, stirred
from helpers.oracle import EXACT, draw


def convolved(x: Tensor, kernel: Tensor, segments: Tensor | None = None) -> Tensor:
    """x[t] plus a weighted sum of the tokens up to t, `[B, T, C]`, number by number."""
    out = x.clone()
    for b, t, c in torch.cartesian_prod(*map(torch.arange, x.shape)).tolist():
        for back in range(min(kernel.shape[1], t + 1)):
            row = None if segments is None else segments[b if len(segments) > 1 else 0]
            if row is None or row[t - back] == row[t]:
                out[b, t, c] += kernel[c, kernel.shape[1] - 1 - back] * x[b, t - back, c]
    return out


SEGMENTS = {
    "one": None,
    "documents": torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]]),
    "left and right padding": torch.tensor([[-1, -1, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, -1]]),
}


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_canon_adds_a_causal_convolution_of_every_channel(kernel, segments):
    module, segments = stirred(Canon(kernel=kernel)), SEGMENTS[segments]
    for part, channels in {"input": 20, "q": 24, "k": 12, "v": 12}.items():
        x = draw(2, 8, channels)
        expected = convolved(x, module.kernels[part], segments)
        torch.testing.assert_close(module.edited(part, x, segments), expected, **EXACT)


def test_what_padding_holds_does_not_reach_a_convolution():
    module, inputs = stirred(Canon("A")), draw(1, 5, 20)
    inputs[:, 1] = float("nan")
    actual = module.edited("input", inputs, torch.tensor([[-1, -1, 0, 0, 0]]))
    assert bool(actual[:, 2:].isfinite().all())


def test_where_canon_stands_and_how_it_starts():
    def parts(config: Canon) -> set[str]:
        layer = config.build(SHAPE)
        assert set(layer.kernels) == {*layer.parts}
        return {*layer.parts}

    assert parts(Canon("A")) == {"input"} and parts(Canon("B")) == {"q", "k", "v"}
    assert parts(Canon()) == {"input", "q", "k", "v"}
    module = Canon(start="random").build(SHAPE)
    assert all(0 < kernel.abs().max() <= 0.5 for kernel in module.kernels.values())
    assert all(bool((kernel == 0).all()) for kernel in Canon().build(SHAPE).kernels.values())
    assert module.roles == {"decoder"} and not module.caches


REFUSED = {
    "places must be one of 'A', 'B', 'AB', got 'C'": lambda: Canon("C"),
    "kernel must be a whole number of tokens of at least 1, got 0": lambda: Canon(kernel=0),
    "start must be one of 'zero', 'random', got 'ones'": lambda: Canon(start="ones"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_values(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
