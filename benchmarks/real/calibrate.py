"""Measure what TriAttention scores with, the queries of a model on a text, and write it to a file.

A few thousand tokens are enough, of whatever text. The file fits this model alone.

    python -m benchmarks.real.calibrate smollm2 --data books-train --out calibration.safetensors
"""

import hashlib

from benchmarks.parts import command_line, positive
from heedful_lab.commands.budget.rows import read_rows
from heedful_lab.commands.models import open_model, open_tokenizer
from heedful_lab.records.environment import environment
from heedful_lab.rivals.calibration import calibrate, write_calibration


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", help="MODEL, whose layers have a rotary embedding")
    parser.add_argument("--data", nargs="+", required=True, help="text files, or folders of them")
    parser.add_argument("--length", type=positive, default=1024, help="tokens per sequence")
    parser.add_argument("--rows", type=positive, default=8, help="sequences")
    options = parser.parse_args()
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
