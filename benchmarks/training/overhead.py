"""Cost of `heedful train` and each mechanism beside a plain Trainer loop on the base model.

The same sequences, model, optimiser and dtype in fresh processes, one after the other in turn;
medians of the steps' times on one thread, as the processor counts them, so that other work on the
machine does not. The plain loop is transformers' Trainer with nothing of heedful but the sequences.

    python -m benchmarks.training.overhead --rounds 3 --out runs/training-overhead.jsonl
    python -m benchmarks.training.overhead --pairs 150 --out runs/trainer-overhead.jsonl

What the command alone costs is less than such rounds differ by, and on a machine with other work so
is what some mechanisms cost. `--pairs` is for both: two loops stand in one process and take a step
in turn, so that each step has two of the other around it. The one that begins second has an
advantage, as plain loops beside plain loops show; so each does once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from threading import Semaphore, Thread

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.parts import ROOT
from benchmarks.training.run import MECHANISMS as COMPARED
from heedful.files import append_line
from heedful.training.sequences import TrainingSequences, encode
from heedful_lab.commands.train.options import Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.commands.train.start import starting_point
from heedful_lab.records.environment import environment

MECHANISMS = COMPARED | {
    name: (name,)
    for name in (
        "grouped", "exclusive", "forgetting", "gated", "parallax", "dex", "simplicial",
        "mta-flash", "mta-selective",
    )
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
NARROWER = {"differential-v2, narrower": {"intermediate_size": 602}}  # as in training.py
STEPS, SKIPPED, BATCH, LENGTH = 12, 4, 4, 512


class Clock(TrainerCallback):
    """The processor's time of each step; two of them with each other's turns take steps in turn.

    It is also what `train_text` asks after each step whether to stop.
    """

    def __init__(self, turn: Semaphore | None = None, others: Semaphore | None = None) -> None:
        self.seconds: list[float] = []
        self.turn, self.others, self.since = turn, others, None

    def __call__(self) -> bool:
        """A step has ended and the next begins, with its sequences and its report."""
        now = time.thread_time()
        if self.since is not None:
            self.seconds.append(now - self.since)
        if self.others:
            self.others.release()
            self.turn.acquire()
        self.since = time.thread_time()
        return False

    def on_step_end(self, *_, **__) -> None:
        self()


def run_of(kind: str, steps: int, folder: Path, clock: Clock) -> None:
    """Train a small model, as the command does or as the plain loop."""
    torch.set_num_threads(1)
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG | NARROWER.get(kind, {})))
    mechanism = () if kind in ("plain", "standard") else MECHANISMS[kind]
    options = Training(
        str(config), out=f"{folder}/run", mechanism=mechanism, steps=steps, batch=BATCH,
        length=LENGTH, evaluations=1, held_out=(__file__,), device="cpu", dtype="float32",
        data=(str(Path(json.__file__).parent),),
    )  # fmt: skip
    if kind == "plain":
        _plain(options, folder, clock)
    else:
        train_text(options, clock, show=False)


def _plain(options: Training, folder: Path, clock: Clock) -> None:
    start = starting_point(options.origin(), options.filled(), folder / "tokenizer")
    text = encode(options.data, options.held_out, start.tokenizer, folder / "text", length=LENGTH,
                  most_tokens=options.steps * BATCH * LENGTH)  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(start.model.config, attn_implementation="sdpa")
    arguments = TrainingArguments(
        str(folder / "plain"), max_steps=options.steps, per_device_train_batch_size=BATCH,
        report_to="none", save_strategy="no", logging_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    rows = TrainingSequences(text.train, LENGTH, options.steps * BATCH, 0)
    Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()


def in_turn(kinds: tuple[str, str], steps: int, folder: Path) -> list[float]:
    """Two loops that take a step in turn: a step's time over the mean of the other's around it.

    The ratios are of the second kind's steps to the first kind's.
    """
    turns = Semaphore(0), Semaphore(0)
    clocks = Clock(turns[0], turns[1]), Clock(turns[1], turns[0])

    def go(place: int) -> None:
        turns[place].acquire()
        try:
            run_of(kinds[place], steps, folder / str(place), clocks[place])
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other loop waits for a turn that never comes
        turns[1 - place].release()

    loops = [Thread(target=go, args=(place,)) for place in (0, 1)]
    for loop in loops:
        loop.start()
    turns[0].release()
    for loop in loops:
        loop.join()
    first, second = (clock.seconds[SKIPPED:] for clock in clocks)
    return [2 * y / (x + z) for x, y, z in zip(first, second, first[1:], strict=False)]


def pairs(steps: int, kinds: Sequence[str], out: Path | None) -> None:
    """Measure the cost of each kind beside the plain loop, step by step."""
    for kind in kinds:
        beside = separate("--in-turn", "plain", kind, "--pairs", str(steps))
        turned = separate("--in-turn", kind, "plain", "--pairs", str(steps))
        line = {
            "kind": kind, "config": CONFIG, "batch": BATCH, "length": LENGTH, "pairs": steps,
            "times_plain": beside, "plain_times": turned, "environment": environment(),
        }  # fmt: skip
        if out:
            append_line(out, json.dumps(line))
        print(kind, statistics.median(beside), 1 / statistics.median(turned), flush=True)


def separate(*options: str) -> list[float]:
    """Run this script with these options in a process of its own, and return what it prints."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.training.overhead", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    return json.loads(process.stdout.splitlines()[-1])


def rounds(number: int, kinds: Sequence[str], out: Path | None) -> None:
    """The plain loop and every kind in a process of its own, one after the other."""
    seconds: dict[str, list[float]] = {kind: [] for kind in ("plain", *kinds)}
    ratios: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(number):
        medians = {}
        for kind in seconds:
            medians[kind] = statistics.median(separate("--one", kind))
            seconds[kind].append(medians[kind])
        for kind in kinds:
            ratios[kind].append(medians[kind] / medians["plain"])
        print({kind: round(x[-1], 3) for kind, x in ratios.items()}, flush=True)
    for kind in seconds:
        line = {
            "kind": kind, "config": CONFIG | NARROWER.get(kind, {}),
            "batch": BATCH, "length": LENGTH,
            "step_seconds": statistics.median(seconds[kind]),
            "tokens_per_second": BATCH * LENGTH / statistics.median(seconds[kind]),
            "times_plain": statistics.median(ratios[kind]) if kind in ratios else 1.0,
            "rounds": number, "environment": environment(),
        }  # fmt: skip
        if out:
            append_line(out, json.dumps(line))
        print(kind, round(line["tokens_per_second"]), round(line["times_plain"], 3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=MECHANISMS, help="these alone")
    parser.add_argument("--pairs", type=int, help="steps in turn; by default of the command alone")
    parser.add_argument("--one", dest="kind", help=argparse.SUPPRESS)
    parser.add_argument("--in-turn", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.pairs is not None and args.pairs < SKIPPED + 3:
        parser.error(f"--pairs must be at least {SKIPPED + 3}, as {SKIPPED} steps warm up")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if args.kind:
            clock = Clock()
            run_of(args.kind, STEPS, Path(folder) / "run", clock)
            print(json.dumps(clock.seconds[SKIPPED:]))
        elif args.in_turn:
            print(json.dumps(in_turn(tuple(args.in_turn), args.pairs, Path(folder))))
        elif args.pairs:
            pairs(args.pairs, args.only or ("standard", "plain"), args.out)
        else:
            rounds(args.rounds, args.only or [*MECHANISMS], args.out)


if __name__ == "__main__":
    main()
