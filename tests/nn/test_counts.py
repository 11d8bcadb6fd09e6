"""Parameter counts of the published models (arXiv 2504.00927, Table 8 and appendix D)."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful

# width, layers, heads, feed-forward width, parameters of the standard model
MODELS = {
    "300M": (1024, 20, 16, 2816, 388_277_248),
    "550M": (1280, 24, 10, 3584, 651_818_240),
    "880M": (1536, 24, 16, 4096, 876_553_728),
    "1B": (2048, 24, 16, 5632, 1_495_894_016),
}
EXTRA = {
    ("300M", "mta-published"): 23_380,
    ("550M", "mta-published"): 18_888,
    ("880M", "mta-published"): 29_592,
    ("1B", "mta-published"): 31_128,
    ("300M", "talking-heads"): 10_240,
    ("550M", "talking-heads"): 4_800,
    ("880M", "talking-heads"): 12_288,
    ("1B", "talking-heads"): 12_288,
    ("880M", "differential"): 13_824,
    ("880M", "standard"): 0,
    ("880M", "selective"): 0,
}


def count(size: str, name: str) -> int:
    width, layers, heads, feed_forward, _ = MODELS[size]
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=feed_forward,
        vocab_size=128_256,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    heedful.convert(model, name)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("size", "name"), EXTRA)
def test_counts(size, name):
    assert count(size, name) == MODELS[size][-1] + EXTRA[size, name]


def test_the_880m_models_of_the_paper():
    assert [
        MODELS["880M"][-1] + EXTRA["880M", name]
        for name in ("standard", "differential", "talking-heads", "mta-published")
    ] == [876_553_728, 876_567_552, 876_566_016, 876_583_320]
