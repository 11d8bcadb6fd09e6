"""The command line; every command imports its folder when it is called."""

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from heedful import __version__
from heedful.checks import UserError
from heedful_lab.commands.bench.options import Bench
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.compare.options import Comparison
from heedful_lab.commands.convert.options import FolderConversion
from heedful_lab.commands.evaluate.options import Evaluation
from heedful_lab.commands.generate.options import Generation
from heedful_lab.commands.inspect.options import Inspection
from heedful_lab.commands.shrink.options import Shrink
from heedful_lab.commands.train.options import Training

_WORDS = tyro.constructors.ConstructorRegistry()


@_WORDS.primitive_rule
def _word(info: tyro.constructors.PrimitiveTypeInfo):
    """A `Literal` is shown with its values and read as a word: the configuration's own check
    answers a wrong one, with the nearest."""
    if info.type_origin is not Literal:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{{{','.join(get_args(info.type))}}}",
        instance_from_str=lambda words: words[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `heedful`.

    Exits with 0, 1 (cannot be done), 2 (usage), 130 (Ctrl-C), 143 (terminated) or 141 (nobody
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
    parts = [Annotated[kind, tyro.conf.subcommand(name)] for kind, name in _NAMES.items()]
    try:
        command = tyro.cli(
            reduce(or_, parts),
            prog="heedful",
            args=arguments,
            description="Attention that looks at more than one token pair at a time. "
            "--version says which version this is.",
            config=(tyro.conf.OmitArgPrefixes,),
            registry=_WORDS,
        )
    except SystemExit as stop:  # after --help, or a usage error
        return stop.code or 0
    code = 1
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return _run(command)
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f": {error.filename}" if error.filename is not None else ""
        problem = f"{error.strerror}{place}" if error.strerror else str(error)
    except (UserError, ImportError) as error:
        problem = str(error)
    except (MemoryError, RuntimeError) as error:
        texts = ("out of memory", "can't allocate memory")  # torch's, on a GPU and on a CPU
        if isinstance(error, RuntimeError) and not any(text in str(error) for text in texts):
            raise
        cause = " ".join(str(error).split())[:200]
        problem = f"not enough memory ({cause}); take a smaller batch or fewer steps"
    except KeyboardInterrupt as stop:
        problem, number = ": ".join(["stopped", *stop.args[:1]]), [*stop.args[1:], signal.SIGINT][0]
        code = 128 + number
    sys.stdout.flush()
    print(f"heedful: {problem}", file=sys.stderr)
    return code


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """A warning as one line, without the place in the code that a user has no use for."""
    _note(f"warning: {message}")


def _note(text: str) -> None:
    """Print a line beside the output, above a progress bar."""
    from tqdm import tqdm

    tqdm.write(text, file=sys.stderr)


def _run(command: object) -> int:
    name = _NAMES[type(command)]
    kind, run = _COMMANDS[name]
    options = kind(**{field.name: getattr(command, field.name) for field in fields(kind)})
    if getattr(options, "out", None) == "":
        raise UserError("out must be a path, got an empty text; write . for this folder")
    if kind is Doctor:
        return run(options)
    from transformers.utils import logging

    from heedful_lab.commands.models import device_in_words

    logging.disable_progress_bar()  # of opening and saving; the commands have their own
    logging.set_verbosity_error()
    run(options)
    if name not in ("convert", "eval"):  # eval names it before it begins
        device = device_in_words(getattr(options, "device", "auto"))
        print(f"device: {device}", file=sys.stderr)
    return 0


@contextmanager
def _resumable(kept: Callable[[], str]) -> Iterator[Callable[[], bool]]:
    """Work that the same command goes on with: ends after its step when a signal comes.

    Yields what says whether one has come; at the second one work stops at once.

    Arguments:
        kept: says where what is done is kept.
    """
    from heedful.training.run import Stopped

    signals: list[int] = []

    def stop(signum: int, frame: object) -> None:
        signals.append(signum)
        if len(signals) > 1:
            raise KeyboardInterrupt  # a second signal does not wait for the step to end
        with suppress(OSError):  # not print, which a signal may have interrupted
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    except (Stopped, KeyboardInterrupt):
        raise _stopped(kept(), *signals[-1:]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(kept: str, number: int = signal.SIGINT) -> KeyboardInterrupt:
    return KeyboardInterrupt(f"{kept}; the same command goes on there", number)


def _compare(options: Comparison) -> None:
    from heedful_lab.commands.compare.findings import overview
    from heedful_lab.commands.compare.page import write_report
    from heedful_lab.commands.compare.run import compare, kept

    out = Path(options.out)
    with _resumable(lambda: kept(out)) as should_stop:
        records = compare(options, out, should_stop, write_report)
    print(f"{overview(records)}\n\nreport: {out / 'report.html'}")


def _train(options: Training) -> None:
    from heedful_lab.commands.train.run import formatted, train_text

    with _resumable(lambda: f"the state is kept in {options.out}") as should_stop:
        result = train_text(options, should_stop)
    if result is not None:
        print(formatted(result))


def _shrink(options: Shrink) -> None:
    from heedful_lab.commands.shrink.run import shrink

    with _resumable(lambda: f"the state is kept in {options.out}") as should_stop:
        print(shrink(options, _note, should_stop))


def _convert(options: FolderConversion) -> None:
    from heedful_lab.commands.convert.run import convert_folder

    print(convert_folder(options))


def _generate(options: Generation) -> None:
    from heedful_lab.commands.generate.run import generate

    for result in generate(options, lambda text: print(text, end="", flush=True)):
        print(flush=True)
        print(result, file=sys.stderr)


def _budget(options: BudgetSearch) -> None:
    from heedful_lab.commands.budget.search import format_result, search

    try:
        print(format_result(search(options)))
    except KeyboardInterrupt:
        raise _stopped("the trials so far are kept beside the model") from None


def _eval(options: Evaluation) -> None:
    from heedful_lab.commands.evaluate.page import overview, write_evaluation
    from heedful_lab.commands.evaluate.run import evaluate

    out = Path(options.out)
    try:
        result = evaluate(options, _note)
    except KeyboardInterrupt:
        raise _stopped(f"the answers so far are kept in {out}") from None
    print(overview(result.samples, result.harness, options.seed))
    print(f"\nreport: {write_evaluation(out, result.samples, result.harness, result.about)}")


def _inspect(options: Inspection) -> None:
    from heedful_lab.commands.inspect.arrays import page_data
    from heedful_lab.commands.inspect.page import write_inspection
    from heedful_lab.commands.inspect.run import inside

    path = write_inspection(options.out, page_data(*inside(options)))
    print(f"page: {path} ({path.stat().st_size / 2**20:,.1f} MiB)")


def _bench(options: Bench) -> None:
    from heedful_lab.commands.bench import measure as bench

    out = None if options.out is None else Path(options.out)
    if out is not None:
        bench.check_new(out)  # before minutes of measuring
    cases, left_out = bench.cases_here(options)
    for reason in dict.fromkeys(left_out.values()):
        names = [" ".join(case) for case, why in left_out.items() if why == reason]
        print(f"left out: {', '.join(names)}: {reason}", file=sys.stderr)
    count, way = len(cases) * len(options.lengths), "--mechanisms, --impls, --passes or --lengths"
    print(f"{count} cases of a few seconds each; {way} choose others", file=sys.stderr)
    records = bench.bench(options)
    print(bench.format_table(records))
    if out is not None:
        bench.write(records, out)


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices and optional parts, or which mechanisms fit a model."""

    model: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[MODEL]")]] = None
    """Folder of a model, a name on the Hugging Face hub, or a configuration (FILE.json): which
    mechanisms fit, what they add, and what its cache takes per token. Nothing is changed."""


def _doctor(options: Doctor) -> int:
    from heedful_lab.doctor import examine, examine_model

    return examine() if options.model is None else examine_model(options.model)


_COMMANDS: dict[str, tuple[type, Callable]] = {
    "compare": (Comparison, _compare),
    "train": (Training, _train),
    "shrink": (Shrink, _shrink),
    "convert": (FolderConversion, _convert),
    "generate": (Generation, _generate),
    "budget": (BudgetSearch, _budget),
    "eval": (Evaluation, _eval),
    "inspect": (Inspection, _inspect),
    "bench": (Bench, _bench),
    "doctor": (Doctor, _doctor),
}


def _unchecked(kind: type) -> type:
    """The options of a command, which `_run` checks: what a constructor raises, tyro would put into
    a box."""
    members = {"__doc__": kind.__doc__, "__post_init__": lambda self: None}
    return dataclass(frozen=True)(type(kind.__name__, (kind,), members))


_NAMES = {_unchecked(kind): name for name, (kind, _) in _COMMANDS.items()}
