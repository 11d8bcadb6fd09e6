"""Compiles what fused selective attention launches, for an H200 without one.

The host code runs on the CPU; each launch is compiled for the arguments that it would get,
alignment included, and prints one line of JSON instead of running.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from heedful.ops.selective.fused import _fused, _fused_backward

KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int8: "*i8"}
# Name, head dim, key heads, documents and memory too.
CASES = {
    "64": (64, 4, True),
    "64 grouped": (64, 1, False),
    "96": (96, 4, True),
    "128": (128, 4, False),
}


def compile_launch(self: JITFunction, *args: object, grid, warmup, **options: object) -> None:
    names = [parameter.name for parameter in self.params]
    given = dict(zip(names, args, strict=False))
    given |= {name: options.pop(name) for name in names if name in options}
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(self.params):
        name, x = parameter.name, given[parameter.name]
        fixed = type(x) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or x is None or (fixed and x == 1):
            signature[name], constants[name] = "constexpr", x
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            signature[name] = KINDS[x.dtype] if isinstance(x, Tensor) else "i32"
            if isinstance(x, Tensor) or (fixed and x % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    line = {"kernel": f"{case}: {self.__name__}", **resources(compiled), **options}
    print(json.dumps(line | {"heads": given.get("HEADS")}), flush=True)


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


def compile_case(dim: int, key_heads: int, everything: bool) -> None:
    """Forward and backward of 4 heads, 128 tokens."""
    q = torch.zeros(2, 4, 128, dim, dtype=torch.bfloat16)
    k = v = q[:, :key_heads]
    segments = torch.zeros(2, 128, dtype=torch.int64) if everything else None
    first = torch.zeros(2 if everything else 1, 128, dtype=torch.bool)
    state = torch.zeros(2, 1, 128) if everything else None
    tau, window = (1.0, 100) if everything else (None, None)
    arguments = (q, k, v, q[:, :1], k[:, :1], state, segments, first, window, tau, 0.1, True, [])
    out, last, memory, remainder, lse = _fused(*arguments)
    _fused_backward(out, last, memory, out, remainder, lse, *arguments)


if __name__ == "__main__":
    JITFunction.run = compile_launch
    for case, options in CASES.items():  # noqa: B007
        compile_case(*options)
