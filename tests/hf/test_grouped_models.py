"""Grouped models: noise stays noise, caches of the size that the definition has, refusals."""

import math

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import heedful
from heedful import Grouped
from helpers.families import EAGER, FAMILIES, config_of, logits, stir, tiny, tokens, varied

GROUPINGS = {
    "fixed": Grouped(size=4, window=2),
    "sliding": Grouped("sliding", size=4, stride=2, window=2, queries="groups"),
    "sentence": Grouped("sentence", size=4, window=2, closing=(3, 5, 8), refine="attention"),
    "cif": Grouped("cif", size=4, window=2, refine="attention"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPINGS)
def test_noise_cannot_be_learnt(name):
    """A canary: a leak would let a model read the next token, and its loss would fall."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, num_attention_heads=2, num_key_value_heads=1, **size)
    )
    conversion = heedful.convert(model, GROUPINGS[name])
    groups = [{"params": list(conversion.parameters().values()), "lr": 3e-2}]
    own = {id(p) for p in groups[0]["params"]}
    groups.append({"params": [p for p in model.parameters() if id(p) not in own], "lr": 3e-3})
    optimizer, losses = torch.optim.AdamW(groups), []
    for _ in range(200):
        ids = torch.randint(0, 16, (8, 24))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # The mean of 50 losses of 8 x 23 tokens, each of spread below one.
    assert sum(losses[-50:]) / 50 > math.log(16) - 5 / math.sqrt(50 * 8 * 23)


@pytest.mark.parametrize("context", [2048, 8192])
def test_bytes_of_a_cache_are_those_of_summaries_and_near_tokens(context):
    """Four key heads of 64 in bf16: 7.5 and 12.5 times less than every token takes."""
    config = LlamaConfig(
        vocab_size=16, hidden_size=256, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, head_dim=64, max_position_embeddings=9000,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    heedful.convert(model, Grouped(size=16, window=128))
    cache = heedful.new_cache(model)
    with torch.no_grad():
        for piece in torch.randint(16, (1, context)).split(1024, dim=1):
            model(input_ids=piece, cache=cache, logits_to_keep=1)
        model(input_ids=piece[:, :1], cache=cache)
    per_token = 2 * 4 * 64 * 2
    assert cache.whole_nbytes == (context + 1) * per_token
    summaries, near = context // 16 * per_token, (128 + 16) * per_token
    of_groups = context // 16 * (8 + 8 + 1 + 8)  # where each begins and ends, its size
    room = max(64, context // 16 // 8) * per_token  # for later summaries
    assert summaries < cache.nbytes <= summaries + near + of_groups + room + 16 * 1024
    assert cache.whole_nbytes / cache.nbytes > {2048: 5, 8192: 10}[context]
    assert cache.tokens[0] <= 128 + 16


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in EAGER])
def test_every_family_is_standard_attention_while_nothing_is_far(family):
    """With groups of one token too, so that the family's rotary embedding is followed right."""
    model, ids = tiny(family), tokens(2, 19)
    before = logits(model, ids)
    # Keys of groups are rotated back and again, by cosines in fp32, in three layers.
    rounding = 16 * torch.finfo(torch.float32).eps * before.abs().max().item()
    single = Grouped(size=1, window=1, refine="attention")
    for config, tolerance in ((Grouped(size=4, window=64), 1e-12), (single, rounding)):
        conversion = heedful.convert(model, config)
        stir(model, 0.2, only=".heedful.")
        torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=tolerance)
        conversion.revert()
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gemma2", "does not cap logits, as Gemma2Attention does"),
        ("gpt_oss", "has no sinks, as GptOssAttention does"),
    ],
)
def test_families_that_cap_logits_or_have_sinks_are_refused(family, message):
    model = tiny(family)
    with pytest.raises(ValueError, match=message):
        heedful.convert(model, Grouped(size=4, window=64))


@pytest.mark.parametrize(("family", "share"), [("llama", 1.0), ("gpt_neox", 0.5)])
def test_a_rotation_that_lengthens_some_channels_is_followed(family, share):
    """YaRN's, of all channels of a head or of the first ones."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    yarn |= {"partial_rotary_factor": share, "original_max_position_embeddings": 16}
    model, ids = tiny(family, rope_parameters=yarn), tokens(2, 19)
    before = logits(model, ids)
    varied(model, Grouped(size=1, window=1, refine="attention"))
    rounding = 16 * torch.finfo(torch.float32).eps * before.abs().max().item()
    torch.testing.assert_close(logits(model, ids), before, rtol=0, atol=rounding)


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox", "qwen3", "granite"])
def test_summaries_stand_at_the_mean_position_of_their_group(family):
    """Moving a whole row moves nothing, as with standard attention: only distances count."""
    model, ids = tiny(family, max_position_embeddings=256), tokens(2, 30)
    varied(model, Grouped(size=4, window=2))
    at = torch.arange(30)[None]
    with torch.no_grad():
        actual, moved = (
            model(input_ids=ids, position_ids=p, use_cache=False).logits for p in (at, at + 100)
        )
    # Angles are in fp32, so that at position 130 they are off by that many roundings.
    rounding = 130 * torch.finfo(torch.float32).eps * actual.abs().max().item()
    torch.testing.assert_close(moved, actual, rtol=0, atol=rounding)


def test_layers_without_positions_are_known_before_there_are_weights():
    """On meta there are no keys to compare, and a layer without a rotation must not get one."""
    actual = []
    for device in ("meta", "cpu"):
        config = config_of("smollm3", num_hidden_layers=4)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config)
        heedful.convert(model, "grouped")
        modules = [m for m in model.modules() if hasattr(m, "heedful")]
        actual.append([m.heedful_rotation is None for m in modules])
    assert actual[0] == actual[1] == [False, False, False, True]


def test_modules_whose_arguments_are_moved_share_groups_all_the_same():
    """accelerate's hooks hand every module copies of the dicts in its arguments."""
    model, ids = tiny(), tokens(2, 20)
    heedful.convert(model, Grouped("cif", size=3, window=2, share=2))
    expected = logits(model, ids)
    for layer in model.model.layers:
        hook = AlignDevicesHook(execution_device="cpu", io_same_device=True)
        add_hook_to_module(layer, hook)
    assert torch.equal(logits(model, ids), expected)


def test_what_changes_with_the_row_s_length_is_refused():
    config = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    with pytest.raises(ValueError, match=r"LlamaAttention cannot be .* frequencies"):
        heedful.convert(tiny("llama", **config), "grouped")


def test_eviction_is_refused():
    model = tiny()
    heedful.convert(model, "grouped")
    policy = heedful.eviction.StreamingLLM(tokens=16)
    with pytest.raises(ValueError, match=r"does not support GroupedAttention, whose cache"):
        heedful.new_cache(model, policy)
