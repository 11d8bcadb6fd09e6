"""Derivatives beyond .backward(): right, or refused with the name of the form that has them."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

from helpers.mechanisms import FUSED, LOW_RANK, MECHANISMS, Shape

SHAPE = Shape(batch=1, heads=2, key_heads=2, queries=9, keys=9, dim=4)
BY_NAME = {str(m): m for m in [*MECHANISMS, *LOW_RANK]}
every = pytest.mark.parametrize("name", ["mta-full", "low-rank", "selective-own", "differential"])
each_impl = pytest.mark.parametrize("impl", ["auto", "tiled", "composed"])
OPERATORS = {
    "mta": "multi_token",
    "low": "multi_token",
    "talking": "multi_token",
    "selective": "selective",
    "differential": "differential",
}
REFUSED = "does not support this .* call: .*; impl='reference' has them all"


def functions(name: str, impl: str, dtype: torch.dtype = torch.float64):
    """The output as a function of each tensor in turn, and that tensor."""
    tensors = {part: x.to(dtype) for part, x in BY_NAME[name].draw(SHAPE).items()}
    for inputs, x in tensors.items():

        def function(y: Tensor, inputs: str = inputs) -> Tensor:
            return BY_NAME[name].run(tensors | {inputs: y}, impl)[0]

        yield function, x


@every
@each_impl
def test_forward_mode_is_refused(name, impl):
    for function, x in functions(name, impl):
        with pytest.raises(ValueError, match=REFUSED):
            jvp(function, (x,), (x,))
        with pytest.raises(ValueError, match=REFUSED):
            vmap(lambda y, f=function: jvp(f, (y,), (y,))[1])(torch.stack([x, x]))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            with pytest.raises(ValueError, match=REFUSED):
                function(dual)
            with pytest.raises(ValueError, match=REFUSED):
                vmap(function)(forward_ad.make_dual(torch.stack([x, x]), torch.stack([x, x])))
            function(x)  # no derivative is asked for


@every
def test_gradients_under_torch_func_are_refused(name):
    for function, x in functions(name, "auto"):
        with pytest.raises(ValueError, match=REFUSED):
            grad(lambda y, f=function: f(y).sum())(x)
        with pytest.raises(ValueError, match=REFUSED):
            vmap(grad(lambda y, f=function: f(y).sum()))(torch.stack([x, x]))
        with pytest.raises(ValueError, match=REFUSED):
            jvp(lambda y, f=function: grad(lambda z: f(y).sum() * z.sum())(y.detach()), (x,), (x,))


@every
def test_the_reference_has_them_all(name):
    for function, x in functions(name, "reference"):
        direction = torch.randn_like(x)
        slope = (function(x + 1e-6 * direction) - function(x - 1e-6 * direction)) / 2e-6
        torch.testing.assert_close(jvp(function, (x,), (direction,))[1], slope, rtol=0, atol=1e-8)
        first = torch.autograd.functional.vjp(lambda y, f=function: f(y).square().sum(), x)[1]
        second = grad(lambda y, f=function: f(y).square().sum())
        torch.testing.assert_close(second(x), first)
        torch.testing.assert_close(vmap(second)(torch.stack([x, x]))[1], first)
        assert torch.autograd.gradgradcheck(function, x.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize(
    ("name", "impl"),
    [*((x, "tiled") for x in BY_NAME), *((str(x), "fused") for x in FUSED if str(x) in BY_NAME)],
)
def test_second_derivatives_are_refused(name, impl, interpreted):
    function, x = next(functions(name, impl, torch.float32))
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    operator = OPERATORS[name.split("-")[0]]
    message = rf"form of {operator}_attention has no second derivatives; impl='reference' has"
    with pytest.raises(ValueError, match=message):
        torch.autograd.grad(first.sum(), x)


@every
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_of_the_output_and_of_its_gradient(name):
    for function, x in functions(name, "auto"):
        many = torch.stack([x, 0.5 * x])
        expected = torch.stack([function(x), function(0.5 * x)])
        torch.testing.assert_close(vmap(function)(many), expected)
        plain, batched = (
            torch.autograd.functional.jacobian(
                lambda y, f=function: f(y).sum((0, 2)), x, vectorize=vectorize
            )
            for vectorize in (False, True)
        )
        torch.testing.assert_close(batched, plain)


def test_a_frozen_operator_may_stand_beside_what_is_differentiated():
    function, x = next(functions("mta-full", "auto"))
    layer = torch.nn.Linear(4, 1).double()

    def loss(weights):
        return functional_call(layer, weights, (hidden,)).sum()

    hidden = function(x)
    assert grad(loss)(dict(layer.named_parameters()))["weight"].abs().sum() > 0
