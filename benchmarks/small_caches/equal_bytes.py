"""Score trained models at equal peak bytes: each policy has as many tokens as fit into them.

The measure is what the first model's full cache takes at its peak for one sequence, and `--shares`
of it are what every model's cache may take at its own peak. Which policy a model is scored with
follows from what it has: selective attention evicts what is most masked, retention gates the lowest
gate (also with half of the tokens the newest), forgetting
attention the oldest, a hybrid nothing but what its windows leave and the oldest tokens, and
standard attention has the policies without training.

    python -m benchmarks.small_caches.equal_bytes standard=runs/recall-standard \
        selective=runs/recall-selective --task recall --out runs/equal-bytes.jsonl

What is in the file already is not scored again; a file of other sequences, or with another measure,
is refused.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.parts import add_task_options, check_same, read_partial, task_of
from heedful.eviction import TOVA, Eviction, MostHidden, Random, StreamingLLM
from heedful.files import append_line
from heedful.hf.cache.new import attention_modules
from heedful.hf.cache.rows_under_budget import evicting
from heedful_lab.commands.compare.options import LEAST_TOKENS
from heedful_lab.commands.compare.scoring import score_rows
from heedful_lab.commands.compare.small_caches import bf16_bytes
from heedful_lab.records.environment import environment
from heedful_lab.rivals.calibration import calibrate
from heedful_lab.rivals.models import load
from heedful_lab.rivals.retention import LowestGate
from heedful_lab.rivals.triattention import TriAttention
from heedful_lab.tasks import Task

SINKS, PROTECTED = LowestGate.sinks, LowestGate.recent  # first and newest tokens that all keep
CALIBRATED_ON = 2**20 + 1  # a training step that no run comes to: sequences for TriAttention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="NAME=FOLDER of trained models")
    add_task_options(parser, "recall")
    parser.add_argument("--shares", type=float, nargs="+", default=[1, 0.5, 0.25, 0.125])
    parser.add_argument("--rows", type=int, default=128, help="evaluation sequences")
    parser.add_argument("--batch", type=int, default=32, help="sequences that are scored at once")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if not all(0 < share <= 1 for share in args.shares):
        parser.error(f"--shares must be above 0 and at most 1, got {args.shares}")
    if args.rows < 1 or args.batch < 1:
        parser.error(f"--rows and --batch must be at least 1, got {args.rows} and {args.batch}")
    names = [word.partition("=")[0] for word in args.models]
    if not all("=" in word for word in args.models) or len({*names}) < len(names):
        parser.error(f"models must be NAME=FOLDER, each name once, got {' '.join(args.models)}")
    task = task_of(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    about = {"task": args.task, "length": task.length, "rows": args.rows}
    for name, word in zip(names, args.models, strict=True):
        try:
            model = load(word.partition("=")[2], budgets=False, convert=True).eval()
        except ValueError as error:
            raise SystemExit(f"{word}: {error}") from None
        if "measure" not in about:
            about["measure"] = peak_bytes(model, StreamingLLM(tokens=task.length), task)
            check_same(args.out, about)
        measure = about["measure"]
        for policy, share, make in tqdm(list(settings(model, task, args)), desc=name):
            done = {(x["model"], x["policy"], x["share"]) for x in read_partial(args.out)}
            if (name, policy, share) in done:
                continue
            eviction = make(0) if share is None else fitting(model, make, share * measure, task)
            if eviction is None:
                continue  # not even the least cache fits
            line = about | {"model": name, "policy": policy, "share": share}
            line |= scored(model, eviction, task, args)
            line["bf16_bytes"] = bf16_bytes(model, task.length)
            append_line(args.out, json.dumps(line | {"environment": environment()}))


def settings(
    model: PreTrainedModel, task: Task, args: argparse.Namespace
) -> Iterator[tuple[str, float | None, Callable[[int], Eviction]]]:
    """Policies with shares of bytes, and how each is made of a number of tokens."""
    layers = [module.heedful for module in attention_modules(model)]
    policies: dict[str, Callable[[int], Eviction]] = {}
    if all(layer.running == "F" for layer in layers):
        policies["MostHidden"] = MostHidden
    elif all(layer.running == "gate" for layer in layers):
        policies["LowestGate"] = LowestGate
        policies["LowestGate, half recent"] = lambda n: LowestGate(n, recent=max(PROTECTED, n // 2))
    elif any(layer.window is not None for layer in layers):
        policies["StreamingLLM"] = StreamingLLM
    else:
        rows = task.batch(args.batch, 1, CALIBRATED_ON).input_ids
        calibration = calibrate(model, [rows])
        policies |= {x.__name__: x for x in (StreamingLLM, TOVA, Random)}
        policies["TriAttention"] = lambda n: TriAttention(n, calibration=calibration)
    for policy, make in policies.items():
        for share in args.shares:
            yield policy, share, make


def fitting(
    model: PreTrainedModel, make: Callable[[int], Eviction], nbytes: float, task: Task
) -> Eviction | None:
    """The policy with about the most tokens whose peak is at most so many bytes."""
    tried = {}

    def peak(tokens: int) -> float:
        if tokens not in tried:
            tried[tokens] = peak_bytes(model, make(tokens), task)
        return tried[tokens]

    least, most = LEAST_TOKENS, task.length
    if peak(least) > nbytes:
        return None
    if peak(most) <= nbytes:
        return make(most)
    while most - least > 1:  # `least` fits and `most` does not; bytes are nearly a line in tokens
        part = (nbytes - peak(least)) / (peak(most) - peak(least))
        middle = min(max(least + int(part * (most - least)), least + 1), most - 1)
        if peak(middle) <= nbytes:
            least = middle
        else:
            most = middle
        if peak(least) > 0.98 * nbytes:
            break
    return make(least)


def peak_bytes(model: PreTrainedModel, eviction: Eviction, task: Task) -> float:
    """Bytes of the caches at their peak for a sequence, by the first of the evaluation set."""
    with evicting(model, eviction) as peaks:
        model(input_ids=task.held_out(1).input_ids, use_cache=False)
    return peaks.nbytes


def scored(
    model: PreTrainedModel, eviction: Eviction, task: Task, args: argparse.Namespace
) -> dict:
    """Scores by split, the judged one first, and the peak of a sequence."""
    final = {}
    with torch.no_grad(), evicting(model, eviction) as peaks:
        for split, other in task.under_budgets().items():
            rows = other.held_out(args.rows)
            final[split] = score_rows(model, other, rows, args.batch)[task.metric]
    return {
        "tokens": eviction.tokens,
        "metric": task.metric,
        "final": final,
        "peak_bytes": peaks.nbytes,
    }


if __name__ == "__main__":
    main()
