"""The command line; every command imports its folder when it is called."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
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

# The packages' own configurations are the commands, with a place to write to beside them.


class _Unchecked:
    def __post_init__(self) -> None:
        """Checked by `_as`: what a constructor raises, tyro would put into a box."""


@dataclass(frozen=True)
class CompareCommand(_Unchecked, Comparison):
    __doc__ = Comparison.__doc__

    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs/compare"
    """Folder for report.html, results.jsonl, config.json and the trained models."""


@dataclass(frozen=True)
class TrainCommand(_Unchecked, Training):
    __doc__ = Training.__doc__


@dataclass(frozen=True)
class ShrinkCommand(_Unchecked, Shrink):
    __doc__ = Shrink.__doc__


@dataclass(frozen=True)
class ConvertCommand(_Unchecked, FolderConversion):
    __doc__ = FolderConversion.__doc__


@dataclass(frozen=True)
class BenchCommand(_Unchecked, Bench):
    __doc__ = Bench.__doc__

    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the records here as JSON lines. A file that is there already is never replaced."""


@dataclass(frozen=True)
class GenerateCommand(_Unchecked, Generation):
    __doc__ = Generation.__doc__


@dataclass(frozen=True)
class BudgetCommand(_Unchecked, BudgetSearch):
    __doc__ = BudgetSearch.__doc__


@dataclass(frozen=True)
class EvalCommand(_Unchecked, Evaluation):
    __doc__ = Evaluation.__doc__


@dataclass(frozen=True)
class InspectCommand(_Unchecked, Inspection):
    __doc__ = Inspection.__doc__


@dataclass(frozen=True)
class Doctor:
    """Print versions, devices and optional parts, or which mechanisms fit a model."""

    model: tyro.conf.Positional[Annotated[str | None, tyro.conf.arg(metavar="[MODEL]")]] = None
    """Folder of a model, a name on the Hugging Face hub, or a configuration (FILE.json): which
    mechanisms fit, what they add, and what its cache takes per token. Nothing is changed."""


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


