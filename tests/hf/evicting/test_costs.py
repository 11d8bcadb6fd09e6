"""What a decoded token costs under an evicting cache, in Python calls beside transformers' own."""

import json
import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import heedful
from heedful.eviction import StreamingLLM
from heedful.hf.versions import cache_argument
from helpers.families import tokens

# By slack, × those of a token under DynamicCache, whose number differs between versions.
MOST = {"0": 1.1, "1": 1.21, "4": 1.13, "16": 1.1}

# In a process of its own: shape checks of the tests are Python calls too.
COUNT = """
import cProfile, json, pstats, torch, heedful
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig
from heedful.hf.versions import cache_argument

config = LlamaConfig(
    vocab_size=60, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
)
plain, model = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
ids = torch.randint(1, 60, (1, 60))

@torch.no_grad()
def count(model, cache):
    named = cache_argument(model, cache)
    for piece in ids.split([54, *[1] * 6], dim=1):
        model(piece, use_cache=True, **named)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(20):
        model(piece, use_cache=True, **named)
    profile.disable()
    return pstats.Stats(profile).total_calls

own = count(plain, DynamicCache(config=config))
policy = heedful.eviction.StreamingLLM(tokens=24)
caches = {slack: heedful.new_cache(model, policy, slack=slack) for slack in (0, 1, 4, 16)}
print(json.dumps({slack: count(model, cache) / own for slack, cache in caches.items()}))
"""


def test_python_calls_per_token():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    calls = json.loads(done.stdout.splitlines()[-1])
    assert calls.keys() == MOST.keys()
    for slack, most in MOST.items():
        assert 0.5 < calls[slack] <= most, calls


def test_a_decoded_token_without_padding_gets_no_mask():
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{
        "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "pad_token_id": 0,
    })).eval()  # fmt: skip
    cache = heedful.new_cache(model, StreamingLLM(tokens=24))
    masks = []

    def note(module, args, kwargs):
        masks.append(kwargs["attention_mask"])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        for piece in tokens(2, 60).split([30, *[1] * 30], dim=1):
            model(piece, **cache_argument(model, cache))
    assert len(masks) == 2 * 31 and all(mask is None for mask in masks)
