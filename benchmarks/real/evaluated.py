"""Results of `heedful eval`: every task and measure, beside the first model.

    python -m benchmarks.real.evaluated runs/harness --out benchmarks/real/results/harness-cpu.jsonl

Several folders are one evaluation, as where models have caches that need different options.
"""

import json
from pathlib import Path

from benchmarks.parts import command_line, read_partial
from heedful.files import write_lines
from heedful_lab.commands.evaluate.numbers import EvaluationLine, Interval, summed_up
from heedful_lab.commands.evaluate.page import NAME as REPORT
from heedful_lab.commands.evaluate.store import ABOUT, SAMPLES
from heedful_lab.records import Sample


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="the --out of heedful eval")
    options = parser.parse_args()
    samples, where = [], {}
    for folder in options.folders:
        if not (folder / REPORT).is_file():  # the last thing that is written
            parser.error(f"{folder} is not the --out of a finished heedful eval: no {REPORT} in it")
        about = json.loads((folder / ABOUT).read_text())
        own = [Sample(**x) for x in read_partial(folder / SAMPLES)]
        for tasks in about["lm_eval"].values():
            own += [Sample.from_json(x) for entry in tasks.values() for x in entry["samples"]]
        if twice := {_identity(x) for x in samples} & {_identity(x) for x in own}:
            model, cache, task, key = min(twice)
            raise SystemExit(
                f"{folder} has the answer of {model} with cache {cache or 'whole'!r} to {task} "
                f"{key!r}, and so has a folder before it: leave one of the two out"
            )
        where |= {x.model: {"environment": about["environment"]} for x in own}
        samples += own
    write_lines(options.out, [line_of(x) | where[x.entry[0]] for x in summed_up(samples)])


def _identity(sample: Sample) -> tuple[str, str, str, str]:
    return sample.model, sample.cache, sample.task, sample.key


def line_of(line: EvaluationLine) -> dict:
    """A model with its cache in one measure of one task."""
    model, cache = line.entry
    return {
        "model": model,
        "cache": cache,
        "task": line.task,
        "measure": line.measure.name,
        "percent": line.measure.percent,
        "samples": line.samples,
        "value": finite(line.estimate),
        "difference": line.difference and finite(line.difference),
    }


def finite(interval: Interval) -> list[float | None]:
    """Value, low and high end; `None` where there is no interval."""
    return [x if x == x else None for x in interval]


if __name__ == "__main__":
    main()
