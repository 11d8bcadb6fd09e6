"""The command line; every command imports its room when it is called."""

import signal
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Compare:
    """Train several attention mechanisms side by side and write one page about them.

    Without options: block finding (standard, mta), variable assignment (standard, selective) and
    language modelling on the Python standard library's sources (all three). The same command
    called again goes on where an interrupted one stopped.
    """

    tasks: tuple[str, ...] = ("blocks", "assignment", "text")
    """Among blocks, assignment, copy, parity, text."""
    mechanisms: tuple[str, ...] = ()
    """Among standard, mta, mta-published, mta-v1, talking-heads, selective, differential. Default:
    those that each task tells apart."""
    seeds: int = 1
    """Seeds per task and mechanism; from two on, findings can be told from chance."""
    data: tuple[str, ...] = ()
    """Text for the task text: files, folders, .gz files, or hf:NAME[:CONFIG][:SPLIT]."""
    out: Path = Path("runs/compare")
    """Folder for report.html, results.jsonl, config.json and the trained models."""
    steps: int | None = None
    """Optimiser steps per run, instead of each task's own."""
    batch: int | None = None
    """Rows per step, instead of each task's own."""
    device: str = "auto"
    """auto (the GPU where there is one), cpu or cuda."""


@dataclass(frozen=True)
class Bench:
    """Time and peak memory of the operators beside SDPA; refuses to time what is wrong."""

    mechanisms: tuple[str, ...] = ("mta-pre", "mta", "talking-heads", "selective", "differential")
    """Among mta-pre, mta-rank-one, mta-identity, mta-post, mta, talking-heads, selective,
    differential."""
    impls: tuple[str, ...] = ("reference", "tiled", "fused", "x-transformers", "flex", "liger")
    """Among these; what cannot run here is left out, and said."""
    lengths: tuple[int, ...] = (1024, 2048)
    """Tokens."""
    passes: tuple[str, ...] = ("forward", "forward+backward")
    """Among forward, forward+backward, decode (one new token with T keys)."""
    batch: int = 1
    heads: int = 8
    dim: int = 64
    """Head dim."""
    dtype: str = "float32"
    """float32, bfloat16 or float16."""
    rounds: int = 5
    """Timed calls of each case, taken in turn."""
    memory: bool = True
    """Also measure peak memory, each case in a process of its own."""
    out: Path | None = None
    """Write the records here as JSON lines, and a picture of them beside it (.svg)."""


@dataclass(frozen=True)
class Doctor:
    """Say what works on this machine, what does not, and why."""


_Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `heedful`; exits with 0, 1 (cannot be done), 2 (usage) or 130 (stopped)."""
    command = tyro.cli(
        _Command,
        prog="heedful",
        args=arguments,
        description="Attention that looks at more than one token pair at a time.",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    try:
        code = _run(command)
    except (ValueError, OSError, ImportError) as error:
        sys.stdout.flush()
        print(f"heedful: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


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
    config = bench.Bench(**options)
    left_out = bench.cases_here(config)[1]
    for reason in dict.fromkeys(left_out.values()):
        cases = [" ".join(case) for case, why in left_out.items() if why == reason]
        print(f"left out: {', '.join(cases)}: {reason}", file=sys.stderr)
    records = bench.bench(config, out)
    print(bench.format_table(records))
    if out is not None:
        from heedful.bench_plot import plot

        plot(records, out.with_suffix(".svg"))
    return 0


def _compare(command: Compare) -> int:
    from transformers.utils import logging

    from heedful.compare import Comparison, compare, summary
    from heedful.train import Stopped

    logging.disable_progress_bar()  # of saving and loading; the runs have their own

    options = {field.name: getattr(command, field.name) for field in fields(command)}
    out = options.pop("out")
    comparison = Comparison(**options)
    asked: list[int] = []

    def ask(signum: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt  # a second Ctrl-C does not wait for the step to end
        asked.append(signum)
        print("\nstopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, ask)
    try:
        records = compare(comparison, out, lambda: bool(asked))
    except (Stopped, KeyboardInterrupt):
        print(
            f"stopped: finished runs are kept in {out}; the same command goes on there",
            file=sys.stderr,
        )
        return 130
    finally:
        signal.signal(signal.SIGINT, before)
    print(summary(records))
    print(f"\nreport: {out / 'report.html'}")
    return 0
