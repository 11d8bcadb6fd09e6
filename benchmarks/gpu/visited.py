"""Number of tiles that selective attention computes for the benchmarks' random inputs.

Its kernels leave out tiles in which no key can have a weight above zero. The rule is computed here
on a CPU, for one sequence of 16 heads of 128 normal numbers and tiles as in the forward pass.

    python -m benchmarks.gpu.visited --out benchmarks/gpu/results/visited.jsonl
"""

import json

import torch

from benchmarks.parts import command_line
from heedful.files import append_line
from heedful.ops.common.tiles import row_blocks
from heedful.ops.selective.fused.flash import weight_limit, weightless
from heedful_lab.records.environment import environment

HEADS, DIM, ROWS, COLUMNS = 16, 128, 64, 32


def share(tokens: int) -> float:
    """Of the tiles that causal order leaves, those with some weight."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, HEADS, tokens, DIM)
    scale, f = DIM**-0.5, torch.zeros(tokens)
    key, bases = torch.arange(tokens), []
    for start, stop in row_blocks(tokens, ROWS, ascending=True):
        bases.append(f)
        s = (q[0, 0, start:stop] @ k[0, 0].T * scale).relu()
        s = s.masked_fill(key >= torch.arange(start, stop)[:, None], 0.0)
        s[:, 0] = 0.0  # nobody hides the first token
        f = f + s.sum(0)
    hidden = weightless(
        weight_limit(q, k, None, 1, scale), torch.stack(bases)[None, None], ROWS, COLUMNS
    )[0, 0]
    first = torch.arange(hidden.shape[0])[:, None] * ROWS + ROWS - 1
    causal = torch.arange(hidden.shape[1]) * COLUMNS <= first
    return (~hidden & causal).sum().item() / causal.sum().item()


def main() -> None:
    parser = command_line(__doc__, new=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 16384])
    options = parser.parse_args()
    wrong = [n for n in options.lengths if n < ROWS or n % ROWS]
    if wrong:
        parser.error(f"--lengths must be multiples of {ROWS}, got {wrong[0]}")
    for tokens in options.lengths:
        line = {"tokens": tokens, "share": share(tokens), "environment": environment()}
        append_line(options.out, json.dumps(line))


if __name__ == "__main__":
    main()
