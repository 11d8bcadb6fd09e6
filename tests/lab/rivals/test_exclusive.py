"""Exclusive attention: its formula."""

import pytest
import torch

from heedful.nn import Standard
from heedful.ops import Visibility
from heedful.ops.visibility import Queries
from heedful_lab.rivals.exclusive import Exclusive
from helpers.layers import SHAPE, qkvx
from helpers.oracle import EXACT


def test_exclusive_outputs_have_nothing_of_their_own_value():
    module, (q, k, v, _) = Exclusive().build(SHAPE), qkvx(7)
    v[0, 1, 3] = 0  # a value without a direction takes nothing away
    plain = Standard().build(SHAPE)(q, k, v).output
    actual = module(q, k, v).output
    for b, h, i in torch.cartesian_prod(*map(torch.arange, plain.shape[:3])).tolist():
        y, own = plain[b, h, i].tolist(), v[b, h // 2, i].tolist()
        square = sum(a * a for a in own) or 1.0
        along = sum(a * c for a, c in zip(y, own, strict=True)) / square
        expected = v.new_tensor([a - along * c for a, c in zip(y, own, strict=True)])
        torch.testing.assert_close(actual[b, h, i], expected, **EXACT)
    assert bool((actual[:, :, 0].abs() < 1e-12).all()), "the first token reads itself alone"
    last = module(q[:, :, 4:], k, v).output
    torch.testing.assert_close(last, actual[:, :, 4:], **EXACT)
    assert module.roles == {"decoder", "encoder"}


def test_queries_of_another_sequence_are_refused():
    q, k, v, _ = qkvx(5)
    other = Visibility(causal=False, queries=Queries())
    with pytest.raises(ValueError, match=r"exclusive attention needs each query's own value"):
        Exclusive().build(SHAPE)(q, k, v, visibility=other)
