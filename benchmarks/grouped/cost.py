"""Cost of grouped attention beside SDPA: seconds, memory, score pairs, bytes of a cache.

One attention operator, forward and backward, its summaries made from learned weights; torch's own
scaled_dot_product_attention beside it. Both take turns in one process; the peak of memory is that
of a fresh one each.

    python -m benchmarks.grouped.cost --out benchmarks/grouped/results/grouped-cost-cpu.jsonl
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.parts import ROOT, command_line
from heedful.files import write_lines
from heedful.ops.grouped import fixed_groups, grouped_attention, summarise
from heedful.ops.grouped.neighbourhood import score_pairs
from heedful.testing import peak_memory_mib
from heedful_lab.records.environment import environment

HEADS, DIM, SIZE, WINDOW = 8, 64, 16, 128


def main() -> None:
    parser = command_line(__doc__, new=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    records = [record for tokens in args.tokens for record in measure(tokens, args.rounds)]
    about = environment()
    write_lines(args.out, [record | {"environment": about} for record in records])


def ways(tokens: int) -> dict[str, Callable[[torch.Tensor, ...], torch.Tensor]]:
    """From q, k, v and the members' logits to the output."""

    def sdpa(q, k, v, logits):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def tokens_ask(q, k, v, logits, asking=None):
        groups = fixed_groups(SIZE, tokens)
        sums = summarise(k, v, groups, logits=logits, q=asking)
        return grouped_attention(q, k, v, groups=groups, summaries=sums, window=WINDOW)

    def groups_ask(q, k, v, logits):
        return tokens_ask(q, k, v, logits, asking=q)

    return {"sdpa": sdpa, "grouped": tokens_ask, "grouped, groups ask": groups_ask}


def measure(tokens: int, rounds: int) -> list[dict]:
    """Every way at one length; prints as it goes."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, HEADS, tokens, DIM) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    logits = torch.randn(1, HEADS, tokens, requires_grad=True)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways(tokens)}
    rounds = rounds if tokens < 16384 else max(1, rounds // 3)
    for _ in range(rounds + 1):
        for name, function in ways(tokens).items():
            start = time.perf_counter()
            out = function(*leaves, logits)
            middle = time.perf_counter()
            out.backward(grad)
            end = time.perf_counter()
            seconds[name].append((middle - start, end - start))
            for x in (*leaves, logits):
                x.grad = None
    groups, per_token = fixed_groups(SIZE, tokens), 2 * HEADS * DIM * 4
    pairs = {
        "sdpa": tokens * (tokens + 1) // 2,
        "grouped": int(score_pairs(groups, window=WINDOW)),
        "grouped, groups ask": int(score_pairs(groups, window=WINDOW, asking=True)),
    }
    records, first = [], None
    for name, measured in seconds.items():
        forward, both = (statistics.median(x[i] for x in measured[1:]) for i in (0, 1))
        first = first or (forward, both)
        near = min(tokens, WINDOW + SIZE)
        cached = tokens if name == "sdpa" else tokens // SIZE + near
        peak = peak_memory_mib(program(name, tokens))
        print(
            f"{tokens:6} {name:20} forward {forward:8.3f} s {first[0] / forward:5.2f}x  with "
            f"backward {both:8.3f} s {first[1] / both:5.2f}x  {pairs[name] / tokens:8.0f} pairs "
            f"per query {peak:8.0f} MiB",
            flush=True,
        )
        records.append({
            "tokens": tokens, "way": name, "forward_s": forward, "backward_s": both,
            "forward_gain": first[0] / forward, "backward_gain": first[1] / both,
            "pairs": pairs[name], "peak_mib": peak, "cache_tokens": cached,
            "cache_bytes": cached * per_token, "rounds": rounds, "heads": HEADS, "dim": DIM,
            "size": SIZE, "window": WINDOW, "threads": torch.get_num_threads(),
        })  # fmt: skip
    return records


def program(name: str, tokens: int) -> str:
    """One forward and backward pass, for a process of its own."""
    return f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from benchmarks.grouped.cost import DIM, HEADS, ways
torch.manual_seed(0)
def step(tokens):
    leaves = [torch.randn(1, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]
    logits = torch.randn(1, HEADS, tokens, requires_grad=True)
    ways(tokens)[{name!r}](*leaves, logits).sum().backward()
step(256)
def run():
    step({tokens})
"""


if __name__ == "__main__":
    main()
