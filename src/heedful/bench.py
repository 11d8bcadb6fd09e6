"""Time and peak memory of the operators beside SDPA; refuses to time what is wrong."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.environment import environment
from heedful.ops import differential_attention, multi_token_attention, selective_attention
from heedful.testing import assert_matches_oracle, peak_memory_mib

MECHANISMS = ("mta-pre", "mta-identity", "mta", "talking-heads", "selective", "differential")
PASSES = ("forward", "forward+backward")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHECKED_TOKENS = 150


@dataclass(frozen=True)
class Bench:
    """What to measure.

    Arguments:
        mechanisms: among `MECHANISMS`; SDPA is always measured beside them. `mta-pre` has random
            6x11 kernels before the softmax, `mta-identity` identity ones, `mta` both convolutions
            and full mixing before and after.
        impls: `"reference"`, `"tiled"`.
        lengths: tokens T.
        passes: `"forward"`, `"forward+backward"`.
        batch, heads, dim: of q, k and v.
        dtype: `"float32"`, `"bfloat16"` or `"float16"`.
        rounds: timed calls of each, taken in turn.
        memory: also measure peak memory, each case in a process of its own (CPU only).
    """

    mechanisms: tuple[str, ...] = MECHANISMS
    impls: tuple[str, ...] = ("reference", "tiled")
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    passes: tuple[str, ...] = PASSES
    batch: int = 1
    heads: int = 8
    dim: int = 64
    dtype: str = "float32"
    rounds: int = 5
    memory: bool = True

    def __post_init__(self) -> None:
        for name, known in (
            ("mechanisms", MECHANISMS),
            ("impls", ("reference", "tiled")),
            ("passes", PASSES),
        ):
            for value in getattr(self, name):
                if value not in known:
                    raise ValueError(f"{name} must be among {', '.join(known)}, got {value!r}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")
        for name in ("batch", "heads", "dim", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % 2:
            raise ValueError(f"heads must be even (differential pairs them), got {self.heads}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be positive, got {self.lengths}")


def bench(config: Bench, out: Path | None = None) -> list[dict]:
    """Measure every case; one record each, written to `out` as JSON lines when all are done.

    A record holds the median and the 20 % and 80 % quantiles in milliseconds, the ratio of its
    median to SDPA's of the same round, the growth of peak memory in MiB, and the environment.

    Raises:
        ValueError: an implementation is wrong; it is not timed.
    """
    check(config)
    about = environment()
    records = []
    for tokens in config.lengths:
        for passed in config.passes:
            for case in _measure(config, tokens, passed):
                records.append(case | {"config": asdict(config), "environment": about})
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_suffix(f".{os.getpid()}")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records))
        os.replace(temporary, out)
    return records


def check(config: Bench) -> None:
    """Raise unless every implementation matches the fp64 definition, forward and backward."""
    for mechanism in config.mechanisms:
        results = {}
        for impl, dtype in [
            *((impl, _DTYPES[config.dtype]) for impl in {*config.impls, "reference"}),
            ("oracle", torch.float64),
        ]:
            leaves = _draw(config, mechanism, _CHECKED_TOKENS)
            leaves = {name: x.to(_DTYPES[config.dtype]).to(dtype) for name, x in leaves.items()}
            for x in leaves.values():
                x.requires_grad_()
            output = _call(mechanism, leaves, "reference" if impl == "oracle" else impl)
            weight = torch.linspace(-1, 1, output.numel(), dtype=dtype, device=output.device)
            loss = (output * weight.view_as(output)).sum()
            results[impl] = (output.detach(), *torch.autograd.grad(loss, list(leaves.values())))
        for impl in config.impls:
            for number, parts in enumerate(
                zip(results[impl], results["reference"], results["oracle"], strict=True)
            ):
                try:
                    assert_matches_oracle(f"result {number}", *parts, terms=_CHECKED_TOKENS)
                except AssertionError as error:
                    raise ValueError(f"{mechanism} {impl} is wrong, not timed: {error}") from None


def format_table(records: list[dict]) -> str:
    """Records as an aligned table: time, ratio to SDPA, memory."""
    head = ("mechanism", "impl", "pass", "T", "ms", "20-80 %", "x SDPA", "MiB")
    rows = [head]
    for r in records:
        memory = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        spread = f"{r['low_ms']:.1f}-{r['high_ms']:.1f}"
        ratio = f"{r['sdpa_ratio']:.1f}"
        what = (r["mechanism"], r["impl"], r["pass"], str(r["tokens"]))
        rows.append((*what, f"{r['ms']:.1f}", spread, ratio, memory))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _measure(config: Bench, tokens: int, passed: str) -> Iterator[dict]:
    cases = [("sdpa", "torch"), *((m, i) for m in config.mechanisms for i in config.impls)]
    runs = [_runner(config, mechanism, impl, tokens, passed) for mechanism, impl in cases]
    times: list[list[float]] = [[] for _ in cases]
    for run in runs:
        run()
    for _ in range(config.rounds):
        for run, taken in zip(runs, times, strict=True):
            _synchronize()
            start = time.perf_counter()
            run()
            _synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
    del runs
    for (mechanism, impl), taken in zip(cases, times, strict=True):
        ratios = [mine / sdpa for mine, sdpa in zip(taken, times[0], strict=True)]
        yield {
            "mechanism": mechanism,
            "impl": impl,
            "pass": passed,
            "tokens": tokens,
            "ms": statistics.median(taken),
            "low_ms": _quantile(taken, 0.2),
            "high_ms": _quantile(taken, 0.8),
            "sdpa_ratio": statistics.median(ratios),
            "peak_mib": _peak(config, mechanism, impl, tokens, passed) if config.memory else None,
        }


def _runner(
    config: Bench, mechanism: str, impl: str, tokens: int, passed: str
) -> Callable[[], object]:
    leaves = _draw(config, mechanism, tokens)
    leaves = {name: x.to(_DTYPES[config.dtype]) for name, x in leaves.items()}
    backward = passed == "forward+backward"
    for x in leaves.values():
        x.requires_grad_(backward)

    def run() -> object:
        output = _call(mechanism, leaves, impl)
        return torch.autograd.grad(output.sum(), list(leaves.values())) if backward else output

    return run


def _draw(config: Bench, mechanism: str, tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    heads = config.heads

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=torch.float64)

    leaves = {name: normal(config.batch, heads, tokens, config.dim) for name in ("q", "k", "v")}
    if mechanism == "mta-identity":
        leaves["conv"] = torch.zeros(heads, 6, 11, dtype=torch.float64)
        leaves["conv"][:, -1, 5] = 1
    if mechanism in ("mta-pre", "mta"):
        leaves["conv"] = normal(heads, 6, 11) / 6
    if mechanism == "mta":
        leaves["post_conv"] = normal(heads, 6, 11) / 6
    if mechanism in ("mta", "talking-heads"):
        leaves["mix"] = normal(1, heads, heads) / heads**0.5
        leaves["post_mix"] = normal(1, heads, heads) / heads**0.5
    if mechanism == "differential":
        leaves["v"] = torch.cat([leaves["v"][:, ::2], leaves["v"][:, 1::2]], dim=-1)
        leaves["lam"] = torch.tensor(0.5, dtype=torch.float64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return {name: x.to(device) for name, x in leaves.items()}


def _call(mechanism: str, leaves: dict[str, Tensor], impl: str) -> Tensor:
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    rest = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
    if mechanism == "sdpa":
        return scaled_dot_product_attention(q, k, v, is_causal=True)
    if mechanism == "selective":
        return selective_attention(q, k, v, impl=impl).output
    if mechanism == "differential":
        return differential_attention(q, k, v, **rest, impl=impl)
    return multi_token_attention(q, k, v, **rest, impl=impl)


def _peak(config: Bench, mechanism: str, impl: str, tokens: int, passed: str) -> float | None:
    if torch.cuda.is_available():
        run = _runner(config, mechanism, impl, tokens, passed)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    return peak_memory_mib(
        "import torch\nfrom heedful import bench\n"
        f"config = bench.Bench(**{asdict(config)!r})\n"
        f"bench._runner(config, {mechanism!r}, {impl!r}, 64, {passed!r})()\n"
        f"run = bench._runner(config, {mechanism!r}, {impl!r}, {tokens}, {passed!r})\n"
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _quantile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]
