"""Pack documents into one row: each one gets what it gets alone, in an operator and in a model."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from heedful import Visibility, selective_attention

torch.manual_seed(0)
lengths = torch.tensor([5, 12, 7])
offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # 0, 5, 17, 24

q, k, v = (torch.randn(1, 4, int(offsets[-1]), 16) for _ in range(3))
packed = selective_attention(q, k, v, visibility=Visibility.packed(offsets)).output
for start, stop in offsets.unfold(0, 2, 1).tolist():
    alone = selective_attention(*(x[:, :, start:stop] for x in (q, k, v))).output
    torch.testing.assert_close(packed[:, :, start:stop], alone)
print("operator: packed equals separate")

# transformers finds the documents in position ids that start again at 0, and the converted model
# takes them from there. No kernel, mixing or hiding crosses a border.
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config).eval()
conversion = heedful.convert(model, "mta")
with torch.no_grad():
    for parameter in conversion.parameters().values():
        parameter.add_(0.1 * torch.randn_like(parameter))  # away from the identity
ids = torch.randint(64, (1, int(offsets[-1])))
positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
with torch.no_grad():
    packed = model(ids, position_ids=positions, use_cache=False).logits
    for start, stop in offsets.unfold(0, 2, 1).tolist():
        alone = model(ids[:, start:stop]).logits
        torch.testing.assert_close(packed[:, start:stop], alone, rtol=1e-4, atol=1e-4)
print("model: packed equals separate")
