"""Tokens per second and peak memory of whole training steps, beside the unconverted model.

The default is the 880M model of the multi-token paper (arXiv 2504.00927, Table 7), from its
configuration with random weights: forward, backward and AdamW on random tokens. It needs a GPU of
80 GiB.
"""

import time
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from heedful.testing import process_peak_mib
from heedful_lab.commands.bench.clock import spread
from heedful_lab.rivals.models import convert


@dataclass(frozen=True)
class Step:
    """Sizes of the model, and of the steps that are timed; `autocast` is to bfloat16."""

    layers: int = 24
    hidden: int = 1536
    heads: int = 16
    feed_forward: int = 4096
    vocabulary: int = 128256
    batch: int = 4
    tokens: int = 2048
    steps: int = 10
    autocast: bool = True


def model_of(sizes: Step, mechanism: str, impl: str, device: str) -> torch.nn.Module:
    """A Llama of these sizes with the mechanism, fp32 parameters, in training mode."""
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.feed_forward,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config)
    if mechanism != "unconverted":
        convert(model, mechanism, impl=impl)
    return model.train()


def measure(sizes: Step, mechanism: str, impl: str, device: str) -> dict:
    """Step times after two steps of warm-up; peak memory of the whole; parameters."""
    cuda = device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = model_of(sizes, mechanism, impl, device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda or None)
    times = []
    for step in range(sizes.steps + 2):
        ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.tokens), device=device)
        started = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=sizes.autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        if step >= 2:
            times.append(1e3 * (time.perf_counter() - started))
    step_times = {f"step_{name}": value for name, value in spread(times).items()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        **step_times,
        "tokens_per_second": 1e3 * sizes.batch * sizes.tokens / step_times["step_ms"],
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else process_peak_mib(),
    }
