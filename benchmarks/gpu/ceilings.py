"""Stage 1: versions, ceilings of the device, and every kernel once against its definition."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu.sizes import MECHANISMS, Sizes, forms
from benchmarks.gpu.watched import SessionCase
from heedful.ops.common.tiles import Scope, Sight
from heedful.ops.impl import no_triton
from heedful_lab.commands.bench.cases import device
from heedful_lab.commands.bench.clock import steady
from heedful_lab.commands.bench.measure import Case, check
from heedful_lab.records.environment import installed


def cases(sizes: Sizes) -> Iterator[SessionCase]:
    """The cases of stage 1 but for the tests."""
    here = {"device": device()}
    yield SessionCase("versions", here, versions)
    for size in sizes.copies:
        source = partial(torch.empty, size, dtype=torch.uint8, device=device())
        run = partial(_copied, source, sizes.milliseconds)
        yield SessionCase(f"copy {size}", here | {"bytes": size}, run)
    for dtype in ("bfloat16", "float32"):
        config = here | {"rows": sizes.square, "dtype": dtype}
        run = partial(_product, sizes.square, getattr(torch, dtype), sizes.milliseconds)
        yield SessionCase(f"product square {dtype}", config, run)
    calls = {"torch operation": _operation}
    if no_triton(torch.empty(1, device=device())) is None:
        calls["Triton launch"] = _launch
    for name, setup in calls.items():
        run = partial(_repeated, setup, sizes.calls, sizes.milliseconds)
        yield SessionCase(name, here | {"calls": sizes.calls}, run)
    for mechanism in MECHANISMS:
        for impl in ("tiled", *forms(mechanism)):
            config = here | {"mechanism": mechanism, "impl": impl, "tokens": sizes.checked}
            run = partial(_checked, sizes, mechanism, impl)
            yield SessionCase(f"right {mechanism} {impl}", config, run)


def versions(left: float) -> dict:
    """Libraries, and the GPU as torch describes it."""
    names = ("torch", "triton", "numpy", "transformers", "peft", "accelerate")
    facts = {"packages": {name: installed(name) for name in names}}
    facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        facts |= {"capability": list(torch.cuda.get_device_capability()), "gpu": str(about)}
    return facts


def _copied(empty: Callable[[], torch.Tensor], milliseconds: float, left: float) -> dict:
    """Bytes read and written per second by a copy on the device."""
    source, target = empty().zero_(), empty()
    times = steady(lambda: target.copy_(source), budget_ms=milliseconds)
    return times | {"gb_per_second": 2 * len(source) / times["ms"] / 1e6}


def _product(rows: int, dtype: torch.dtype, milliseconds: float, left: float) -> dict:
    """Of two large matrices; fp32 without TF32."""
    a, b = torch.randn(2, rows, rows, device=device()).to(dtype)
    times = steady(lambda: a @ b, budget_ms=milliseconds)
    return times | {"tflops": 2 * rows**3 / times["ms"] / 1e9}


def _repeated(
    setup: Callable[[], Callable[[], object]], calls: int, milliseconds: float, left: float
) -> dict:
    """The time of so many small calls; of 1000 its milliseconds are the microseconds of one."""
    call = setup()
    return steady(lambda: [call() for _ in range(calls)], budget_ms=milliseconds)


def _operation() -> Callable[[], object]:
    x = torch.zeros(16, device=device())
    return lambda: x.add_(1)


def _launch() -> Callable[[], object]:
    """heedful's convolution of a small tile."""
    from heedful.ops.mta.fused.steps import FusedSteps  # imports Triton

    x, kernel = (torch.randn(size, device=device()) for size in ((1, 1, 16, 16), (1, 1, 1)))
    steps = FusedSteps(Scope(Sight(None, False, True, None), 16, 16, x.device, composed=True))
    x, kernel = x.bfloat16(), kernel.bfloat16()
    return lambda: steps.convolve(x, kernel, 0, 0, range(16))


def _checked(sizes: Sizes, mechanism: str, impl: str, left: float) -> dict:
    """Forward and backward against fp64; raises where they are wrong, or cannot run."""
    start = time.perf_counter()
    check(sizes.bench, [Case(mechanism, impl, "forward+backward")], tokens=sizes.checked)
    return {"seconds": time.perf_counter() - start}
