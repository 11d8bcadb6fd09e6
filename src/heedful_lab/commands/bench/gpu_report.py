"""Report on a GPU and its libraries: versions, ceilings, primitives, and every kernel once.

`heedful doctor --gpu-report FILE` writes it to one file that can be attached to an issue. The cases
run in a process of their own, so that a kernel that ends it leaves a record.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from heedful.checks import UserError
from heedful.files import write_whole
from heedful_lab.commands.bench.options import Bench
from heedful_lab.commands.bench.session import BROKEN, SessionCase, read, watch, work

SECONDS = 480.0
PRIMITIVE_SIZES = ("maps", "rows", "dim", "tokens", "heads", "calls")
MECHANISMS = ("mta-pre", "mta", "talking-heads", "selective", "differential")


@dataclass(frozen=True)
class ReportSizes:
    """Of the cases of a report.

    bench: batch, heads, head dim and precision in which every kernel is checked, at `checked` keys.
    copies: bytes; square: rows of a large matrix product.
    maps, rows, dim, tokens: of the tile that primitives work on; heads: those that mixing joins.
    calls: of a small operation or launch in one timed run; of 1000 its milliseconds are the
        microseconds of one.
    backends: torch's attention kernels that take a bias; compiler: of the compiled softmax.
    milliseconds: what the calls of one case may take together, about.
    """

    bench: Bench
    copies: tuple[int, ...] = (2**23, 2**25, 2**27, 2**32)
    square: int = 8192
    maps: int = 64
    rows: int = 256
    dim: int = 128
    tokens: int = 2048
    heads: int = 16
    checked: int = 150
    calls: int = 1000
    backends: tuple[str, ...] = ("EFFICIENT_ATTENTION", "CUDNN_ATTENTION")
    compiler: str = "inductor"
    milliseconds: float = 200.0


FULL = ReportSizes(Bench(batch=2, heads=16, dim=128, dtype="bfloat16", layout="transposed"))
SMALL = ReportSizes(
    Bench(heads=2, dim=16), copies=(2**20,), square=64, maps=4, rows=8, dim=16, tokens=64, heads=2,
    checked=20, calls=3, backends=("MATH",), compiler="eager", milliseconds=0.0,
)  # fmt: skip


def report(file: Path, sizes: ReportSizes = FULL) -> int:
    """Measure every case on this machine's GPU and write the file; returns an exit code.

    Raises:
        ValueError: there is no GPU, or the file is there already.
    """
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            f"--gpu-report needs a GPU, and torch {torch.__version__} sees none here; on this "
            "machine heedful doctor alone says what works"
        )
    return write_report(file, sizes)


def write_report(file: Path, sizes: ReportSizes) -> int:
    """The same on whatever device there is."""
    from heedful_lab.records.environment import environment

    if file.exists():
        raise UserError(f"--gpu-report {file}: is there already; name a new file")
    if not file.parent.is_dir():
        raise UserError(f"--gpu-report {file}: there is no folder {file.parent}")
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "cases.jsonl"
        command = [sys.executable, "-m", "heedful_lab.commands.bench.gpu_report", str(lines)]
        command += [str(time.time() + SECONDS), "small" if sizes is SMALL else "full"]
        try:
            code = watch(command, lines)
        finally:  # what was measured is worth sending, however it ended
            cases = [
                {name: x for name, x in record.items() if name not in ("stage", "environment")}
                for record in read(lines)
            ]
            document = {"environment": environment(), "cases": cases}
            write_whole(file, json.dumps(document, indent=1) + "\n")
    failed = [case["case"] for case in cases if case["status"] != "measured"]
    print(f"{len(cases)} cases, {len(failed)} without numbers; written to {file}")
    return code


def worker(lines: Path, until: float, sizes: ReportSizes) -> int:
    """Measure the cases in this process."""
    return 0 if work(1, cases(sizes), lines, until, {}) else BROKEN


def cases(sizes: ReportSizes) -> Iterator[SessionCase]:
    """Versions, ceilings, primitives, and every kernel beside its definition."""
    from heedful_lab.commands.bench.cases import device

    here = {"device": device()}
    yield SessionCase("versions", here, versions)
    for size in sizes.copies:
        run = partial(copied, size, sizes.milliseconds)
        yield SessionCase(f"copy {size}", here | {"bytes": size}, run)
    n = sizes.square
    for dtype in ("bfloat16", "float32"):
        config = here | {"shapes": [[n, n], [n, n]], "dtype": dtype}
        run = partial(timed, partial(square, n, dtype), sizes.milliseconds, 2 * n**3)
        yield SessionCase(f"product square {dtype}", config, run)
    for name, (setup, flops) in primitives(sizes).items():
        config = here | {x: getattr(sizes, x) for x in PRIMITIVE_SIZES}
        yield SessionCase(name, config, partial(timed, setup, sizes.milliseconds, flops))
    for mechanism in MECHANISMS:
        fused = () if mechanism == "differential" else ("fused",)
        for impl in ("tiled", "composed", *fused):
            config = here | {"mechanism": mechanism, "impl": impl, "tokens": sizes.checked}
            run = partial(checked, sizes, mechanism, impl)
            yield SessionCase(f"right {mechanism} {impl}", config, run)


def versions(left: float) -> dict:
    """Libraries, and the GPU as torch describes it."""
    import torch

    from heedful_lab.records.environment import installed

    names = ("torch", "triton", "numpy", "transformers", "jaxtyping", "beartype", "pytest",
             "pytest-xdist", "peft", "accelerate")  # fmt: skip
    facts = {"packages": {name: installed(name) for name in names}}
    facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        facts |= {"capability": list(torch.cuda.get_device_capability()), "gpu": str(about)}
    return facts


def copied(size: int, milliseconds: float, left: float) -> dict:
    """Bytes read and written per second by a copy on the device."""
    import torch

    from heedful_lab.commands.bench.cases import device
    from heedful_lab.commands.bench.clock import steady

    source = torch.randint(256, (size,), dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    times = steady(lambda: target.copy_(source), budget_ms=milliseconds)
    return times | {"gb_per_second": 2 * size / times["ms"] / 1e6}


def timed(
    setup: Callable[[], Callable[[], object]], milliseconds: float, flops: int, left: float
) -> dict:
    """The time of what `setup` prepares, and what it multiplies per second, if it does."""
    from heedful_lab.commands.bench.clock import steady

    times = steady(setup(), budget_ms=milliseconds)
    return times | ({"tflops": flops / times["ms"] / 1e9} if flops else {})


def checked(sizes: ReportSizes, mechanism: str, impl: str, left: float) -> dict:
    """Forward and backward against fp64; raises where they are wrong, or cannot run."""
    from heedful_lab.commands.bench.measure import Case, check

    start = time.perf_counter()
    check(sizes.bench, [Case(mechanism, impl, "forward+backward")], tokens=sizes.checked)
    return {"seconds": time.perf_counter() - start}


def draw(*shape: int, dtype: str = "bfloat16"):
    """Normal numbers on the device."""
    import torch

    from heedful_lab.commands.bench.cases import device

    return torch.randn(shape, device=device()).to(getattr(torch, dtype))


def square(n: int, dtype: str) -> Callable[[], object]:
    """A large product; fp32 without TF32."""
    a, b = draw(n, n, dtype=dtype), draw(n, n, dtype=dtype)
    return lambda: a @ b


def primitives(sizes: ReportSizes) -> dict[str, tuple[Callable[[], Callable[[], object]], int]]:
    """Parts of a form for a GPU: a setup that returns the call to time, and its operations."""
    maps, rows, dim, tokens, heads = (getattr(sizes, name) for name in PRIMITIVE_SIZES[:5])
    logits, mixing = 2 * maps * rows * dim * tokens, 2 * maps * heads * rows * tokens
    calls = {
        "logits, bf16 results": (partial(tile_product, maps, rows, dim, tokens, False), logits),
        "logits, fp32 results": (partial(tile_product, maps, rows, dim, tokens, True), logits),
        "masked softmax": (partial(masked_softmax, maps, rows, tokens, None), 0),
        "masked softmax, compiled": (
            partial(masked_softmax, maps, rows, tokens, sizes.compiler), 0,
        ),
        "torch operation": (partial(operation, sizes.calls), 0),
    }  # fmt: skip
    for dtype in ("bfloat16", "float32"):
        setup = partial(mixed, maps // heads, heads, rows * tokens, dtype)
        calls[f"head mixing {dtype}"] = (setup, mixing)
        for split in (1, 64):
            setup = partial(mixing_gradient, maps // heads, heads, rows * tokens, split, dtype)
            calls[f"gradient of head mixing {dtype}, K in {split}"] = (setup, mixing)
    for backend in sizes.backends:
        setup = partial(biased, maps // heads, heads, rows, dim, tokens, backend)
        calls[f"attention with a bias {backend}"] = (setup, 7 * logits)
    if launchable():
        calls["Triton launch"] = (partial(launch, sizes.calls), 0)
    return calls


def tile_product(maps: int, rows: int, dim: int, tokens: int, wide: bool) -> Callable[[], object]:
    """Q K^T of a row block; `wide`: its results are fp32."""
    import torch

    from heedful.ops.common.precision import product

    q, k = draw(maps, rows, dim), draw(maps, dim, tokens)
    return (lambda: product(q, k)) if wide else (lambda: torch.bmm(q, k))


def mixed(batch: int, heads: int, entries: int, dtype: str) -> Callable[[], object]:
    """All heads of a tile mixed: a product with as few rows as there are heads."""
    weights, x = draw(1, heads, heads, dtype=dtype), draw(batch, heads, entries, dtype=dtype)
    return lambda: weights @ x


def mixing_gradient(
    batch: int, heads: int, entries: int, split: int, dtype: str
) -> Callable[[], object]:
    """Of the mixing weights, with the sum over entries in so many parts."""
    a, b = (
        draw(batch, heads, entries, dtype=dtype).unflatten(2, (split, -1)).transpose(1, 2)
        for _ in range(2)
    )
    return lambda: (a @ b.mT).sum((0, 1))


def biased(
    batch: int, heads: int, rows: int, dim: int, tokens: int, backend: str
) -> Callable[[], object]:
    """A row block of torch's attention with a bias, forward and backward, by one of its kernels."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, *kv = (draw(batch, heads, n, dim).requires_grad_() for n in (rows, tokens, tokens))
    bias = draw(batch, 1, rows, tokens).requires_grad_(backend != "CUDNN_ATTENTION")
    leaves = [x for x in (q, *kv, bias) if x.requires_grad]

    def run() -> object:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            whole = bias.expand(-1, heads, -1, -1)
            out = torch.nn.functional.scaled_dot_product_attention(q, *kv, attn_mask=whole)
        return torch.autograd.grad(out.sum(), leaves)

    return run


