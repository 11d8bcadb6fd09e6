"""Generate with a converted model: a left-padded batch, and a cache with a budget."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=None,
    pad_token_id=0, initializer_range=0.2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
heedful.convert(model, "selective")

prompts = [torch.randint(1, 64, (length,)) for length in (3, 9, 6)]
width = max(map(len, prompts))
ids = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
mask = (ids != 0).long()

new = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)[:, width:]
for prompt, row in zip(prompts, new, strict=True):
    ids = prompt[None]
    alone = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False
    )[0, len(prompt) :]
    print(f"{len(prompt)} tokens -> {row.tolist()}")
    assert torch.equal(row, alone)

long = torch.randint(1, 64, (1, 200))
whole = heedful.new_cache(model)
small = heedful.new_cache(model, heedful.eviction.MostHidden(tokens=32))
for cache in (whole, small):
    model.generate(
        long, attention_mask=torch.ones_like(long), cache=cache, prefill_chunk_size=32,
        max_new_tokens=40, do_sample=False,
    )  # fmt: skip
    print(f"{cache.tokens} tokens, {cache.nbytes:,} bytes, peak {cache.peak_nbytes:,}")
assert small.peak_nbytes < whole.nbytes / 2
