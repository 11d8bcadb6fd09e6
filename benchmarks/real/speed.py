"""Time of a prompt and of a decoded token, with the full cache and with small ones.

Every way stands in one process and they take turns, so their ratios say more than their times. A
prompt is of arbitrary tokens; where tokens are evicted it comes in chunks, as in the study.

    python -m benchmarks.real.speed smollm2 adapters/smollm2-135m-evict --out runs/speed.jsonl

With `--settings` the ways are those named, each MODEL=POLICY,TOKENS, with `,int8`, `,slack=N` and
`,static` (a static cache, whose steps are compiled) behind it or without, beside the base as it
comes. Adapters that rank stand beside the base's own attention. A budget with slack is less by half
of it, so that as many tokens are cached on average.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from benchmarks.parts import command_line, positive
from benchmarks.real.run import eviction_of
from heedful import stock_model
from heedful.files import write_lines
from heedful.hf.cache.new import KVCache, new_cache
from heedful.hf.versions import cache_argument
from heedful_lab.commands.models import open_model
from heedful_lab.commands.policies import cache_dtype_of
from heedful_lab.records.environment import environment


class Way(NamedTuple):
    """A model with a kind of cache; `chunk` tokens of a prompt come at a time."""

    model: str
    policy: str
    tokens: int
    cache_dtype: str
    slack: int
    chunk: int
    network: PreTrainedModel
    cache: Callable[[], Cache]
    compiled: bool = False  # a decoded token, by torch.compile


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("base", help="MODEL")
    parser.add_argument("adapter", help="an adapter's folder with budgets.json")
    parser.add_argument(
        "--settings", nargs="+", metavar="MODEL=POLICY,TOKENS[,int8][,slack=N][,static]"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--share", type=positive, default=8, help="one token in so many is cached")
    parser.add_argument("--chunk", type=positive, default=32)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--decoded", type=positive, default=16, help="tokens per round")
    options = parser.parse_args()
    lines = []
    for length in options.lengths:
        chosen = ways if options.settings is None else named_ways
        lines += measure(chosen(options, length), length, options)
    about = environment()
    write_lines(options.out, [line | {"environment": about} for line in lines])


def ways(options: argparse.Namespace, length: int) -> list[Way]:
    """The base with its own cache and heedful's, and what loses least at so many tokens."""
    stock = stock_model(options.base).eval()
    base, adapter = (
        open_model(x, budgets=False, convert=False) for x in (options.base, options.adapter)
    )
    tokens = length // options.share
    tova = eviction_of("tova", base, options.base, tokens)
    base_name, name, chunk = options.base, options.adapter, options.chunk
    by_layer = eviction_of("by-layer", adapter, name, tokens)

    def small(cache_dtype: str) -> Way:
        dtype = cache_dtype_of(cache_dtype)
        return Way(
            name, "by-layer", tokens, cache_dtype, 0, chunk, adapter,
            lambda: new_cache(adapter, by_layer, dtype=dtype),
        )  # fmt: skip

    own = Way(
        base_name, "own", length, "auto", 0, length, stock,
        lambda: DynamicCache(config=stock.config),
    )  # fmt: skip
    return [
        own,
        Way(base_name, "whole", length, "auto", 0, length, base, lambda: new_cache(base, False)),
        Way(base_name, "whole", length, "auto", 0, chunk, base, lambda: new_cache(base, False)),
        Way(base_name, "tova", tokens, "auto", 0, chunk, base, lambda: new_cache(base, tova)),
        *map(small, ("auto", "int8")),
    ]


def named_ways(options: argparse.Namespace, length: int) -> list[Way]:
    """The base as it comes, then what `--settings` names."""
    stock = stock_model(options.base).eval()
    settings = [setting.partition("=")[::2] for setting in options.settings]
    names = dict.fromkeys(name for name, _ in settings if name != options.base)
    models = {name: open_model(name, "cpu", budgets=False, convert=False) for name in names}
    models[options.base] = stock

    def way(name: str, words: str) -> Way:
        policy, tokens, *more = words.split(",")
        slack = next((int(x.removeprefix("slack=")) for x in more if x.startswith("slack=")), 0)
        cache_dtype = "int8" if "int8" in more else "auto"
        eviction = eviction_of(policy, models[name], name, int(tokens) - slack // 2)
        dtype, static = cache_dtype_of(cache_dtype), "static" in more
        return Way(
            name, policy, int(tokens), cache_dtype, slack, options.chunk, models[name],
            lambda: new_cache(models[name], eviction, dtype=dtype, slack=slack, static=static),
            static,
        )  # fmt: skip

    own = Way(
        options.base, "own", length, "auto", 0, length, stock,
        lambda: DynamicCache(config=stock.config),
    )  # fmt: skip
    return [own, *(way(name, words) for name, words in settings)]


@torch.no_grad()
def measure(ways: list[Way], length: int, options: argparse.Namespace) -> list[dict]:
    """Medians of the rounds, and each round's times."""
    words = ways[0].network.config.vocab_size
    ids = torch.randint(words, (1, length), generator=torch.Generator().manual_seed(0))
    times: list[list[tuple[float, float]]] = [[] for _ in ways]
    nbytes: dict[Way, int] = {}
    bf16 = None
    one_by_one = {way: decoder(way) for way in ways}
    for number in tqdm(range(-1, options.rounds), desc=f"{length} tokens"):
        for way, own in zip(ways, times, strict=True):
            if number < 0 and not way.compiled:
                continue  # a round that is not counted compiles
            cache = way.cache()
            begin = time.perf_counter()
            for part in ids.split(way.chunk, 1):
                step(way, way.network, part, cache)
            first = time.perf_counter()
            for token in ids[0, : options.decoded].clone():
                step(way, one_by_one[way], token[None, None], cache)
            if number >= 0:
                own.append((first - begin, (time.perf_counter() - first) / options.decoded))
            if isinstance(cache, KVCache):
                nbytes[way], bf16 = cache.nbytes, cache.bf16_nbytes
    lines = []
    for way, own in zip(ways, times, strict=True):
        prompt, token = (statistics.median(x) for x in zip(*own, strict=True))
        fields = way._asdict()
        del fields["network"], fields["cache"]
        line = fields | {"length": length, "prompt_s": prompt, "token_ms": 1e3 * token}
        line |= {"nbytes": nbytes.get(way), "bf16_nbytes": bf16}
        lines.append(line | {"rounds": own, "threads": torch.get_num_threads()})
        print(json.dumps(line))
    return lines


def decoder(way: Way) -> Callable:
    """The model as tokens are decoded with it."""
    return torch.compile(way.network, fullgraph=True) if way.compiled else way.network


def step(way: Way, network: Callable, ids: torch.Tensor, cache: Cache) -> None:
    """Read some tokens; the next one's logits are computed."""
    network(input_ids=ids, logits_to_keep=1, **cache_argument(way.network, cache))


if __name__ == "__main__":
    main()
