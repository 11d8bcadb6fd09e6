"""Compiles what the fused multi-token attention launches, for an H200 without one.

The host code runs on the CPU with bf16 tensors; each launch is compiled for the arguments that it
would get, alignment included, and prints one line of JSON instead of running.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from heedful.ops.mta.fused import _fused, _fused_backward
from heedful.ops.mta.fused_call import Call

KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
# Name, head dim, value head dim, kernel, other options of the case.
CASES = {
    "64": (64, 64, (6, 11), {}),
    "96": (96, 96, (6, 11), {}),
    "128": (128, 128, (6, 11), {}),
    "documents in a window": (64, 64, (6, 11), {"window": 512, "documents": True}),
    "standard": (64, 128, None, {}),
    "fp32, one query": (64, 64, (6, 11), {"dtype": torch.float32, "queries": 1}),
}


class Compiled:
    """A kernel that compiles where it would be launched, once for every form of it."""

    def __init__(self, kernel, forms: set[str], show: Callable[[str, dict], None]) -> None:
        self.kernel, self.arg_names, self.forms, self.show = kernel, kernel.arg_names, forms, show

    def __getitem__(self, grid: tuple[int, ...]):
        return self.launch

    def launch(self, *tensors: Tensor, **rest: object) -> None:
        options = {name: rest.pop(name) for name in ("num_warps", "num_stages") if name in rest}
        given = dict(zip(self.arg_names, tensors, strict=False)) | rest
        signature, constants, aligned = {}, {}, {}
        for place, parameter in enumerate(self.kernel.params):
            name, x = parameter.name, given[parameter.name]
            free = parameter.do_not_specialize
            if parameter.is_constexpr or (type(x) is int and x == 1 and not free):
                signature[name], constants[name] = "constexpr", x
            elif isinstance(x, float):
                signature[name] = "fp32"
            else:
                signature[name] = KINDS[x.dtype] if isinstance(x, Tensor) else "i32"
                if isinstance(x, Tensor) or (x % 16 == 0 and not free):
                    aligned[(place,)] = [["tt.divisibility", 16]]
        form = f"{self.kernel.__name__} {signature} {constants} {aligned} {options}"
        if form in self.forms:
            return
        self.forms.add(form)
        source = ASTSource(self.kernel, signature, constants, aligned)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.show(self.kernel.__name__, resources(compiled) | options)


def resources(compiled) -> dict[str, int]:
    """Shared bytes, registers per thread and bytes of spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "shared": compiled.metadata.shared,
        "registers": int(re.search(r"REG:(\d+)", told)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", told)[1]),
    }


def compile_case(
    name: str, dim: int, value_dim: int, kernel: tuple[int, int] | None, *,
    window: int | None = None, documents: bool = False, dtype=torch.bfloat16, queries: int = 2048,
) -> None:  # fmt: skip
    """Forward and backward of 2 x 4 heads on 2 key heads, 2048 keys."""
    count: dict[str, int] = {}
    forms: set[str] = set()

    def show(kernel: str, found: dict[str, int]) -> None:
        count[kernel] = count.get(kernel, 0) + 1
        label = f"{name}: {kernel}" + (f" {count[kernel]}" if count[kernel] > 1 else "")
        print(json.dumps({"kernel": label, **found}), flush=True)

    original = Call.launch

    def launch(self, kernel, grid, *tensors, **more) -> None:
        original(self, Compiled(kernel, forms, show), grid, *tensors, **more)

    Call.launch = launch
    q = torch.zeros(2, 4, queries, dim, dtype=dtype)
    k, v = (torch.zeros(2, 2, 2048, size, dtype=dtype) for size in (dim, value_dim))
    conv = None if kernel is None else torch.zeros(4, *kernel)
    segments = torch.zeros(2, 2048, dtype=torch.int64) if documents else None
    out, lse = _fused(q, k, v, conv, segments, True, window, 0.1, False)
    _fused_backward(out, out, lse, q, k, v, conv, segments, True, window, 0.1)
    Call.launch = original


if __name__ == "__main__":
    for name, (dim, value_dim, kernel, options) in CASES.items():
        compile_case(name, dim, value_dim, kernel, **options)
