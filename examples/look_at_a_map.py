"""Draw what masks what in a converted model: `python look_at_a_map.py [FOLDER]`."""

import sys
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful

torch.manual_seed(0)
text = "y=7;x=1;x=3;z=5;x=?"
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, initializer_range=0.2,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config)
heedful.convert(model, "selective")  # untrained: what it masks means nothing yet

layer = heedful.look(model, torch.tensor([[ord(letter) for letter in text]]))[1]
print(f"{len(layer.weights)} heads; masked most: {text[int(layer.masked[0].argmax())]!r}")

figure = Figure(figsize=(9, 4.5), layout="constrained")
panels = {"attention of head 0": layer.weights[0], "what masks what": layer.masking[0]}
for axes, (title, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
    image = axes.imshow(values, cmap="Purples")
    axes.set(title=title, xlabel="key", ylabel="token")
    axes.set_xticks(range(len(text)), text)
    axes.set_yticks(range(len(text)), text)
    figure.colorbar(image, ax=axes, shrink=0.7)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)
figure.savefig(folder / "selective.png", dpi=100)
print(f"saved {folder / 'selective.png'}")
