"""The command line; every command imports its room when it is called."""

import os
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from heedful import __version__

# What the rooms accept, written once more so that --help shows it without importing them; their own
# checks, which know the nearest name, answer a wrong value.
Tasks = Literal["blocks", "assignment", "copy", "parity", "text"]
Mechanisms = Literal[
    "standard", "mta", "mta-published", "mta-v1", "talking-heads", "selective", "differential"
]
Device = Literal["auto", "cpu", "cuda"]
Cases = Literal[
    "mta-pre", "mta-identity", "mta-rank-one", "mta-post", "mta", "talking-heads", "selective",
    "differential",
]  # fmt: skip
Impls = Literal["reference", "tiled", "fused", "x-transformers", "flex", "liger"]
Passes = Literal["forward", "forward+backward", "decode"]
Dtype = Literal["float32", "bfloat16", "float16"]


def _one_of(choices: object, several: bool = True) -> object:
    listed = f"{{{','.join(get_args(choices))}}}"
    return tyro.conf.arg(metavar=f"{listed} [...]" if several else listed)


@dataclass(frozen=True)
class Compare:
    """Train several attention mechanisms side by side and write one page about them.

    Without options: block finding (standard, mta), variable assignment (standard, selective) and
    language modelling on the Python standard library's sources (all three). The same command
    called again goes on where an interrupted one stopped, and with more seeds it adds them.
    """

    tasks: Annotated[tuple[str, ...], _one_of(Tasks)] = ("blocks", "assignment", "text")
    """What to learn."""
    mechanisms: Annotated[tuple[str, ...], _one_of(Mechanisms)] = ()
    """What to compare. Default: those that each task tells apart."""
    seeds: int = 1
    """Seeds per task and mechanism; from two on, findings can be told from chance."""
    data: tuple[str, ...] = ()
    """Text for the task text: files, folders, .gz files, or hf:NAME[:CONFIG][:SPLIT]."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs/compare"
    """Folder for report.html, results.jsonl, config.json and the trained models."""
    steps: int | None = None
    """Optimiser steps per run, instead of each task's own."""
    batch: int | None = None
    """Rows per step, instead of each task's own."""
    device: Annotated[str, _one_of(Device, several=False)] = "auto"
    """auto is the GPU where there is one."""


@dataclass(frozen=True)
class Bench:
    """Time and peak memory of the operators beside SDPA; refuses to time what is wrong."""

    mechanisms: Annotated[tuple[str, ...], _one_of(Cases)] = (
        "mta-pre", "mta", "talking-heads", "selective", "differential",
    )  # fmt: skip
    """mta-pre: random 6x11 kernels before the softmax, mta-rank-one of rank one, mta-identity the
    identity; mta-post: after it; mta: on both sides, with full head mixing."""
    impls: Annotated[tuple[str, ...], _one_of(Impls)] = get_args(Impls)
    """By which implementation; what cannot run here is left out, and said."""
    lengths: tuple[int, ...] = (1024, 2048)
    """Tokens."""
    passes: Annotated[tuple[str, ...], _one_of(Passes)] = ("forward", "forward+backward")
    """decode: one new token with T keys."""
    batch: int = 1
    heads: int = 8
    dim: int = 64
    """Head dim."""
    dtype: Annotated[str, _one_of(Dtype, several=False)] = "float32"
    """Of q, k and v."""
    rounds: int = 5
    """Timed calls of each case, taken in turn."""
    memory: bool = True
    """Also measure peak memory, each case in a process of its own."""
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the records here as JSON lines, and a picture of them beside it (.svg). A file that is
    there already is never replaced."""


@dataclass(frozen=True)
class Doctor:
    """Say what works on this machine, what does not, and why."""


_Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `heedful`.

    Exits with 0, 1 (cannot be done), 2 (usage), 130 (Ctrl-C), 143 (told to end) or 141 (nobody
    reads the output any more).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _answer(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # What Python would still write when it ends goes nowhere, instead of failing once more.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
        code = 141  # as if SIGPIPE had ended it
    sys.exit(code)


def _answer(arguments: list[str]) -> int:
    if arguments[:1] == ["--version"]:
        print(f"heedful {__version__}")
        return 0
    try:
        command = tyro.cli(
            _Command,
            prog="heedful",
            args=arguments,
            description="Attention that looks at more than one token pair at a time. "
            "--version says which version this is.",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    except SystemExit as stop:  # after --help, or a usage error
        return stop.code or 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(command)
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f": {error.filename}" if error.filename is not None else ""
        problem = f"{error.strerror}{place}" if error.strerror else str(error)
    except (ValueError, ImportError) as error:
        problem = str(error)
    except (MemoryError, RuntimeError) as error:
        texts = ("out of memory", "can't allocate memory")  # torch's, on a GPU and on a CPU
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in texts):
            raise
        cause = " ".join(str(error).split())[:200]
        problem = f"not enough memory ({cause}); take a smaller batch or fewer steps"
    except KeyboardInterrupt:
        problem = "stopped"
    sys.stdout.flush()
    print(f"heedful: {problem}", file=sys.stderr)
    return 128 + signal.SIGINT if problem == "stopped" else 1


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """A warning as one line, without the place in the code that a user has no use for."""
    from tqdm import tqdm

    tqdm.write(f"warning: {message}", file=sys.stderr)


def _run(command: _Command) -> int:
    match command:
        case Compare():
            return _compare(command)
        case Bench():
            return _bench(command)
        case Doctor():
            from heedful.doctor import examine

            return examine()


def _bench(command: Bench) -> int:
    from heedful import bench

    options = {field.name: getattr(command, field.name) for field in fields(command)}
    out = options.pop("out")
    out = None if out is None else _path(out)
    if out is not None:
        bench.check_new(out)  # before minutes of measuring
    config = bench.Bench(**options)
    left_out = bench.cases_here(config)[1]
    for reason in dict.fromkeys(left_out.values()):
        cases = [" ".join(case) for case, why in left_out.items() if why == reason]
        print(f"left out: {', '.join(cases)}: {reason}", file=sys.stderr)
    records = bench.bench(config)
    print(bench.format_table(records))
    if out is not None:
        bench.write(records, out)
    return 0


def _path(text: str) -> Path:
    if not text:
        raise ValueError("out must be a path, got an empty text; write . for this folder")
    return Path(text)


def _compare(command: Compare) -> int:
    from transformers.utils import logging

    from heedful.compare import Comparison, compare, kept, summary
    from heedful.train import Stopped

    logging.disable_progress_bar()  # of saving and loading; the runs have their own

    options = {field.name: getattr(command, field.name) for field in fields(command)}
    out = _path(options.pop("out"))
    comparison = Comparison(**options)
    asked: list[int] = []

    def ask(signum: int, frame: object) -> None:
        asked.append(signum)
        if len(asked) > 1:
            raise KeyboardInterrupt  # a second signal does not wait for the step to end
        with suppress(OSError):  # not print, which a signal may have interrupted
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        records = compare(comparison, out, lambda: bool(asked))
    except (Stopped, KeyboardInterrupt):
        print(f"stopped: {kept(out)}; the same command goes on there", file=sys.stderr)
        return 128 + asked[-1]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    print(summary(records))
    print(f"\nreport: {out / 'report.html'}")
    return 0
