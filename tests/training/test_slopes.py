"""Parameters that start at a bound can learn, whatever slope torch's clamp has there.

Until torch 2.13 that slope is 1, since 2.14 it is 0. Selectors and forget gates start at zero, so
a clamp on their way would keep them there.
"""

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import heedful
from heedful.nn import Forgetting, LayerInputs, Selective
from heedful.ops import selective_attention
from heedful.training.eviction_order import EvictionOrderLoss
from helpers.families import tiny, tokens
from helpers.layers import SHAPE, qkvx
from helpers.oracle import draw

CLAMPS = {
    torch.clamp: ("min", "max"), Tensor.clamp: ("min", "max"),
    torch.clamp_min: ("min",), Tensor.clamp_min: ("min",),
    torch.clamp_max: ("max",), Tensor.clamp_max: ("max",),
}  # fmt: skip


class ClampOf214(TorchFunctionMode):
    """Clamp with the slope that it has since torch 2.14: none at its bounds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in CLAMPS or not out.requires_grad:
            return out
        bounds = dict(zip(CLAMPS[func], args[1:], strict=False)) | (kwargs or {})
        at = [args[0] == x for x in bounds.values() if x is not None]
        return torch.where(torch.stack(at).any(0), out.detach(), out)


def gradients(loss, parameters: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(), parameters)


def assert_same_slopes(loss, parameters: list[Tensor]) -> None:
    expected = gradients(loss, parameters)
    with ClampOf214():
        actual = gradients(loss, parameters)
    for x, y in zip(actual, expected, strict=True):
        assert y.abs().max() > 1e-3
        assert torch.equal(x, y)


def test_the_clamp_of_this_file_has_no_slope_at_its_bounds():
    x = torch.tensor([-1.0, 0.0, 0.5, 2.0, 3.0], requires_grad=True)
    with ClampOf214():
        for out in (x.clamp(0, 2), torch.clamp(x, min=0.0, max=2.0)):
            assert torch.equal(out, torch.tensor([0.0, 0.0, 0.5, 2.0, 2.0]))
            (slope,) = torch.autograd.grad(out.sum(), x)
            assert torch.equal(slope, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]))
        (slope,) = torch.autograd.grad(x.clamp_min(0).sum(), x)
        assert torch.equal(slope, torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("impl", ["reference", "composed", "tiled"])
def test_selectors_that_mask_nothing_yet_and_a_memory_at_tau(impl):
    """The slopes are those of the reference, which are one at both bounds."""
    q, k, v, weights = (draw(1, 2, 9, 4) for _ in range(4))
    ones = torch.ones(1, 1, 9, 1, dtype=torch.float64)
    zero = torch.zeros_like(ones).requires_grad_()

    def loss(impl: str = impl) -> Tensor:
        return sum(
            # Of ones every S is 1, so F is a whole number, and tau one of them.
            (out.output * weights).sum() + out.memory.sum()
            for out in (
                selective_attention(
                    q, k, v, selector_q=ones, selector_k=x, scale=1.0, tau=2.0, impl=impl
                )
                for x in (zero, zero + 1)
            )
        )

    assert_same_slopes(loss, [zero])
    (expected,) = gradients(lambda: loss("reference"), [zero])
    torch.testing.assert_close(*gradients(loss, [zero]), expected, rtol=0, atol=1e-11)


def test_the_order_of_eviction_of_fresh_selectors():
    torch.manual_seed(0)
    model = tiny("llama").train()
    heedful.convert(model, Selective("extra", dim=3))
    ids = tokens(2, 70)
    keys = [p for name, p in model.named_parameters() if name.endswith("heedful.key.weight")]
    assert keys and not any(p.any() for p in keys)

    def loss() -> Tensor:
        with EvictionOrderLoss(model).observing() as order:
            order.draw(ids, 0)
            model(input_ids=ids, use_cache=False)
            return order(20)

    assert_same_slopes(loss, keys)


def test_a_head_that_has_not_learnt_to_forget():
    layer, (q, k, _, x) = Forgetting("identity").build(SHAPE).double(), qkvx(9)
    weights = draw(2, 4, 9, 9)

    def loss() -> Tensor:
        return (layer.maps(q, k, inputs=LayerInputs(input=x)).weights * weights).sum()

    assert_same_slopes(loss, [layer.strength])