def masked_softmax(maps: int, rows: int, tokens: int, compiler: str | None) -> Callable[[], object]:
    """Of a tile in fp32, rounded to bf16 as the next product takes it."""
    import torch

    logits = draw(maps, rows, tokens, dtype="float32")
    hidden = draw(rows, tokens) > 1

    def function(x):
        return x.masked_fill(hidden, -1e30).softmax(-1).to(torch.bfloat16)

    function = function if compiler is None else torch.compile(function, backend=compiler)
    return lambda: function(logits)


def operation(calls: int) -> Callable[[], object]:
    """Small operations of torch."""
    x = draw(16)

    def run() -> None:
        for _ in range(calls):
            x.add_(1)

    return run


def launchable() -> bool:
    """Test whether Triton's kernels run here."""
    from heedful.ops.impl import no_triton

    return no_triton(draw(1)) is None


def launch(calls: int) -> Callable[[], object]:
    """Launches of heedful's convolution of a small tile."""
    from heedful.ops.common.tiles import Scope, Sight
    from heedful.ops.mta.fused.steps import FusedSteps

    x, kernel = draw(1, 1, 16, 16), draw(1, 1, 1)
    scope = Scope(Sight(None, False, True, None), 16, 16, x.device, composed=True)
    steps = FusedSteps(scope)

    def run() -> None:
        for _ in range(calls):
            steps.convolve(x, kernel, 0, 0, range(16))

    return run


if __name__ == "__main__":
    place, end, size = sys.argv[1:]
    sys.exit(worker(Path(place), float(end), SMALL if size == "small" else FULL))
