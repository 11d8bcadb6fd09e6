"""Time and memory of calls, on a GPU or a CPU."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch


def milliseconds(runs: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """`rounds` times of every call, taken in turn, so that a slow minute slows all of them.

    On a GPU by events in its stream: its own time, wherever it has enough to do.
    """
    times: list[list[float]] = [[] for _ in runs]
    if not torch.cuda.is_available():
        for _ in range(rounds):
            for run, durations in zip(runs, times, strict=True):
                start = time.perf_counter()
                run()
                durations.append((time.perf_counter() - start) * 1e3)
        return times
    events = []
    for _ in range(rounds):
        for durations, run in zip(times, runs, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            events.append((durations, begin, end))
    torch.cuda.synchronize()
    for durations, begin, end in events:
        durations.append(begin.elapsed_time(end))
    return times


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median and the 20 % and 80 % quantiles."""
    ordered = sorted(times)

    def quantile(fraction: float) -> float:
        return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]

    return {"ms": statistics.median(times), "low_ms": quantile(0.2), "high_ms": quantile(0.8)}


def steady(run: Callable[[], object], *, budget_ms: float = 500) -> dict:
    """The spread of as many calls as `budget_ms` holds, 3 to 30, and what a call needs.

    `peak_mib` is what a call adds to the peak of the GPU's memory, `None` on a CPU. A budget of 0
    is one call without warm-up, to try that it works.
    """
    peak = peak_mib(run)
    (times,) = milliseconds([run], 1)
    if budget_ms:
        rounds = max(3, min(30, int(budget_ms / max(times[0], 1e-3))))
        (times,) = milliseconds([run], rounds)
    return spread(times) | {"rounds": len(times), "peak_mib": peak}


def peak_mib(run: Callable[[], object]) -> float | None:
    """MiB that the second call adds to the peak of the GPU's memory; `None` on a CPU."""
    if not torch.cuda.is_available():
        return None
    run()  # what stays, such as a library's workspace, comes with the first call
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def replayed(run: Callable[[], object], rounds: int) -> float | None:
    """The median time of a call that a CUDA graph replays, without the host's work for it.

    `None` on a CPU.
    """
    if not torch.cuda.is_available():
        return None
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what a first call makes does not belong to the graph
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    (times,) = milliseconds([graph.replay], rounds)
    return statistics.median(times)
