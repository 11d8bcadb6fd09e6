"""Measure what TriAttention scores with, the queries of a model on a text, and write it to a file.

A few thousand tokens are enough, of whatever text. The file fits this model alone.

    python -m benchmarks.real.calibrate smollm2 --data books-train --out calibration.safetensors
"""

import argparse
import hashlib
from pathlib import Path

from heedful_lab.commands.budget.rows import read_rows
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.records.environment import environment
from heedful_lab.rivals.calibration import calibrate, write_calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="MODEL, whose layers have a rotary embedding")
    parser.add_argument("--data", nargs="+", required=True, help="text files, or folders of them")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--rows", type=int, default=8, help="sequences")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    for name in ("length", "rows"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    model = open_model(options.model, budgets=False)
    tokenizer = open_tokenizer(None, options.model, model)
    ids = read_rows(tuple(options.data), tokenizer, options.length, options.rows).ids
    about = {
        "name": options.model,
        "data": options.data,
        "tokens": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
        "length": options.length,
        "rows": options.rows,
        "environment": environment(),
    }
    write_calibration(options.out, calibrate(model, ids.split(1)), about)


if __name__ == "__main__":
    main()
