"""Compiles what a fused operator launches, for GPUs elsewhere; a program for `compile_case`.

The host code runs on the CPU. Each launch is compiled for the arguments that it would get,
alignment included, and prints one line of JSON instead of running.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

# Bytes of shared memory per block: A100, L4, H100 and H200, B200, RTX 5090, MI300X.
SHARED_LIMITS = {
    "sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376,
    "gfx942": 65_536,
}  # fmt: skip
KINDS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.bool: "*i1",
}
# Of each operator, cases by name: options of the functions below.
CASES = {
    "blocks": {
        "6x11": {"kernel": (6, 11)},
        "8x15": {"kernel": (8, 15), "window": 64, "documents": True},
        "fp32": {"kernel": (6, 11), "dtype": torch.float32},
    },
    "selective": {
        "64": {"dim": 64, "key_heads": 4, "everything": True},
        "64 grouped": {"dim": 64, "key_heads": 1, "everything": False},
        "96": {"dim": 96, "key_heads": 4, "everything": True},
        "128": {"dim": 128, "key_heads": 4, "everything": False},
        "256": {"dim": 256, "key_heads": 4, "everything": False},
        "fp32 64": {"dim": 64, "key_heads": 4, "dtype": torch.float32},
        "fp32 128": {"dim": 128, "key_heads": 4, "dtype": torch.float32},
        "fp32 256": {"dim": 256, "key_heads": 4, "dtype": torch.float32},
    },
}


def compile_case(operator: str, case: str, target: str = "sm_90") -> dict[str, dict]:
    """Resources of each kernel's forms; in a process of its own, without Triton's interpreter."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, __file__, operator, case, target],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-4000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {line.pop("kernel"): line for line in lines}


class Compiler:
    """Takes the place of `JITFunction.run`: compiles each form of a kernel once."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.forms, self.count = set(), {}

    def run(self, kernel, *args: object, grid, warmup, **options: object) -> None:
        names = [parameter.name for parameter in kernel.params]
        inputs = dict(zip(names, args, strict=False))
        inputs |= {name: options.pop(name) for name in names if name in options}
        signature, constants, aligned = {}, {}, {}
        for place, parameter in enumerate(kernel.params):
            name, x = parameter.name, inputs[parameter.name]
            fixed = type(x) is int and not parameter.do_not_specialize
            if parameter.is_constexpr or x is None or (fixed and x == 1):
                signature[name], constants[name] = "constexpr", x
            elif isinstance(x, float):
                signature[name] = "fp32"
            else:
                signature[name] = KINDS[x.dtype] if isinstance(x, Tensor) else "i32"
                if isinstance(x, Tensor) or (fixed and x % 16 == 0):
                    aligned[(place,)] = [["tt.divisibility", 16]]
        form = f"{kernel.__name__} {signature} {constants} {aligned} {options}"
        if form not in self.forms:
            self.forms.add(form)
            actual = resources(self.target, kernel, signature, constants, aligned, options)
            self._show(kernel.__name__, actual | options | {"heads": inputs.get("HEADS")})

    def _show(self, name: str, actual: dict) -> None:
        self.count[name] = count = self.count.get(name, 0) + 1
        label = name + (f" {count}" if count > 1 else "")
        print(json.dumps({"kernel": label, **actual}), flush=True)


def resources(
    target: str, kernel, signature: dict, constants: dict, aligned: dict, options: dict
) -> dict:
    """Shared bytes, registers and spilled bytes per thread, loads of two bytes, tensor cores."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target[3:]), 32)
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=gpu, options=options)
    return {"shared": compiled.metadata.shared} | (of_amd if amd else of_nvidia)(compiled.asm)


def of_nvidia(asm: dict) -> dict:
    """From the assembler's own count."""
    from triton.backends import nvidia

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
        command = [str(tool), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spilled": int(re.search(r"STACK:(\d+)", usage)[1]),
        "narrow_loads": bool(re.search(r"ld\.global[.\w]*\.b16", asm["ptx"])),
        "tensor_cores": bool(re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", asm["ptx"])),
    }


def of_amd(asm: dict) -> dict:
    """From the metadata in the assembly."""
    text = asm["amdgcn"]
    return {
        "registers": int(re.search(r"\.vgpr_count:\s*(\d+)", text)[1]),
        "spilled": int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)[1]),
        "narrow_loads": bool(re.search(r"global_load_(u|s)?short", text)),
        "tensor_cores": "v_mfma" in text,
    }


def blocks(
    kernel: tuple[int, int], *, window: int | None = None, documents: bool = False,
    dtype=torch.bfloat16,
) -> None:  # fmt: skip
    """Forward and backward of 2 x 4 heads, 128 tokens, with everything before and after."""
    import heedful.ops.mta.tiled  # noqa: F401

    q = torch.zeros(2, 4, 128, 16, dtype=dtype)
    conv, mix = torch.zeros(4, *kernel), torch.zeros(1, 4, 4)
    segments = torch.zeros(2, 128, dtype=torch.int64) if documents else None
    call = (q, q, q, conv, conv, mix, mix, None, None, None, segments, None, None, documents, True,
            window, 0.1, None, 0.0, False, "fused", False)  # fmt: skip
    out = torch.ops.heedful.multi_token_attention_tiled(*call)
    torch.ops.heedful.multi_token_attention_tiled_backward(out, *call)


def selective(
    dim: int, key_heads: int, everything: bool = False, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Forward and backward of 4 heads, 128 tokens; documents, state and memory too."""
    from heedful.ops.selective.fused.flash import _fused, _fused_backward

    q = torch.zeros(2, 4, 128, dim, dtype=dtype)
    k = v = q[:, :key_heads]
    segments = torch.zeros(2, 128, dtype=torch.int64) if everything else None
    first = torch.zeros(2 if everything else 1, 128, dtype=torch.bool)
    state = torch.zeros(2, 1, 128) if everything else None
    tau, window = (1.0, 100) if everything else (None, None)
    arguments = (q, k, v, q[:, :1], k[:, :1], state, segments, first, window, tau, 0.1, True, [])
    out, last, memory, *states = _fused(*arguments, True)
    _fused_backward(out, last, memory, out, *states, *arguments)


def main(operator: str, case: str, target: str) -> None:
    from triton.runtime.jit import JITFunction

    from heedful.ops.selective.fused import plan

    plan.on_hopper = lambda device: target == "sm_90"
    compiler = Compiler(target)
    JITFunction.run = lambda kernel, *args, **rest: compiler.run(kernel, *args, **rest)
    {"blocks": blocks, "selective": selective}[operator](**CASES[operator][case])


if __name__ == "__main__":
    main(*sys.argv[1:])
