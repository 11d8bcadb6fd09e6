"""Tokens per second and peak memory of whole training steps, beside the unconverted model.

The default is the 880M model of the multi-token paper (arXiv 2504.00927, Table 7), from its
configuration with random weights: forward, backward and AdamW on random tokens. It needs a GPU of
80 GiB; `--layers 2 --hidden 128 ... --device cpu` runs a small one anywhere.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from heedful.nn import NAMES
from heedful.records.environment import environment
from heedful.records.files import write_lines
from heedful.testing import process_peak_mib


def model_of(options: argparse.Namespace, mechanism: str) -> torch.nn.Module:
    """A Llama of these sizes with the mechanism, fp32 parameters, in training mode."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.feed_forward,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=options.tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config)
    if mechanism != "unconverted":
        heedful.convert(model, mechanism, impl=options.impl)
    return model.train()


def measure(options: argparse.Namespace, mechanism: str) -> dict:
    """Median step time after two steps of warm-up; peak memory of the whole."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    model = model_of(options, mechanism)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda or None)
    seconds = []
    for step in range(options.steps + 2):
        size = (options.batch, options.tokens)
        ids = torch.randint(options.vocabulary, size, device=options.device)
        started = time.perf_counter()
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        loss.item()  # waits for the device
        if step >= 2:
            seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds)
    return {
        "mechanism": mechanism,
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": 1e3 * median,
        "tokens_per_second": options.batch * options.tokens / median,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else process_peak_mib(),
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure every mechanism, print a table, and append records to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="+", default=["unconverted", "mta-published"],
                        choices=["unconverted", *NAMES])  # fmt: skip
    parser.add_argument("--impl", default="fused" if torch.cuda.is_available() else "tiled")
    sizes = {"layers": 24, "hidden": 1536, "heads": 16, "feed-forward": 4096, "vocabulary": 128256,
             "batch": 4, "tokens": 2048, "steps": 10}  # fmt: skip
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    records = []
    for mechanism in options.mechanisms:
        about = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in sizes}
        about |= {"impl": options.impl}
        records.append(measure(options, mechanism) | {"config": about})
        r, first = records[-1], records[0]
        print(
            f"{mechanism:<16} {r['parameters']:>13,} parameters {r['tokens_per_second']:>9,.0f} "
            f"tokens/s ({r['tokens_per_second'] / first['tokens_per_second']:.0%}) "
            f"{r['peak_mib']:>8,.0f} MiB ({r['peak_mib'] / first['peak_mib']:.2f} x)",
            flush=True,
        )
    if options.out:
        about = environment(["python", "benchmarks/training_step.py", *(arguments or sys.argv[1:])])
        write_lines(options.out, (record | {"environment": about} for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
