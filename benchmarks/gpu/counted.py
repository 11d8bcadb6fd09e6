"""Launches and bytes of one call, forward and backward, counted on the meta device.

Nothing runs on a GPU: every operation that a call would launch there is executed on tensors without
data, and its bytes follow from the shapes, each input read once and each output written once. The
time beside them is an estimate from both and from published figures of an H100.

    python -m benchmarks.gpu.counted --out benchmarks/gpu/results/counted.jsonl
"""

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.parts import command_line
from heedful.files import append_line
from heedful.ops.common.tiles import Scope, Sight
from heedful.ops.mta import tiled as mta
from heedful.ops.mta.convolution import Parameters, TileSteps
from heedful.ops.selective import tiled as selective
from heedful_lab.records.environment import environment

BYTES_PER_SECOND, FLOPS, LAUNCH = 3.0e12, 798e12, 5e-6  # of an H100, bf16
FLASH = {"A": 0.72e-3, "C": 3.4e-3}  # seconds of FlashAttention 2, forward and backward; estimated


class Shape(NamedTuple):
    """Of queries, keys and values."""

    batch: int
    heads: int
    tokens: int
    dim: int


SHAPES = {"A": Shape(4, 16, 2048, 96), "C": Shape(4, 16, 4096, 128)}
PLAIN = Sight(None, False, True, None)
_PRODUCT_INTO = torch.ops.aten.bmm.dtype_out  # stands for baddbmm, which reads the sum so far
_OVERWRITING = [getattr(torch.ops.aten, name).default for name in ("copy_", "zero_")]


class Counter(TorchDispatchMode):
    """Counts what would be launched: everything but views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.nbytes = self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if view or "empty" in func.__name__ or func.__name__.startswith("_unsafe_view"):
            return out
        written = {x.name for x in func._schema.arguments if x.is_out}
        if func is _PRODUCT_INTO:
            written = set()
        # A new tensor takes only its dtype and device from the first.
        known = args[1:] if func in _OVERWRITING or func.__name__.startswith("new_") else args
        read = (known, {name: x for name, x in (kwargs or {}).items() if name not in written})
        tensors = [x for x in tree_leaves(read) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.launches += 1
        self.nbytes += sum(map(_nbytes, [*tensors, *results]))
        if "mm" in func.__name__:
            self.flops += 2 * results[0].numel() * args["add" in func.__name__].shape[-1]
        return out


def _nbytes(x: Tensor) -> int:
    """Of what is read or written: what a view repeats is read once."""
    sizes = [(n, stride) for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    count = math.prod(n for n, _ in sizes)
    reach = 1 + sum((n - 1) * stride for n, stride in sizes)
    return min(count, reach) * x.element_size()


def calls(shape: Shape) -> dict[str, Callable[[], object]]:
    """Forward and backward of each mechanism, without the operator around them."""
    batch, heads, tokens, dim = shape

    def draw(*sizes: int, dtype=torch.bfloat16) -> Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    q, k, v, grad = (draw(batch, heads, tokens, dim) for _ in range(4))

    def multi_token(**parameters: Tensor) -> None:
        filters = Parameters(**{name: parameters.get(name) for name in Parameters._fields})
        steps = TileSteps(Scope(PLAIN, tokens, tokens, q.device, composed=True))
        mta.attend(mta.operands(q, k, v, filters, dim**-0.5, steps), steps)
        steps = TileSteps(Scope(PLAIN, tokens, tokens, q.device, composed=True))
        mta.gradients(grad, (q, k, v, *filters, None, None), dim**-0.5, steps)

    def hidden() -> None:
        pair = draw(2, batch, 1, tokens, dtype=torch.float32)
        first = torch.empty(batch, tokens, dtype=torch.bool, device="meta")
        x = selective.operands(
            q, k, v, q[:, :1], k[:, :1], None, None, None, None, None, None, None, first, None,
            dim**-0.5, None, 0.0, True,
        )  # fmt: skip
        memory, out = pair.new_empty(batch, 0), torch.empty_like(q)
        selective.attend(x, None, selective.Outputs(out, memory, pair))
        selective.attend_backward(grad, pair[0], memory, x, pair, None)

    kernel = draw(heads, 6, 11, dtype=torch.float32)
    mixing = draw(1, heads, heads, dtype=torch.float32)
    return {
        "selective": hidden,
        "talking-heads": lambda: multi_token(mix=mixing, post_mix=mixing),
        "mta-pre": lambda: multi_token(conv=kernel),
        "mta": lambda: multi_token(conv=kernel, post_conv=kernel, mix=mixing, post_mix=mixing),
    }


def main() -> None:
    parser = command_line(__doc__, new=True)
    options = parser.parse_args()
    for name, shape in SHAPES.items():
        for mechanism, call in calls(shape).items():
            with Counter() as counter:
                call()
            moved, computed = counter.nbytes / BYTES_PER_SECOND, counter.flops / FLOPS
            line = {
                "shape": name, **shape._asdict(), "mechanism": mechanism,
                "launches": counter.launches, "nbytes": counter.nbytes, "flops": counter.flops,
                "estimated_ms": 1e3 * max(counter.launches * LAUNCH, moved + computed),
                "flash_ms": 1e3 * FLASH[name],
            }  # fmt: skip
            append_line(options.out, json.dumps(line | {"environment": environment()}))


if __name__ == "__main__":
    main()
