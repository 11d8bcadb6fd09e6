"""What several tests of the operators need: small blocks, and what Triton's interpreter lacks."""

import numpy as np
import pytest

from heedful.ops.common import tiles


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `impl="composed"`, so that many meet."""
    monkeypatch.setattr(tiles, "ROWS_COMPOSED", 32)
    monkeypatch.setattr("heedful.ops.selective.tiled.ROWS_COMPOSED", 32)
    monkeypatch.setattr("heedful.ops.selective.sums.CHUNK", 8)


@pytest.fixture
def bfloat16(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bfloat16, which the interpreter keeps as bits and would multiply as integers."""
    if device == "cuda":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, wide(a), wide(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