_Command = (
    Annotated[CompareCommand, tyro.conf.subcommand("compare")]
    | Annotated[TrainCommand, tyro.conf.subcommand("train")]
    | Annotated[ShrinkCommand, tyro.conf.subcommand("shrink")]
    | Annotated[ConvertCommand, tyro.conf.subcommand("convert")]
    | Annotated[GenerateCommand, tyro.conf.subcommand("generate")]
    | Annotated[BudgetCommand, tyro.conf.subcommand("budget")]
    | Annotated[EvalCommand, tyro.conf.subcommand("eval")]
    | Annotated[InspectCommand, tyro.conf.subcommand("inspect")]
    | Annotated[BenchCommand, tyro.conf.subcommand("bench")]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
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
    try:
        command = tyro.cli(
            _Command,
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
        problem = ": ".join(["stopped", *map(str, stop.args)])
        code = 128 + signal.SIGINT
    sys.stdout.flush()
    print(f"heedful: {problem}", file=sys.stderr)
    return code


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    """A warning as one line, without the place in the code that a user has no use for."""
    from tqdm import tqdm

    tqdm.write(f"warning: {message}", file=sys.stderr)


def _run(command: _Command) -> int:
    match command:
        case CompareCommand():
            return _compare(command)
        case TrainCommand():
            return _train(command)
        case ShrinkCommand():
            return _shrink(command)
        case ConvertCommand():
            return _convert(command)
        case GenerateCommand():
            return _generate(command)
        case BudgetCommand():
            return _budget(command)
        case EvalCommand():
            return _eval(command)
        case InspectCommand():
            return _inspect(command)
        case BenchCommand():
            return _bench(command)
        case Doctor():
            from heedful_lab.doctor import examine, examine_model

            return examine() if command.model is None else examine_model(command.model)


def _train(command: TrainCommand) -> int:
    options = _as(Training, command)
    from heedful.training.run import Stopped
    from heedful_lab.commands.train.run import formatted, train_text

    _path(options.out)
    _quiet()
    with _stopping() as signals:
        try:
            result = train_text(options, lambda: bool(signals))
        except (Stopped, KeyboardInterrupt):
            place = f"the state is kept in {options.out}"
            print(f"stopped: {place}; the same command goes on there", file=sys.stderr)
            return 128 + signals[-1]
    if result is not None:
        print(formatted(result))
        _say_device(options.device)
    return 0


def _shrink(command: ShrinkCommand) -> int:
    options = _as(Shrink, command)
    from tqdm import tqdm

    from heedful.training.run import Stopped
    from heedful_lab.commands.shrink.run import shrink

    _path(options.out)
    _quiet()
    with _stopping() as signals:
        try:
            result = shrink(
                options, lambda text: tqdm.write(text, file=sys.stderr), lambda: bool(signals)
            )
        except (Stopped, KeyboardInterrupt):
            place = f"the state is kept in {options.out}"
            print(f"stopped: {place}; the same command goes on there", file=sys.stderr)
            return 128 + signals[-1]
    print(result)
    _say_device(options.device)
    return 0


def _convert(command: ConvertCommand) -> int:
    options = _as(FolderConversion, command)
    from heedful_lab.commands.convert.run import convert_folder

    _quiet()
    print(convert_folder(options))
    return 0


def _generate(command: GenerateCommand) -> int:
    options = _as(Generation, command)
    from heedful_lab.commands.generate.run import generate

    _quiet()

    def write(text: str) -> None:
        print(text, end="", flush=True)

    for result in generate(options, write):
        print(flush=True)
        print(result, file=sys.stderr)
    _say_device(options.device)
    return 0


def _budget(command: BudgetCommand) -> int:
    options = _as(BudgetSearch, command)
    from heedful_lab.commands.budget.search import format_result, search

    _quiet()
    try:
        print(format_result(search(options)))
    except KeyboardInterrupt:
        way = "the trials so far are kept beside the model; the same command goes on there"
        raise KeyboardInterrupt(way) from None
    _say_device(options.device)
    return 0


def _eval(command: EvalCommand) -> int:
    options = _as(Evaluation, command)
    from tqdm import tqdm

    from heedful_lab.commands.evaluate.numbers import (
        RULE,
        evaluated_table,
        harness_table,
        summed_up,
    )
    from heedful_lab.commands.evaluate.page import write_evaluation
    from heedful_lab.commands.evaluate.run import evaluate, export

    _quiet()
    if options.export_lm_eval is not None:
        names, folder = export(options), options.export_lm_eval
        print(f"written: {folder}\n  lm_eval --include_path {folder} --tasks {','.join(names)} ...")
        return 0
    out = _path(options.out)
    try:
        result = evaluate(options, lambda text: tqdm.write(text, file=sys.stderr))
    except KeyboardInterrupt:
        way = f"the answers so far are kept in {out}; the same command goes on there"
        raise KeyboardInterrupt(way) from None
    lines = summed_up(result.samples, options.seed)
    tables = [evaluated_table(lines) if lines else "", harness_table(result.harness)]
    print("\n\n".join(filter(None, tables)))
    if lines:
        print(f"\n{RULE}")
    print(f"\nreport: {write_evaluation(out, result.samples, result.harness, result.about)}")
    return 0


def _inspect(command: InspectCommand) -> int:
    options = _as(Inspection, command)
    from heedful_lab.commands.inspect.arrays import page_data
    from heedful_lab.commands.inspect.page import write_inspection
    from heedful_lab.commands.inspect.run import inside

    _quiet()
    path = write_inspection(options.out, page_data(*inside(options)))
    print(f"page: {path} ({path.stat().st_size / 2**20:,.1f} MiB)")
    _say_device(options.device)
    return 0


def _say_device(device: str) -> None:
    """Print the device of the work, beside its output."""
    from heedful_lab.commands.models import device_in_words

    print(f"device: {device_in_words(device)}", file=sys.stderr)


def _quiet() -> None:
    """Keep transformers' bars and notes out of what a command prints."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _bench(command: BenchCommand) -> int:
    from heedful_lab.commands.bench import measure as bench

    out = None if command.out is None else _path(command.out)
    if out is not None:
        bench.check_new(out)  # before minutes of measuring
    config = _as(Bench, command)
    cases, left_out = bench.cases_here(config)
    for reason in dict.fromkeys(left_out.values()):
        names = [" ".join(case) for case, why in left_out.items() if why == reason]
        print(f"left out: {', '.join(names)}: {reason}", file=sys.stderr)
    count, way = len(cases) * len(config.lengths), "--mechanisms, --impls, --passes or --lengths"
    print(f"{count} cases of a few seconds each; {way} choose others", file=sys.stderr)
    records = bench.bench(config)
    print(bench.format_table(records))
    _say_device("auto")
    if out is not None:
        bench.write(records, out)
    return 0


def _as(kind: type, command: object) -> object:
    """The configuration in a command."""
    return kind(**{field.name: getattr(command, field.name) for field in fields(kind)})


def _path(text: str) -> Path:
    if not text:
        raise UserError("out must be a path, got an empty text; write . for this folder")
    return Path(text)


def _compare(command: CompareCommand) -> int:
    from transformers.utils import logging

    from heedful.training.run import Stopped
    from heedful_lab.commands.compare.findings import overview
    from heedful_lab.commands.compare.page import write_report
    from heedful_lab.commands.compare.run import compare, kept

    logging.disable_progress_bar()  # of saving and loading; the runs have their own

    out, comparison = _path(command.out), _as(Comparison, command)
    with _stopping() as signals:
        try:
            records = compare(comparison, out, lambda: bool(signals), write_report)
        except (Stopped, KeyboardInterrupt):
            print(f"stopped: {kept(out)}; the same command goes on there", file=sys.stderr)
            return 128 + signals[-1]
    print(overview(records))
    print(f"\nreport: {out / 'report.html'}")
    _say_device(comparison.device)
    return 0


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """The signals to stop that have come: work ends after its step, at the second one at once."""
    signals: list[int] = []

    def stop(signum: int, frame: object) -> None:
        signals.append(signum)
        if len(signals) > 1:
            raise KeyboardInterrupt  # a second signal does not wait for the step to end
        with suppress(OSError):  # not print, which a signal may have interrupted
            os.write(2, b"\nstopping after this step; press Ctrl-C again to stop at once\n")

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
