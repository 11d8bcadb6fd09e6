"""The fused kernels compile for GPUs that are not here, fit, and keep to their registers."""

import pytest

from helpers.aot import CASES, SHARED_LIMITS, compile_case

SELECTOR = [
    "survey_kernel", "visits_kernel", "accumulate_kernel", "selector_key_gradients_kernel",
    "selector_query_gradients_kernel",
]  # fmt: skip
HEADS = ["attend_kernel", "query_gradients_kernel", "key_gradients_kernel"]
SHARED_TOTAL = 233_472  # bytes on a multiprocessor of compute capability 9.0
RESERVED = 1_024  # of them, for each block
# Spilled bytes per thread. With documents the masks take registers at the edges of visibility.
SPILLED = {
    "64": 400, "64 grouped": 400, "96": 500, "128": 460, "256": 0,
    "fp32 64": 180, "fp32 128": 530, "fp32 256": 370,
}  # fmt: skip

FULL = ("64", "64 grouped", "96", "128")  # eight warps fit a multiprocessor


def check(name: str, kernel: dict, spilled: int) -> None:
    assert kernel["shared"] <= SHARED_LIMITS["sm_90"] and kernel["registers"] <= 255, (name, kernel)
    assert kernel["spilled"] <= spilled, (name, kernel)


@pytest.mark.parametrize(
    "case", ["6x11", *(pytest.param(x, marks=pytest.mark.slow) for x in ("8x15", "fp32"))]
)
def test_between_the_products_of_blocks(case):
    actual = compile_case("blocks", case)
    kinds = {name.split()[0] for name in actual}
    assert kinds == {"convolve_kernel", "softmax_kernel", "softmax_backward_kernel"}
    for name, kernel in actual.items():
        check(name, kernel, 0)
        on_tensor_cores = case != "fp32" and name.startswith("convolve_kernel")
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
        if name.split()[0] in HEADS and case in FULL:
            programs = 8 // kernel["num_warps"]
            assert programs * (kernel["shared"] + RESERVED) <= SHARED_TOTAL
            assert programs * 32 * kernel["num_warps"] * kernel["registers"] <= 65_536


# Spilled bytes per thread at most, on 8.0, 8.9, 10.0, 12.0 and gfx942. The assembler differs by
# release of Triton: on 8.0 the backward of heads of 64 spills 648 bytes with 3.9, 3,680 with 3.7.
ELSEWHERE = ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942")
SPILLED_ELSEWHERE = {
    ("blocks", "6x11"): (0, 0, 0, 0, 0),
    ("blocks", "8x15"): (0, 0, 0, 0, 0),
    ("blocks", "fp32"): (220, 16, 0, 0, 0),
    ("selective", "64"): (3700, 720, 50, 660, 160),
    ("selective", "64 grouped"): (980, 920, 430, 780, 440),
    ("selective", "96"): (2900, 890, 50, 870, 520),
    ("selective", "128"): (2750, 760, 0, 800, 500),
    ("selective", "256"): (0, 0, 0, 0, 1120),
    ("selective", "fp32 64"): (160, 130, 240, 290, 1100),
    ("selective", "fp32 128"): (520, 510, 570, 550, 320),
    ("selective", "fp32 256"): (370, 320, 360, 370, 860),
}
REGISTERS = {"gfx942": 512}  # of the others 255


def cases_elsewhere() -> list:
    """Each case for one target, by turns; for the others, half a minute each, as exhaustive."""
    return [
        pytest.param(
            target,
            *case,
            id="-".join((target, *case)),
            marks=getattr(pytest.mark, "slow" if turn == place % len(ELSEWHERE) else "exhaustive"),
        )
        for place, case in enumerate(SPILLED_ELSEWHERE)
        for turn, target in enumerate(ELSEWHERE)
    ]


@pytest.mark.parametrize("target, operator, case", cases_elsewhere())
def test_for_other_gpus(target, operator, case):
    actual = compile_case(operator, case, target)
    assert {"convolve_kernel", *HEADS} & actual.keys()
    for name, kernel in actual.items():
        assert kernel["shared"] <= SHARED_LIMITS[target], (name, kernel)
        assert kernel["registers"] <= REGISTERS.get(target, 255), (name, kernel)
        spilled = SPILLED_ELSEWHERE[operator, case][ELSEWHERE.index(target)]
        assert kernel["spilled"] <= spilled, (name, kernel)
        # On 10.0 Triton 3.7 leaves one kernel of grouped keys without them.
        if not case.startswith("fp32") and (target, case) != ("sm_100", "64 grouped"):
            pointwise = name.split()[0].startswith(("softmax", "survey", "visits"))
            assert kernel["tensor_cores"] != pointwise, (name, kernel)
