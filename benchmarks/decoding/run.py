"""Time per decoded token and bytes of the cache, at several context lengths.

A small Llama of random weights decodes one token after another: unconverted with transformers' own
cache, converted to every mechanism, and selective attention under budgets. All stand beside each
other in one process and take turns, so their ratios say more than their times.

    python -m benchmarks.decoding.run --out benchmarks/decoding/results/decoding-cpu.jsonl
"""

import argparse
import copy
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import heedful
from benchmarks.parts import command_line
from heedful.eviction import MostHidden, StreamingLLM
from heedful.files import write_lines
from heedful.hf.versions import cache_argument
from heedful_lab.records.environment import environment
from heedful_lab.rivals.models import convert

MECHANISMS = ("standard", "talking-heads", "differential", "selective", "mta", "grouped")
BUDGETS = (0.25, 0.1)
CHUNK = 64  # tokens of a prompt at a time, where a budget holds


def main() -> None:
    parser = command_line(__doc__, new=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--mechanisms", nargs="+", default=MECHANISMS)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=8, help="decoded per round")
    args = parser.parse_args()
    records = [record for context in args.contexts for record in measure(args, context)]
    about = environment()
    write_lines(args.out, [record | {"environment": about} for record in records])


@torch.no_grad()
def measure(args: argparse.Namespace, context: int) -> list[dict]:
    """Every way at one length; prints as it goes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=args.hidden, intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads,
        num_key_value_heads=args.heads, max_position_embeddings=2 * context,
    )  # fmt: skip
    stock = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 256, (1, context))
    ways = {"unconverted, its own cache": (stock, DynamicCache(config=config), context)}
    for name in args.mechanisms:
        model = copy.deepcopy(stock)
        convert(model, name)
        ways[name] = (model, heedful.new_cache(model), context)
        for share in BUDGETS if name in ("standard", "selective") else ():
            tokens = int(share * context)
            policy = MostHidden if name == "selective" else StreamingLLM
            cache = heedful.new_cache(model, policy(tokens=tokens))
            ways[f"{name}, {policy.__name__} {share:.0%}"] = (model, cache, CHUNK)
    for model, cache, chunk in ways.values():
        for piece in ids.split(chunk, dim=1):
            model(input_ids=piece, logits_to_keep=1, **cache_argument(model, cache))
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):
        for name, (model, cache, _) in ways.items():
            start = time.perf_counter()
            for token in torch.randint(0, 256, (args.tokens, 1, 1)):
                model(input_ids=token, **cache_argument(model, cache))
            times[name].append((time.perf_counter() - start) / args.tokens * 1e3)
    records, first = [], None
    for name, (_, cache, _) in ways.items():
        ms = statistics.median(times[name][1:])  # the first round makes room
        nbytes, peak = bytes_of(cache)
        first = first or (ms, nbytes, peak)
        print(
            f"{context:6} {name:32} {ms:8.2f} ms/token {ms / first[0]:5.2f}x {nbytes / 2**20:7.2f} "
            f"MiB {nbytes / first[1]:5.2f}x peak {peak / 2**20:7.2f} MiB {peak / first[2]:5.2f}x",
            flush=True,
        )
        records.append({
            "context": context, "way": name, "ms_per_token": ms, "ratio": ms / first[0],
            "bytes": nbytes, "peak_bytes": peak, "hidden": args.hidden, "layers": args.layers,
            "heads": args.heads, "rounds": args.rounds, "threads": torch.get_num_threads(),
        })  # fmt: skip
    return records


def bytes_of(cache) -> tuple[int, int]:
    """Bytes of a cache, and its peak; of transformers' own, its bytes twice (its copies aside)."""
    if isinstance(cache, heedful.KVCache):
        return cache.nbytes, cache.peak_nbytes
    storages = [
        x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values)
    ]
    return sum(storages), sum(storages)


if __name__ == "__main__":
    main()
