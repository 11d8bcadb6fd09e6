"""How the laws hold a function against its definition: outputs and gradients, in fp64 as oracle."""

from collections.abc import Callable

import torch
from torch import Tensor

from heedful.testing import assert_matches_oracle

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensor | tuple[Tensor | None, ...] | dict[str, Tensor | None]]

EXACT = {"rtol": 0, "atol": 1e-12}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def fixed(like: Tensor) -> Tensor:
    """The same normal numbers at every call, in fp64, on any device."""
    generator = torch.Generator("cpu").manual_seed(1)
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(like.device)


def with_grads(function: Function, tensors: Tensors) -> Tensors:
    """What the function gives, and the gradient of a fixed functional of that in every tensor."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
    actual = function(leaves)
    if isinstance(actual, Tensor):
        actual = {"output": actual}
    elif isinstance(actual, tuple):
        actual = {f"output {i}": x for i, x in enumerate(actual)}
    actual = {name: x for name, x in actual.items() if x is not None}
    loss = sum((x.double() * fixed(x)).sum() for x in actual.values())
    grads = torch.autograd.grad(loss, list(leaves.values()))
    grads = {f"grad {name}": x for name, x in zip(leaves, grads, strict=True)}
    return {name: x.detach() for name, x in actual.items()} | grads


def assert_equal_in_fp64(
    function: Function, reference: Function, tensors: Tensors, error: float
) -> None:
    """Results and all gradients are the definition's, but for an error relative to their size."""
    expected = with_grads(reference, tensors)
    for name, x in with_grads(function, tensors).items():
        size = expected[name].abs().max().item()
        torch.testing.assert_close(x, expected[name], rtol=0, atol=error * (1 + size), msg=name)


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """In this precision; a state stays in that of the sums."""
    wide = torch.promote_types(dtype, torch.float32)
    return {name: x.to(wide if name == "state" else dtype) for name, x in tensors.items()}


def against_oracle(
    function: Function, reference: Function, tensors: Tensors, dtype: torch.dtype, about: str = ""
) -> Tensors:
    """Law 2: the function errs at most twice as much as its definition; returns what it found."""
    inputs = cast(tensors, dtype)
    actual, plain = with_grads(function, inputs), with_grads(reference, inputs)
    exact = with_grads(reference, {name: x.double() for name, x in inputs.items()})
    for name, x in actual.items():
        terms = inputs["k"].shape[2]
        assert_matches_oracle(f"{about} {name}", x, plain[name], exact[name], terms)
    return actual
