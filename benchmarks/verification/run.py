"""Cost of `convert(verify=True)` at a real size: Llamas of random weights, on a CPU.

Each conversion is timed without the proof and with it, in turn, and reverted; beside them one
forward pass of the tokens that the proof runs.

    python -m benchmarks.verification.run \
        --out benchmarks/verification/results/verification-cpu.jsonl
"""

import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from benchmarks.parts import command_line
from heedful.files import write_lines
from heedful_lab.records.environment import environment

# The shapes of SmolLM2-135M and Llama 3.2 1B.
MODELS = {
    "135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def measure(name: str, rounds: int) -> dict:
    config = LlamaConfig(**MODELS[name], tie_word_embeddings=True, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(3, 1000, (2, 6))
    times: dict[str, list[float]] = {"convert": [], "convert, verify": [], "a forward pass": []}
    for _ in range(rounds + 1):
        for way, verify in (("convert", False), ("convert, verify", True)):
            times[way].append(seconds(lambda: heedful.convert(model, "selective", verify=verify)))  # noqa: B023
            heedful.revert(model)
        times["a forward pass"].append(seconds(lambda: model(input_ids=ids, use_cache=False)))
    parameters = sum(p.numel() for p in model.parameters())
    medians = {way: statistics.median(x[1:]) for way, x in times.items()}  # the first warms up
    return {"model": name, "parameters": parameters, "dtype": "bfloat16", "seconds": medians}


def main() -> None:
    parser = command_line(__doc__, new=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    options = parser.parse_args()
    records = []
    for name in options.models:
        records.append(measure(name, options.rounds) | {"environment": environment()})
        print(records[-1]["model"], records[-1]["seconds"], flush=True)
    write_lines(options.out, records)


if __name__ == "__main__":
    main()
