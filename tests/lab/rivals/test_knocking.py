"""Knocking heads against loops over single numbers."""

import math

import pytest
import torch

from heedful_lab.rivals.knocking import KnockingHeads
from helpers.layers import stirred
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
            torch.testing.assert_close(
                module.edited(part, x.flatten(2)), expected.flatten(2), **EXACT
            )


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
    torch.testing.assert_close(module.edited("v", x.flatten(2)), expected.flatten(2), **EXACT)


REFUSED = {
    "parts must be one or several of 'q', 'k', 'v', got 'v'": lambda: KnockingHeads("v"),
    r"parts must be .* got \(\)": lambda: KnockingHeads(()),
    r"parts must be .* got \('x',\)": lambda: KnockingHeads(("x",)),
    r"parts must name each part once, got \('v', 'v'\)": lambda: KnockingHeads(("v", "v")),
    "form must be one of 'linear', 'mlp', got 'gelu'": lambda: KnockingHeads(form="gelu"),
    r"parts must be \('v',\) with form='mlp'": lambda: KnockingHeads(("q", "v"), "mlp"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_values(message):
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_parts_may_come_in_any_order():
    assert KnockingHeads(("k", "q")) == KnockingHeads(("q", "k"))
