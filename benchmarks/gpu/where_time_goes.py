"""Time of an operator by kernel: those of one call, forward and backward, by share.

On a GPU these are its kernels; on a CPU torch's operations, each without those that it calls.
"""

import torch
from torch.profiler import ProfilerActivity, profile

from heedful_lab.commands.bench.cases import device
from heedful_lab.commands.bench.measure import Bench, Case, runner

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
