"""The laws of order, derivatives and memory for the layers that no operator of `ops` computes."""

import pytest
import torch
from torch import Tensor

from heedful.nn import (
    Forgetting,
    HeadShape,
    LayerInputs,
    RetentionGate,
)
from heedful.testing import assert_causal, peak_memory_mib
from helpers.layers import qkvx, stirred
from helpers.oracle import draw

ORDERED = [Forgetting()]
ORDERED += [RetentionGate(window=7)]
SMOOTH = [RetentionGate(window=2)]


@pytest.mark.parametrize("config", ORDERED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_later_token_changes_a_bit(config, dtype):
    layer = stirred(config).float()

    def attend(tokens: Tensor) -> Tensor:
        q, k, v, x = tokens.split([24, 12, 12, 20], dim=2)
        q, k, v = (y.unflatten(2, (-1, 6)).transpose(1, 2) for y in (q, k, v))
        return layer(q, k, v, inputs=LayerInputs(input=x)).output.transpose(1, 2).flatten(2)

    q, k, v, x = qkvx(70, batch=1)
    parts = [y.transpose(1, 2).flatten(2) for y in (q, k, v)]
    assert_causal(attend, torch.cat([*parts, x], dim=2).to(dtype), dim=1)


@pytest.mark.parametrize("config", SMOOTH, ids=str)
def test_gradients_by_finite_differences(config):
    """Of the last three of four tokens."""
    layer = config.build(HeadShape(heads=2, key_heads=1, dim=2, hidden=3, layer=0)).double()
    sizes = ((2, 3, 2), (1, 4, 2), (1, 4, 2), (4, 3))
    q, k, v, x = (draw(1, *size).requires_grad_() for size in sizes)

    def attend(*tensors: Tensor) -> Tensor:
        *heads, x = tensors[:4]
        names = [name for name, _ in layer.named_parameters()]
        own = dict(zip(names, tensors[4:], strict=True))
        options = {"inputs": LayerInputs(input=x)}
        return torch.func.functional_call(layer, own, tuple(heads), options).output

    parameters = [draw(*p.shape).requires_grad_() for p in layer.parameters()]
    assert torch.autograd.gradcheck(attend, (q, k, v, x, *parameters))


PROGRAM = """
import torch
from heedful.nn import Forgetting, HeadShape, LayerInputs, RetentionGate
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


def test_no_bias_of_all_rows_is_in_memory():
    """The difference, since the first call of the operator below imports a compiler."""
    short, long = (peak(RetentionGate(window=64), tokens) for tokens in (1024, 4096))
    assert long - short < 40, "the gates' bias of 4,096 tokens has 64 MiB, a map of a head too"
