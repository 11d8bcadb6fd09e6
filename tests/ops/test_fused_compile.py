"""The fused kernels compile for GPUs that are not here, fit, and keep to their registers."""

import pytest

from helpers.aot import CASES, SHARED_LIMITS, compile_case

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
    assert kernel["shared"] <= SHARED_LIMITS["sm_90"] and kernel["registers"] <= 255, (name, kernel)
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


# Of the other targets: spilled bytes per thread of selective attention's kernels, at most. The
# assembler differs by release of Triton: with 3.9 some kernels spill 8 bytes that 3.7 keeps.
SPILLED_ELSEWHERE = {"sm_80": 3700, "sm_89": 800, "sm_100": 50, "sm_120": 800, "gfx942": 500}
REGISTERS = {"gfx942": 512}  # of the others 255


@pytest.mark.slow
@pytest.mark.parametrize("case", ["blocks 6x11", "selective 64", "selective 128"])
@pytest.mark.parametrize("target", SPILLED_ELSEWHERE)
def test_for_other_gpus(target, case):
    operator, case = case.split()
    actual = compile_case(operator, case, target)
    spilled = SPILLED_ELSEWHERE[target] if operator == "selective" else 16
    assert {"convolve_kernel", *HEADS} & actual.keys()
    for name, kernel in actual.items():
        assert kernel["shared"] <= SHARED_LIMITS[target], (name, kernel)
        assert kernel["registers"] <= REGISTERS.get(target, 255), (name, kernel)
        assert kernel["spilled"] <= spilled, (name, kernel)
        pointwise = name.split()[0].startswith(("blank", "softmax", "survey"))
        assert kernel["tensor_cores"] != pointwise, (name, kernel)
