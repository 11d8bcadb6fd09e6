"""Session on a GPU, in seven stages of at most ten minutes each.

1. versions, ceilings, primitives, and the laws of the operators on the real kernels;
2. the operators beside SDPA, as models call them: bf16, batch 4, 16 heads of 128, transposed views;
3. where the time of a call goes;
4. the fastest of stage 2 at 16k tokens, with peak memory;
5. training steps of the 880M model of the multi-token paper;
6. one new token with up to 32k keys;
7. a model that decodes with the full cache and with small ones.

    python -m benchmarks.gpu.session --stage 2 --out runs/gpu.jsonl

Every case is one line of the file as soon as it is done; a case that is in the file is left out, so
that the same command goes on where the last one ended. `--small` tries a stage on any machine, the
Triton kernels in their interpreter.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import serving, training_step, where_time_goes
from benchmarks.gpu.ceilings import cases
from benchmarks.gpu.sizes import FULL, FUSED, MECHANISMS, SMALL, Sizes, forms
from benchmarks.gpu.watched import BROKEN, SessionCase, read, watch, work
from benchmarks.parts import ROOT
from heedful_lab.commands.bench.cases import call, device
from heedful_lab.commands.bench.clock import replayed, steady
from heedful_lab.commands.bench.measure import Bench, Case, check, runner
from heedful_lab.records.environment import environment

STAGE_SECONDS = 540.0
STEPPED = ("unconverted", "mta-published", "selective")


def stages(out: Path) -> dict[int, Callable[[Sizes], Iterator[SessionCase]]]:
    """The cases of every stage; `out` holds what earlier ones found."""
    return {
        1: ceilings,
        2: beside_sdpa,
        3: parts_of_calls,
        4: partial(winners, out),
        5: training_steps,
        6: decoding,
        7: served,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run a stage in a worker process that may die, and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, nargs="+", choices=range(1, 8), required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-session.jsonl"),
                        help="JSON lines, appended to; default %(default)s")  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--small", action="store_true", help="sizes for a try on any machine")
    parser.add_argument("--seconds", type=float, default=STAGE_SECONDS, help="of these stages")
    parser.add_argument("--commit", help="the commit, where the sources are not in a repository")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)  # tells a worker that it is
    options = parser.parse_args(arguments)
    arguments = sys.argv[1:] if arguments is None else arguments
    if options.until is not None:
        sizes = SMALL if options.small else FULL
        return worker(options.stage, sizes, options.out, options.until, options.commit)
    use(options.device)
    until = str(time.time() + options.seconds)
    return watch(
        [sys.executable, "-m", "benchmarks.gpu.session", *arguments, "--until", until], options.out
    )


def use(device: str | None) -> None:
    """Choose the device for this process and those that it starts, before torch uses one."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""

    if torch.cuda.is_available():
        return
    if device == "cuda":
        sys.exit("--device cuda: torch sees no GPU here; --device cpu --small tries the stages")
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported


def worker(
    these: Sequence[int], sizes: Sizes, out: Path, until: float, commit: str | None = None
) -> int:
    """Measure the cases of stages in this process."""

    for stage in these:
        command = f"python -m benchmarks.gpu.session --stage {stage}{' --small' * (sizes is SMALL)}"
        about = environment(command.split())
        about["commit"] = about["commit"] or commit
        if not work(stage, stages(out)[stage](sizes), out, until, about):
            return BROKEN
    return 0


# Stage 1


def ceilings(sizes: Sizes) -> Iterator[SessionCase]:
    """Properties of this machine and its libraries, and of the kernels' correctness here."""

    yield from cases(sizes)
    config = {"device": device(), "tests": sizes.tests}
    yield SessionCase("laws", config, partial(laws, sizes.tests))


