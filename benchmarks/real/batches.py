"""Tokens per second of many requests at once, with the full cache and with small ones.

Memory limits how many requests a server answers at a time. Four requests of unlike lengths, padded
on the left, are read once, and their cache is copied until there are so many requests; then tokens
are decoded, one of each request at a time. Each small cache stands beside transformers' own with as
many requests, and with as many as take the same bytes. All ways take turns.

    python -m benchmarks.real.batches smollm2 adapters/smollm2-135m-hide --out runs/batches.jsonl
"""

import argparse
import copy
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
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.cache.new import KVCache, new_cache
from heedful.hf.versions import cache_argument
from heedful_lab.commands.models import open_model
from heedful_lab.records.environment import environment

PROMPTS = 4


class Way(NamedTuple):
    """A model with a kind of cache."""

    model: str
    policy: str
    tokens: int
    slack: int
    network: PreTrainedModel
    cache: Callable[[], Cache]


class Prompts(NamedTuple):
    """Read prompts: their cache, their mask, and its bytes per request."""

    cache: Cache
    mask: torch.Tensor
    nbytes: float


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("base", help="MODEL")
    parser.add_argument("adapter", help="an adapter's folder with budgets.json")
    parser.add_argument(
        "--length", type=positive, default=2048, help="tokens of the longest prompt"
    )
    parser.add_argument("--tokens", type=positive, default=256, help="of each layer on average")
    parser.add_argument("--slack", type=int, default=32)
    parser.add_argument("--requests", type=positive, nargs="+", default=[1, 4, 16])
    parser.add_argument("--chunk", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--decoded", type=positive, default=8, help="tokens per request and round")
    options = parser.parse_args()
    about = environment()
    write_lines(options.out, [line | {"environment": about} for line in measure(options)])


def ways(options: argparse.Namespace) -> list[Way]:
    """The base as it comes, its StreamingLLM, and the adapter's own budgets."""
    stock = stock_model(options.base).eval()
    adapter = open_model(options.adapter, budgets=False, convert=False)
    tokens, slack = options.tokens, options.slack

    def small(name: str, policy: str, network: PreTrainedModel) -> Way:
        eviction = eviction_of(policy, network, name, tokens - slack // 2)
        return Way(
            name, policy, tokens, slack, network, lambda: new_cache(network, eviction, slack=slack)
        )

    own = Way(
        options.base, "own", options.length, 0, stock, lambda: DynamicCache(config=stock.config)
    )
    return [
        own,
        small(options.base, "streaming-llm", stock),
        small(options.adapter, "by-layer", adapter),
    ]


@torch.no_grad()
def measure(options: argparse.Namespace) -> list[dict]:
    """Medians of the rounds of each way with each number of requests, and each round's times."""
    read = [(way, read_prompts(way, options)) for way in ways(options)]
    whole = read[0][1].nbytes
    settings = []
    for count in options.requests:
        for way, prompts in read:
            same = int(count * whole / prompts.nbytes)
            settings += [(way, prompts, count, n) for n in dict.fromkeys((count, same))]
    times: list[list[float]] = [[] for _ in settings]
    for _ in tqdm(range(options.rounds)):
        for (way, prompts, _, requests), own in zip(settings, times, strict=True):
            own.append(seconds_per_step(way, prompts, requests, options.decoded))
    lines = []
    for (way, prompts, count, requests), own in zip(settings, times, strict=True):
        step = statistics.median(own)
        lines.append({
            "model": way.model, "policy": way.policy, "tokens": way.tokens, "slack": way.slack,
            "length": options.length, "beside": count, "requests": requests,
            "nbytes": round(requests * prompts.nbytes), "step_ms": 1e3 * step,
            "tokens_per_second": requests / step, "rounds": own,
            "threads": torch.get_num_threads(),
        })  # fmt: skip
        print(json.dumps(lines[-1]))
    return lines


def read_prompts(way: Way, options: argparse.Namespace) -> Prompts:
    """Read four prompts of unlike lengths, in chunks."""
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(way.network.config.vocab_size, (PROMPTS, options.length), generator=draws)
    lengths = torch.linspace(options.length, options.length // 2, PROMPTS).int()
    mask = (torch.arange(options.length) >= options.length - lengths[:, None]).long()
    cache, seen = way.cache(), 0
    for part in ids.split(options.chunk, dim=1):
        seen += part.shape[1]
        step(way, part, mask[:, :seen], cache)
    own = cache.nbytes if isinstance(cache, KVCache) else nbytes_of(
        [x for layer in cache.layers for x in (layer.keys, layer.values)]
    )  # fmt: skip
    return Prompts(cache, mask, own / PROMPTS)


def seconds_per_step(way: Way, prompts: Prompts, requests: int, steps: int) -> float:
    """The median time of a step that decodes a token of every request."""
    rows = torch.arange(requests) % PROMPTS
    cache, mask = copy.deepcopy(prompts.cache), prompts.mask[rows]
    cache.batch_select_indices(rows)
    ids, seconds = torch.ones(requests, 1, dtype=torch.long), []
    for _ in range(steps):
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        begin = time.perf_counter()
        step(way, ids, mask, cache)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def step(way: Way, ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> None:
    """Read some tokens of every request; the next one's logits are computed."""
    named = cache_argument(way.network, cache)
    way.network(input_ids=ids, attention_mask=mask, logits_to_keep=1, **named)


if __name__ == "__main__":
    main()
