"""Decoding on a GPU with the full cache and with small ones: time per token, and memory.

A Llama of random weights in bf16, of about a billion parameters, reads a batch of prompts and
decodes; unconverted with transformers' own cache, and converted with a budget for every layer. With
a budget a prompt comes in chunks, so that the full cache never exists.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel
from transformers.cache_utils import Cache

import heedful
from benchmarks.decoding.run import bytes_of
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.versions import cache_argument
from heedful.testing import process_peak_mib
from heedful_lab.commands.bench.clock import spread

WAYS = ("unconverted", "StreamingLLM", "MostHidden")


@dataclass(frozen=True)
class Serving:
    """Sizes of the model, of prompts and caches, in tokens; `decoded` tokens are timed."""

    layers: int = 16
    hidden: int = 2048
    heads: int = 32
    key_heads: int = 8
    feed_forward: int = 8192
    vocabulary: int = 32000
    context: int = 4096
    budget: int = 512
    chunk: int = 64
    decoded: int = 32
    batches: tuple[int, ...] = (1, 16, 64)


def measure(sizes: Serving, way: str, batch: int, device: str) -> dict:
    """Seconds of the prompt, the spread of a token's time, tokens per second, bytes, peak MiB."""
    cuda = device == "cuda"
    model, cache, chunk = prepared(sizes, way, device)
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated() if cuda else 0
    ids = torch.randint(sizes.vocabulary, (batch, sizes.context), device=device)
    with torch.no_grad():
        prompt = seconds(lambda: [step(model, cache, x) for x in ids.split(chunk, dim=1)], cuda)
        new = ids[:, :1]
        times = [1e3 * seconds(lambda: step(model, cache, new), cuda) for _ in range(sizes.decoded)]
    token = {f"token_{name}": value for name, value in spread(times[1:]).items()}
    peak = torch.cuda.max_memory_allocated() - weights if cuda else process_peak_mib() * 2**20
    return {
        "prompt_seconds": prompt,
        **token,
        "tokens_per_second": 1e3 * batch / token["token_ms"],
        "cache_nbytes": bytes_of(cache)[0],
        "peak_mib": peak / 2**20,  # beside the weights, on a GPU
    }


def prepared(sizes: Serving, way: str, device: str) -> tuple[PreTrainedModel, Cache, int]:
    """The model, an empty cache, and how many tokens of a prompt it reads at a time."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, num_key_value_heads=sizes.key_heads,
        max_position_embeddings=2 * sizes.context,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if way == "unconverted":
        return model, DynamicCache(config=config), sizes.context
    if way == "StreamingLLM":
        mechanism, policy = heedful.Standard(), StreamingLLM
    else:
        mechanism, policy = heedful.Selective(selector="extra"), MostHidden
    heedful.convert(model, mechanism)
    return model, heedful.new_cache(model, policy(tokens=sizes.budget)), sizes.chunk


def step(model: PreTrainedModel, cache: Cache, ids: torch.Tensor) -> None:
    """A pass over these tokens."""
    model(input_ids=ids, logits_to_keep=1, **cache_argument(model, cache))


def seconds(run: Callable[[], object], cuda: bool) -> float:
    """Of a call, with what it started on the device."""
    start = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def config_of(sizes: Serving, way: str, batch: int) -> dict:
    """Options that the numbers depend on, JSON-ready."""
    return {name: x for name, x in asdict(sizes).items() if name != "batches"} | {
        "way": way, "batch": batch,
    }  # fmt: skip
