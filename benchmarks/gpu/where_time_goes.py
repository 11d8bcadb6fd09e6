"""Time of an operator by kernel: those of one call, forward and backward, by share.

On a GPU these are its kernels; on a CPU torch's operations, each without those that it calls.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from heedful.files import write_lines
from heedful_lab.commands.bench.cases import MECHANISMS, device
from heedful_lab.commands.bench.measure import Bench, Case, runner
from heedful_lab.records.environment import environment

SHOWN = 12


def measure(config: Bench) -> dict:
    """Times by name of one call after one of warm-up, in milliseconds, largest first."""
    (mechanism,), (impl,), (tokens,) = config.mechanisms, config.impls, config.lengths
    run = runner(config, Case(mechanism, impl, "forward+backward"), tokens)
    run()
    cuda = device() == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=kinds) as profiled:
        run()
        if cuda:
            torch.cuda.synchronize()
    times, calls = {}, {}
    for event in profiled.key_averages():
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if spent > 0 and not (cuda and event.self_cpu_time_total > 0):
            times[event.key], calls[event.key] = spent / 1e3, event.count
    largest = sorted(times, key=times.get, reverse=True)
    return {
        "mechanism": mechanism,
        "impl": impl,
        "tokens": tokens,
        "total_ms": sum(times.values()),
        "calls": sum(calls.values()),
        "parts": [{"name": x, "ms": times[x], "calls": calls[x]} for x in largest],
    }


def main(arguments: list[str] | None = None) -> int:
    """Profile every mechanism, print its largest parts, and write records to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", choices=MECHANISMS,
                        default=["mta-pre", "mta", "talking-heads", "selective"])  # fmt: skip
    parser.add_argument("--impl", default="fused" if torch.cuda.is_available() else "tiled")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    for name, value in {"tokens": 2048, "batch": 1, "heads": 8, "dim": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    records = []
    for mechanism in options.mechanisms:
        config = Bench(
            mechanisms=(mechanism,), impls=(options.impl,), lengths=(options.tokens,),
            batch=options.batch, heads=options.heads, dim=options.dim, dtype=options.dtype,
        )  # fmt: skip
        sizes = {name: getattr(config, name) for name in ("batch", "heads", "dim", "dtype")}
        records.append(profile := measure(config) | {"config": sizes})
        print(f"{mechanism}: {profile['total_ms']:.1f} ms in {profile['calls']:,} calls")
        for part in profile["parts"][:SHOWN]:
            share = part["ms"] / profile["total_ms"]
            print(f"  {share:6.1%} {part['ms']:9.2f} ms {part['calls']:7,} x {part['name'][:60]}")
    if options.out:
        about = environment(
            ["python", "-m", "benchmarks.gpu.where_time_goes", *(arguments or sys.argv[1:])]
        )
        write_lines(options.out, (record | {"environment": about} for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
