"""The laws of order and memory for forgetting attention, which no operator of `ops` computes."""

import pytest
import torch
from torch import Tensor

from heedful.nn import (
    Forgetting,
    LayerInputs,
)
from heedful.testing import assert_causal, peak_memory_mib
from helpers.layers import qkvx, stirred


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_later_token_changes_a_bit(dtype):
    layer = stirred(Forgetting()).float()

    def attend(tokens: Tensor) -> Tensor:
        q, k, v, x = tokens.split([24, 12, 12, 20], dim=2)
        q, k, v = (y.unflatten(2, (-1, 6)).transpose(1, 2) for y in (q, k, v))
        return layer(q, k, v, inputs=LayerInputs(input=x)).output.transpose(1, 2).flatten(2)

    q, k, v, x = qkvx(70, batch=1)
    parts = [y.transpose(1, 2).flatten(2) for y in (q, k, v)]
    assert_causal(attend, torch.cat([*parts, x], dim=2).to(dtype), dim=1)


PROGRAM = """
import torch
from heedful.nn import Forgetting, HeadShape, LayerInputs
torch.set_num_threads(1)
module = {config}.build(HeadShape(4, 2, 16, 64, 0))
q, k, v = (torch.randn(1, heads, {tokens}, 16, requires_grad=True) for heads in (4, 2, 2))
x = torch.randn(1, {tokens}, 64)
def run():
    module(q, k, v, inputs=LayerInputs(input=x)).output.sum().backward()
"""


def peak(config, tokens: int) -> float:
    return peak_memory_mib(PROGRAM.format(config=config, tokens=tokens))


def test_maps_are_not_in_memory():
    """One of four heads has 256 MiB at 4,096 tokens."""
    assert peak(Forgetting(), 4096) < 40