def laws(tests: tuple[str, ...], left: float) -> dict:
    """Run the operators' tests on this device: the exit code, and the end of what they print."""
    cuda = torch.cuda.is_available()
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-rfE", "-m", "not slow"]  # of the crosses all: only the interpreter is slow there
    command += [*tests, *(("--device", "cuda", "-n", "auto") if cuda else ())]
    # Its own settings of Triton and of the workers are for it to make.
    hidden = ("TRITON_INTERPRET", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    clean["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), clean.get("PYTHONPATH", "")])
    started = time.time()
    options = {"cwd": ROOT, "env": clean, "text": True, "timeout": max(left, 1.0)}
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **options
    )
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"the tests could not run: {ended.stdout[-1000:]}")
    result = {"exit_code": ended.returncode, "seconds": time.time() - started}
    return result | {"end": ended.stdout[-3000:]}


# Stages 2, 4 and 6


def beside_sdpa(sizes: Sizes) -> Iterator[SessionCase]:
    """Every operator by its kernels and by plain torch, shortest sequences first."""
    for tokens in sizes.lengths:
        for passed in ("forward", "forward+backward"):
            yield from sdpa_cases(sizes, passed, tokens)
            for mechanism in MECHANISMS:
                for impl in forms(mechanism):
                    yield operator_case(sizes, mechanism, impl, passed, tokens)
            yield unhidden_case(sizes, passed, tokens)


def unhidden_case(sizes: Sizes, passed: str, tokens: int) -> SessionCase:
    """Selective attention by its kernels where nothing is hidden, so that no tile is left out."""

    def measure(left: float) -> dict:

        def function(mechanism: str, impl: str, leaves: dict) -> object:
            selectors = {f"selector_{x}": leaves[x][:, :1] * 0 for x in ("q", "k")}
            return call(mechanism, impl, leaves | selectors)

        case = Case("selective", "fused", passed)
        return timed(runner(sizes.bench, case, tokens, function), sizes)

    config = config_of(sizes, "selective, nothing hidden", "fused", passed, tokens)
    return SessionCase(f"selective, nothing hidden, {passed} {tokens}", config, measure)


def winners(out: Path, sizes: Sizes) -> Iterator[SessionCase]:
    """For every operator the faster implementation of stage 2, both if that did not tell."""
    best = fastest(read(out), asdict(sizes.bench))
    for tokens in sizes.long:
        for passed in ("forward", "forward+backward"):
            yield from sdpa_cases(sizes, passed, tokens)
            for mechanism in MECHANISMS:
                for impl in best.get(mechanism, forms(mechanism)):
                    yield operator_case(sizes, mechanism, impl, passed, tokens)


def fastest(records: list[dict], bench: dict) -> dict[str, tuple[str]]:
    """The implementation with the least time of forward and backward, at the longest sequences."""
    ranks: dict[str, tuple] = {}
    for record in records:
        config = record["config"]
        of_stage = record["stage"] == 2 and record["status"] == "measured"
        if not of_stage or config["mechanism"] not in MECHANISMS or config["pass"] == "forward":
            continue
        if config["bench"] == plain(bench):
            rank = (-config["tokens"], record["numbers"]["ms"], config["impl"])
            ranks[config["mechanism"]] = min(rank, ranks.get(config["mechanism"], rank))
    return {mechanism: (rank[-1],) for mechanism, rank in ranks.items()}


def decoding(sizes: Sizes) -> Iterator[SessionCase]:
    """One new token: its last queries against all keys."""
    for tokens in sizes.decode:
        yield from sdpa_cases(sizes, "decode", tokens)
        for mechanism in MECHANISMS:
            for impl in (*forms(mechanism), "reference"):
                yield operator_case(sizes, mechanism, impl, "decode", tokens)


def config_of(sizes: Sizes, mechanism: str, impl: str, passed: str, tokens: int) -> dict:

    what = {"mechanism": mechanism, "impl": impl, "pass": passed, "tokens": tokens}
    return what | {"device": device(), "bench": plain(asdict(sizes.bench))}


def plain(bench: dict) -> dict:
    """The sizes that a single case has, as JSON gives them back."""
    return {name: bench[name] for name in ("batch", "heads", "dim", "dtype", "layout")}


