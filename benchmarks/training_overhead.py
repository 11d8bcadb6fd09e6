"""What `heedful train` costs beside a plain Trainer loop on the stock model, and each mechanism.

The same rows, model, optimiser and dtype in fresh processes, one after the other in turn; medians
of the steps' times on one thread, as the processor counts them, so that other work on the machine
does not. The plain loop is transformers' Trainer with nothing of heedful but the rows.

    python benchmarks/training_overhead.py --rounds 3 --out runs/training-overhead.jsonl
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from command_line import command, count
from training import MECHANISMS as COMPARED
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from heedful.experiments.token_rows import TrainingRows, encode
from heedful.experiments.train_text import train_text
from heedful.experiments.trained_models import model_and_tokenizer
from heedful.experiments.training import Training
from heedful.records.environment import environment
from heedful.records.files import append_line

MECHANISMS = COMPARED | {"grouped": ("grouped",)}
CONFIG = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 4, "num_attention_heads": 4,
}  # fmt: skip
STEPS, SKIPPED, BATCH, LENGTH = 12, 4, 4, 512


class Clock(TrainerCallback):
    """The processor's time of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__) -> None:
        self.since = time.process_time()

    def on_step_end(self, *_, **__) -> None:
        self.seconds.append(time.process_time() - self.since)


def one(kind: str) -> None:
    """Print the step times of one run."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        mechanism = () if kind in ("plain", "standard") else MECHANISMS[kind]
        asked = Training(
            str(config), out=f"{folder}/run", mechanism=mechanism, steps=STEPS, batch=BATCH,
            length=LENGTH, evaluations=1, held_out=(__file__,), device="cpu", dtype="float32",
            data=(str(Path(json.__file__).parent),),
        )  # fmt: skip
        clock = Clock()
        if kind == "plain":
            _plain(asked, Path(folder), clock)
        else:
            start = Trainer.__init__

            def timed(self, *args, callbacks=(), **kwargs):
                start(self, *args, callbacks=[*callbacks, clock], **kwargs)

            Trainer.__init__ = timed
            train_text(asked, show=False)
    print(json.dumps(clock.seconds[SKIPPED:]))


def _plain(asked: Training, folder: Path, clock: Clock) -> None:
    converted, tokenizer = model_and_tokenizer(asked, LENGTH, folder / "tokenizer")
    text = encode(asked.data, asked.held_out, tokenizer, folder / "text", length=LENGTH,
                  most_tokens=STEPS * BATCH * LENGTH)  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(converted.config, attn_implementation="sdpa")
    arguments = TrainingArguments(
        str(folder / "plain"), max_steps=STEPS, per_device_train_batch_size=BATCH,
        report_to="none", save_strategy="no", logging_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    rows = TrainingRows(text.train, LENGTH, STEPS * BATCH, 0)
    Trainer(model, arguments, train_dataset=rows, callbacks=[clock]).train()


@command
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        one(args.one)
        return
    seconds: dict[str, list[float]] = {kind: [] for kind in ("plain", *MECHANISMS)}
    ratios: dict[str, list[float]] = {kind: [] for kind in MECHANISMS}
    for _ in range(args.rounds):
        medians = {}
        for kind in seconds:
            done = subprocess.run(
                [sys.executable, __file__, "--one", kind], capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            medians[kind] = statistics.median(json.loads(done.stdout.splitlines()[-1]))
            seconds[kind].append(medians[kind])
        for kind in MECHANISMS:
            ratios[kind].append(medians[kind] / medians["plain"])
        print({kind: round(x[-1], 3) for kind, x in ratios.items()}, flush=True)
    for kind in seconds:
        line = {
            "kind": kind, "config": CONFIG, "batch": BATCH, "length": LENGTH,
            "step_seconds": statistics.median(seconds[kind]),
            "tokens_per_second": BATCH * LENGTH / statistics.median(seconds[kind]),
            "times_plain": statistics.median(ratios[kind]) if kind in ratios else 1.0,
            "rounds": args.rounds, "environment": environment(),
        }  # fmt: skip
        if args.out:
            append_line(args.out, json.dumps(line))
        print(kind, round(line["tokens_per_second"]), round(line["times_plain"], 3))


if __name__ == "__main__":
    main()
