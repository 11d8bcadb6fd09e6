"""The fused kernels compile for an H200 without one, fit, and keep to its registers."""

import pytest

from helpers.aot import CASES, SHARED_LIMIT, compile_case

SELECTOR = [
    "survey_kernel", "accumulate_kernel", "selector_key_gradients_kernel",
    "selector_query_gradients_kernel",
]  # fmt: skip
HEADS = ["attend_kernel", "query_gradients_kernel", "key_gradients_kernel"]
SHARED_TOTAL = 233_472  # bytes on a multiprocessor of compute capability 9.0
RESERVED = 1_024  # of them, for each block
# Spilled bytes per thread. With documents the masks take registers at the edges of visibility.
SPILLED = {"64": 400, "64 grouped": 400, "96": 500, "128": 460}


def check(name: str, kernel: dict, spilled: int) -> None:
    assert kernel["shared"] <= SHARED_LIMIT and kernel["registers"] <= 255, (name, kernel)
    assert kernel["spilled"] <= spilled, (name, kernel)


@pytest.mark.parametrize(
    "case", ["6x11", *(pytest.param(x, marks=pytest.mark.slow) for x in ("8x15", "fp32"))]
)
def test_between_the_products_of_blocks(case):
    actual = compile_case("blocks", case)
    kinds = {name.split()[0] for name in actual}
    convolutions = {"convolve_kernel", "kernel_gradient_kernel"}
    assert kinds == convolutions | {"blank_kernel", "softmax_kernel", "softmax_backward_kernel"}
    for name, kernel in actual.items():
        # In fp32, without tensor cores, the wide loads of a kernel's gradient cost four registers.
        check(name, kernel, 16 if case == "fp32" else 0)
        on_tensor_cores = case != "fp32" and name.split()[0] in convolutions
        assert kernel["tensor_cores"] == on_tensor_cores, (name, kernel)
        assert not kernel["narrow_loads"], (name, kernel)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES["selective"])
def test_selective(case):
    actual = compile_case("selective", case)
    memory = ["remember_kernel"] if case in ("64", "96") else []
    assert {name.split()[0] for name in actual} == {*SELECTOR, *HEADS, *memory}
    for name, kernel in actual.items():
        check(name, kernel, SPILLED[case])
        if name.split()[0] in HEADS:  # two programs fit a multiprocessor
            assert 2 * (kernel["shared"] + RESERVED) <= SHARED_TOTAL
            assert 2 * 32 * kernel["num_warps"] * kernel["registers"] <= 65_536
