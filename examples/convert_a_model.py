"""Convert a transformers model, train its new parameters alone, save, load, and take it back."""

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful

torch.manual_seed(0)
# A pretrained model is used in the same way: AutoModelForCausalLM.from_pretrained(...).
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
ids = torch.randint(64, (2, 40))
with torch.no_grad():
    before = model(ids).logits

conversion = heedful.convert(model, "mta")
print(conversion.mechanism)
with torch.no_grad():
    change = (model(ids).logits - before).abs().max()
print(f"identity at initialisation: logits moved by {change:.1g}")

own = conversion.parameters()
print(f"{sum(p.numel() for p in own.values()):,} new parameters, such as {next(iter(own))}")
optimizer = torch.optim.AdamW(own.values(), lr=1e-2)
for _ in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    again = heedful.load(folder)
with torch.no_grad():
    assert torch.equal(again(ids).logits, model(ids).logits)
    conversion.revert()
    assert torch.equal(model(ids).logits, before)
print("saved, loaded, and taken back: the logits of the start, bit for bit")
