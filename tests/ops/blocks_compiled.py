"""Compiles the kernels of `fused_steps` for the published and the largest convolutions."""

import json

from aot import resources

from heedful.ops.mta import fused_step_kernels as kernels
from heedful.ops.mta.fused_steps import steps_launch

SIZES = ((6, 11), (8, 15))
NAMES = [
    *(f"{what} {r}x{c}" for r, c in SIZES for what in ("convolve", "transposed", "gradient")),
    "softmax",
    "softmax backward",
]


def main() -> None:
    at = steps_launch()
    block = {"BM": at.rows, "BN": at.columns}
    tiles = {name: "*fp32" for name in ("x", "y", "grad", "kernel", "parts", "logits", "p")}
    tiles["segments"] = "*i32"

    def show(name: str, kernel, **constants: object) -> None:
        pointers = {x: kind for x, kind in tiles.items() if x in kernel.arg_names}
        found = resources(kernel, pointers, block | constants, at.warps)
        print(json.dumps({"kernel": name, **found}), flush=True)

    for rows, columns in SIZES:
        size = {"R": rows, "C": columns, "SEGMENTS": True}
        show(f"convolve {rows}x{columns}", kernels.convolve_kernel, TRANSPOSED=False, **size)
        show(f"transposed {rows}x{columns}", kernels.convolve_kernel, TRANSPOSED=True, **size)
        show(f"gradient {rows}x{columns}", kernels.kernel_gradient_kernel, **size)
    seen = {"CAUSAL": True, "WINDOW": 64, "SEGMENTS": True}
    show("softmax", kernels.softmax_kernel, **seen)
    show("softmax backward", kernels.softmax_backward_kernel)


if __name__ == "__main__":
    main()
