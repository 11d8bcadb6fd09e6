"""The laws of order and of derivatives for the layers that no operator of `ops` computes."""

import pytest
import torch
from torch import Tensor

from heedful.nn import Dex, Forgetting, HeadShape, LayerInputs, Parallax, Simplicial
from heedful.testing import assert_causal
from helpers.layers import qkvx, stirred
from helpers.oracle import draw

ORDERED = [Forgetting(), Parallax(), Simplicial(20, 6, every=1), Simplicial(6, 20, every=1)]
SMOOTH = [Parallax(), Dex((1,)), *(Simplicial(*x, every=1) for x in ((2, 2), (3, 1), (1, 3)))]


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
