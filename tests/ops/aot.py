"""Compile Triton kernels for an H200 without one, and read what they would take of it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED_LIMIT = 232_448  # bytes per block on compute capability 9.0


def resources(kernel, pointers: dict, constants: dict, warps: int, stages: int = 3) -> dict:
    """Shared bytes, registers per thread and bytes of spills; every other argument is an int.

    Needs a process in which `TRITON_INTERPRET` is not set.
    """
    import triton
    from triton.backends import nvidia
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {name: "constexpr" for name in constants} | pointers
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
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


def compile_all(program: str) -> dict[str, dict]:
    """Run a program that prints one JSON object per kernel, in a process without interpreter."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("kernel"): line for line in lines}
