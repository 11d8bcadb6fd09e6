"""Programs of the fused kernels in other orders than the interpreter's own.

It runs them one after the other, so that what one leaves for another, or two write to one place,
would show in no other test.
"""

import random

import pytest
import torch
from triton.runtime import interpreter

from heedful.ops import Visibility
from helpers.mechanisms import FUSED, Shape, run_by
from helpers.oracle import with_grads

BY_NAME = {str(mechanism): mechanism for mechanism in FUSED}
ORDERS = {
    "backwards": lambda count: [*reversed(range(count))],
    "shuffled": lambda count: random.Random(count).sample(range(count), count),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["selective-own", "mta-full"])
def test_the_order_of_programs_changes_no_bit(name, interpreted, monkeypatch):
    """Neither of the output nor of any gradient."""
    tensors = {n: x.float() for n, x in BY_NAME[name].draw(Shape(batch=1).long(40)).items()}
    function = run_by(BY_NAME[name], "fused", Visibility(window=30))
    expected = with_grads(function, tensors)
    for order in ORDERS.values():
        moved = []

        def place(self, x: int, y: int, z: int, order=order, moved=moved) -> None:
            width, height, depth = self.grid_dim
            usual = (x * height + y) * depth + z
            number = order(width * height * depth)[usual]
            if width * height * depth > 2:  # of fewer, half may stay where they are
                moved.append(number != usual)
            self.grid_idx = (*divmod(number // depth, height), number % depth)

        with monkeypatch.context() as patch:
            patch.setattr(type(interpreter.interpreter_builder), "set_grid_idx", place)
            actual = with_grads(function, tensors)
        for part, x in actual.items():
            assert torch.equal(x, expected[part]), part
        assert sum(moved) > len(moved) / 2
