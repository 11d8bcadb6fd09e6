"""Tokens per second and peak memory of whole training steps, beside the unconverted model.

The default is the 880M model of the multi-token paper (arXiv 2504.00927, Table 7), from its
configuration with random weights: forward, backward and AdamW on random tokens. It needs a GPU of
80 GiB; `--layers 2 --hidden 128 ... --device cpu` runs a small one anywhere.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from heedful.files import write_lines
from heedful.testing import process_peak_mib
from heedful_lab.commands.bench.clock import spread
from heedful_lab.records.environment import environment
from heedful_lab.rivals.models import convert
from heedful_lab.rivals.table import TABLE


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


def main(arguments: list[str] | None = None) -> int:
    """Measure every mechanism, print a table, and write records to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", default=["unconverted", "mta-published"],
                        choices=["unconverted", *(row.name for row in TABLE)])  # fmt: skip
    parser.add_argument("--impl", default="fused" if torch.cuda.is_available() else "tiled")
    numbers = [field for field in fields(Step) if type(field.default) is int]
    for field in numbers:
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    sizes = Step(**{field.name: getattr(options, field.name) for field in numbers})
    records = []
    for mechanism in options.mechanisms:
        result = measure(sizes, mechanism, options.impl, options.device)
        config = asdict(sizes) | {"impl": options.impl}
        records.append({"mechanism": mechanism} | result | {"config": config})
        r, first = records[-1], records[0]
        print(
            f"{mechanism:<16} {r['parameters']:>13,} parameters {r['tokens_per_second']:>9,.0f} "
            f"tokens/s ({r['tokens_per_second'] / first['tokens_per_second']:.0%}) "
            f"{r['peak_mib']:>8,.0f} MiB ({r['peak_mib'] / first['peak_mib']:.2f} x)",
            flush=True,
        )
    if options.out:
        about = environment(
            ["python", "-m", "benchmarks.gpu.training_step", *(arguments or sys.argv[1:])]
        )
        write_lines(options.out, (record | {"environment": about} for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
