"""Time and peak memory of the operators beside SDPA; refuses to time what is wrong."""

import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from heedful.checks import UserError
from heedful.files import write_lines
from heedful.testing import assert_matches_oracle, peak_memory_mib
from heedful_lab.commands.bench.cases import Leaves, call, draw, exists, obstacle
from heedful_lab.commands.bench.clock import milliseconds, peak_mib, spread
from heedful_lab.commands.bench.options import Bench, sizes
from heedful_lab.records.environment import environment

_CHECKED_TOKENS = 150

Function = Callable[[str, str, Leaves], Tensor]
"""As `call`: from mechanism, implementation and tensors to the output."""


class Case(NamedTuple):
    """One thing to time: a mechanism by an implementation, in one pass."""

    mechanism: str
    impl: str
    passed: str


def bench(config: Bench) -> list[dict]:
    """Measure every case, one record each.

    A record holds the median and the 20 % and 80 % quantiles in milliseconds, the ratio of its
    median to SDPA's of the same round, the growth of peak memory in MiB (`None` where it was not or
    cannot be measured), and the environment.

    Raises:
        ValueError: an implementation is wrong; it is not timed. Or nothing can run here.
    """
    cases, _ = cases_here(config)
    if not cases:
        raise UserError(f"impls: none of {', '.join(config.impls)} can run these cases here")
    check(config, cases)
    about = environment()
    sizes_of_run = {name: x for name, x in asdict(config).items() if name != "out"}
    records = []
    for tokens in config.lengths:
        for passed in config.passes:
            these = [case for case in cases if case.passed == passed]
            for record in _measure(config, tokens, these):
                records.append(record | {"config": sizes_of_run, "environment": about})
    return records


def write(records: list[dict], out: Path) -> None:
    """Write records to `out` as JSON lines.

    Raises:
        ValueError: as `check_new`.
    """
    check_new(out)
    write_lines(out, records)


def check_new(out: Path) -> None:
    """Raise unless records can be written without replacing anything."""
    if not out.name:
        raise UserError(f"out must be a file for JSON lines such as bench.jsonl, got {str(out)!r}")
    if out.exists():
        raise UserError(f"{out} is there already: choose another name for out, or delete it")
    above = next(path for path in out.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"out={out}: {above} is not a writable folder; choose another")


def cases_here(config: Bench) -> tuple[list[Case], dict[Case, str]]:
    """The cases that can run here, and why the others cannot."""
    candidates = [
        Case(mechanism, impl, passed)
        for mechanism, impl, passed in product(config.mechanisms, config.impls, config.passes)
        if exists(mechanism, impl)
    ]
    reasons = {case: obstacle(config, *case) for case in candidates}
    return (
        [case for case in candidates if reasons[case] is None],
        {case: reason for case, reason in reasons.items() if reason is not None},
    )


def check(
    config: Bench, cases: Sequence[Case], function: Function = call, tokens: int = _CHECKED_TOKENS
) -> None:
    """Raise unless every case matches the fp64 definition, with the gradients if it has them.

    Arguments:
        config: sizes and precision.
        cases: the cases that `function` computes.
        function: computes a case; default the operators.
        tokens: keys of the sequences that are compared.
    """
    dtype = getattr(torch, config.dtype)
    for (mechanism, passed), group in groupby(
        sorted(cases, key=lambda case: (case.mechanism, case.passed)),
        lambda case: (case.mechanism, case.passed),
    ):
        definition = Case(mechanism, "reference", passed)
        plain = _results(config, definition, call, tokens, dtype)
        exact = _results(config, definition, call, tokens, torch.float64)
        for case in group:
            results = _results(config, case, function, tokens, dtype)
            for number, parts in enumerate(zip(results, plain, exact, strict=True)):
                try:
                    assert_matches_oracle(f"result {number}", *parts, terms=tokens)
                except AssertionError as error:
                    raise UserError(
                        f"{mechanism} {case.impl} is wrong, not timed: {error}"
                    ) from None


def _results(
    config: Bench, case: Case, function: Function, tokens: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """The output at a small size from inputs of the measured precision, and gradients."""
    leaves = draw(config, case.mechanism, tokens, case.passed)
    backward = case.passed == "forward+backward"
    leaves = {
        name: x.to(torch.promote_types(x.dtype, dtype)).requires_grad_(backward)
        for name, x in leaves.items()
    }
    output = function(case.mechanism, case.impl, leaves)
    if not backward:
        return (output,)
    weight = torch.linspace(-1, 1, output.numel(), dtype=dtype, device=output.device)
    loss = (output * weight.view_as(output)).sum()
    return (output.detach(), *torch.autograd.grad(loss, list(leaves.values())))


def format_table(records: list[dict]) -> str:
    """Records as an aligned table: time, ratio to SDPA, memory; and at which sizes."""
    head = ("mechanism", "impl", "pass", "T", "ms", "20-80 %", "x SDPA", "MiB")
    rows = [head]
    for r in records:
        memory = "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}"
        around = f"{r['low_ms']:.1f}-{r['high_ms']:.1f}"
        ratio = f"{r['sdpa_ratio']:.1f}"
        what = (r["mechanism"], r["impl"], r["pass"], str(r["tokens"]))
        rows.append((*what, f"{r['ms']:.1f}", around, ratio, memory))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*(line.rstrip() for line in lines), sizes(records[0]["config"])])


def _measure(config: Bench, tokens: int, cases: Sequence[Case]) -> Iterator[dict]:
    if not cases:
        return
    cases = [Case("sdpa", "torch", cases[0].passed), *cases]
    runs = [runner(config, case, tokens) for case in cases]
    for run in runs:
        run()
    times = milliseconds(runs, config.rounds)
    del runs
    for case, durations in zip(cases, times, strict=True):
        ratios = [mine / sdpa for mine, sdpa in zip(durations, times[0], strict=True)]
        yield {
            "mechanism": case.mechanism,
            "impl": case.impl,
            "pass": case.passed,
            "tokens": tokens,
            **spread(durations),
            "sdpa_ratio": statistics.median(ratios),
            # One new token takes next to nothing.
            "peak_mib": _peak(config, case, tokens)
            if config.memory and case.passed != "decode"
            else None,
        }


def runner(
    config: Bench, case: Case, tokens: int, function: Function = call
) -> Callable[[], object]:
    """A call of the case with `tokens` keys: of `function`, with its backward where it has one."""
    leaves = draw(config, case.mechanism, tokens, case.passed)
    backward = case.passed == "forward+backward"
    leaves = {name: x.requires_grad_(backward) for name, x in leaves.items()}

    def run() -> object:
        output = function(case.mechanism, case.impl, leaves)
        return torch.autograd.grad(output.sum(), list(leaves.values())) if backward else output

    return run


def _peak(config: Bench, case: Case, tokens: int) -> float | None:
    if torch.cuda.is_available():
        return peak_mib(runner(config, case, tokens))
    peak = peak_memory_mib(
        "import torch\nfrom heedful_lab.commands.bench import measure as bench\n"
        f"config = bench.Bench(**{asdict(config)!r})\n"
        f"case = bench.Case(*{tuple(case)!r})\n"
        "bench.runner(config, case, 64)()\n"
        f"run = bench.runner(config, case, {tokens})\n"
    )
    return peak if math.isfinite(peak) else None
