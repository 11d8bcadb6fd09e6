"""From a stock checkpoint to a smaller KV cache, cell by cell; about ten minutes on two cores.

    python examples/smaller_cache.py [MODEL] [--steps 400] [--data book.txt]

Without MODEL a small model is trained first, which then stands for the stock checkpoint.
"""

# %% Options
import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import heedful
from heedful_lab.commands.budget.options import BudgetSearch
from heedful_lab.commands.budget.search import format_result, search
from heedful_lab.commands.train.options import Training
from heedful_lab.commands.train.run import formatted, train_text

parser = argparse.ArgumentParser()
parser.add_argument("model", nargs="?", default="base")
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--data", nargs="*", default=[])  # the standard library's sources
parser.add_argument("--length", type=int, default=256)
args = parser.parse_args()
common = {"data": tuple(args.data), "steps": args.steps, "length": args.length}

# %% A stock checkpoint: any folder or name on the hub, or one made here
if args.model == "base":
    shape = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "vocab_size": 1024, "max_position_embeddings": 1024}
    Path("base.json").write_text(json.dumps({"model_type": "llama"} | shape))
    print(formatted(train_text(Training("base.json", out="base", learning_rate=2e-3, **common))))
stock, tokenizer = AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained(args.model)

# %% Teach it to hide what it will not need: an extra selector changes nothing at first
selective = Training(
    args.model,
    out="selective",
    mechanism=("selective:selector=extra",),
    memory_loss=0.1,
    learning_rate=1e-3,
    **common,
)
print(formatted(train_text(selective)))

# %% How many tokens does each layer need? At most 1 % of perplexity is given up
text = tuple(args.data) or (str(Path(json.__file__).parent),)
result = search(BudgetSearch("selective", text, loss=1.0, rows=4, length=args.length))
print(format_result(result))

# %% Generate: `load` finds the budgets, and the cache evicts the rest
prompt = Path(json.__file__).read_text()[:2000]
ids = torch.tensor([tokenizer(prompt)["input_ids"][: args.length]])
for name, model in (("stock", stock(args.model)), ("selective", heedful.load("selective"))):
    if name == "stock":
        heedful.convert(model, "standard")  # the same attention, under a cache that tells its bytes
    cache = heedful.new_cache(model)
    options = {"prefill_chunk_size": 64, "do_sample": False, "max_new_tokens": 40}
    output = model.generate(ids, cache=cache, **options)
    print(f"{name}: {cache.nbytes / 1024:.0f} KiB cached for {output.shape[1]} tokens")
    print(tokenizer.decode(output[0, ids.shape[1] :]))
