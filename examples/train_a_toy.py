"""Train a small model with selective attention on running parity, and test it on longer rows."""

import tempfile
from pathlib import Path

from heedful import Selective
from heedful_lab.commands.compare.one_model import Hyperparameters, Size, train
from heedful_lab.tasks import Parity

task = Parity(bits=8)
print("a row:", task.decode(task.sample(1, seed=0).input_ids[0]))

with tempfile.TemporaryDirectory() as folder:
    run = train(
        task,
        Selective(),
        Size(hidden=64, layers=2, heads=2),
        Hyperparameters(steps=80, batch=32, warmup=20, held_out=64),
        seed=0,
        folder=Path(folder) / "run",  # called again after an interruption, it goes on from here
        device="cpu",
        progress=lambda step, error: error is not None and print(f"step {step:>3}: error {error}"),
    )
print(f"{run.parameters:,} parameters, {run.tokens_per_second:,.0f} tokens a second")
for split, error in run.final.items():
    print(f"{run.metric} on {split}: {100 * error:.1f} %")