def operator_case(sizes: Sizes, mechanism: str, impl: str, passed: str, tokens: int) -> SessionCase:
    """One of our operators, compared with fp64 first."""

    def measure(left: float) -> dict:

        case = Case(mechanism, impl, passed)
        checked(sizes, case)
        return timed(runner(sizes.bench, case, tokens), sizes)

    name = f"{mechanism} {impl} {passed} {tokens}"
    return SessionCase(name, config_of(sizes, mechanism, impl, passed, tokens), measure)


def timed(run: Callable[[], object], sizes: Sizes) -> dict:
    """The spread of its calls, and as `replay_ms` what the device alone takes for one."""

    numbers = steady(run, budget_ms=sizes.milliseconds)
    return numbers | {"replay_ms": replayed(run, numbers["rounds"])}


@cache
def checked(sizes: Sizes, case: tuple[str, str, str]) -> None:
    """Raise unless the case is right at a small size; checked once per process."""

    check(sizes.bench, [case], tokens=sizes.checked)


def sdpa_cases(sizes: Sizes, passed: str, tokens: int) -> Iterator[SessionCase]:
    """torch's SDPA by each of its kernels, by name."""

    def measure(backend: str, left: float) -> dict:

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return timed(runner(sizes.bench, Case("sdpa", "torch", passed), tokens), sizes)

    for backend in sizes.sdpa:
        config = config_of(sizes, "sdpa", backend, passed, tokens)
        yield SessionCase(f"sdpa {backend} {passed} {tokens}", config, partial(measure, backend))


# Stage 3


def parts_of_calls(sizes: Sizes) -> Iterator[SessionCase]:
    """The kernels of a call, forward and backward."""
    for tokens in sizes.profiled:
        for mechanism in FUSED:
            for impl in forms(mechanism):
                config = config_of(sizes, mechanism, impl, "forward+backward", tokens)
                parts = partial(where_it_goes, sizes.bench, mechanism, impl, tokens)
                name = f"{mechanism} {impl} parts {tokens}"
                yield SessionCase(name, config | {"way": "profile"}, parts)


def where_it_goes(bench: Bench, mechanism: str, impl: str, tokens: int, left: float) -> dict:
    """The kernels of one call with its backward, by share of its time."""

    choice = {"mechanisms": (mechanism,), "impls": (impl,), "lengths": (tokens,)}
    profile = where_time_goes.measure(replace(bench, **choice))
    return profile | {"parts": profile["parts"][: where_time_goes.SHOWN]}


# Stage 5


def training_steps(sizes: Sizes) -> Iterator[SessionCase]:
    """The unconverted model with each of SDPA's kernels, then converted ones."""

    step = training_step.Step(**dict(sizes.step))
    for mechanism in STEPPED:
        for impl in sizes.sdpa if mechanism == "unconverted" else ("fused",):
            config = asdict(step) | {"mechanism": mechanism, "impl": impl, "device": device()}
            measure = partial(one_training, step, mechanism, impl)
            yield SessionCase(f"{mechanism} {impl}", config, measure)


def one_training(step, mechanism: str, impl: str, left: float) -> dict:
    """Tokens per second and peak memory of a model's training steps."""

    pinned = mechanism == "unconverted"
    with sdpa_kernel(getattr(SDPBackend, impl)) if pinned else nullcontext():
        return training_step.measure(step, mechanism, impl, device())


# Stage 7


def served(sizes: Sizes) -> Iterator[SessionCase]:
    """Larger and larger batches, as long as memory lasts."""

    size = serving.Serving(**dict(sizes.serving))
    for batch in size.batches:
        for way in serving.WAYS:
            config = serving.config_of(size, way, batch) | {"device": device()}
            run = partial(one_serving, size, way, batch)
            yield SessionCase(f"{way} batch {batch}", config, run)


def one_serving(size, way: str, batch: int, left: float) -> dict:
    """A prompt and decoded tokens of one batch."""

    return serving.measure(size, way, batch, device())


if __name__ == "__main__":
    sys.exit(main())
