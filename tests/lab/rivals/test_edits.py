"""Edits of attention modules: hooks that copies, adapters and revert carry along, and refusals."""

import copy
import pickle

import peft
import pytest
import torch
from torch import nn
from transformers import BartForConditionalGeneration

import heedful
from heedful.nn import HeadShape
from heedful_lab.rivals.canon import Canon
from heedful_lab.rivals.edits import PROJECTIONS
from heedful_lab.rivals.knocking import KnockingHeads
from heedful_lab.rivals.models import convert, load
from heedful_lab.rivals.simplicial import Simplicial
from helpers import encoder_families
from helpers.families import checkpoint_layers, logits, stir, tiny, tokens, twin

CONFIGS = {"canon": Canon(), "knocking-heads": KnockingHeads(("q", "k", "v"))}
every = pytest.mark.parametrize("name", CONFIGS)


def converted(name: str, **options):
    model = tiny(**options)
    convert(model, CONFIGS[name])
    stir(model, 0.2, only=".heedful.")
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma", "olmo2"])
def test_linear_knocking_heads_fold_into_the_projections(family):
    """W' = W T per head, so no channel is taken for another's."""
    model, ids = tiny(family), tokens()
    folded = twin(model)
    convert(model, KnockingHeads(("q", "k", "v")))
    stir(model, 0.3, only=".heedful.")
    for own, other in zip(model.model.layers, folded.model.layers, strict=True):
        for part, name in PROJECTIONS.items():
            matrix = own.self_attn.heedful.shared[part].detach().double()
            for p in getattr(other.self_attn, name).parameters():
                heads = p.data.unflatten(0, (-1, len(matrix)))
                heads.copy_(torch.einsum("hd...,dc->hc...", heads.clone(), matrix))
    torch.testing.assert_close(logits(model, ids), logits(folded, ids), rtol=0, atol=1e-10)


@every
def test_copies_and_pickles_are_edited_too(name):
    model, ids = converted(name), tokens()
    expected = logits(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        stir(model, 0.1)  # which is another model
        assert torch.equal(logits(other, ids), expected)
        heedful.revert(other)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())


@every
def test_layers_computed_again_have_the_same_gradients(name):
    """Of packed documents, in a backward pass."""
    model, ids = converted(name).train(), tokens(1, 13)
    places = torch.cat([torch.arange(6), torch.arange(7)])[None]
    grads = []
    for again in (False, True):
        if again:
            checkpoint_layers(model)
        model.zero_grad()
        model(input_ids=ids, position_ids=places, labels=ids, use_cache=False).loss.backward()
        grads.append({x: p.grad.clone() for x, p in model.named_parameters()})
    for x, grad in grads[0].items():
        torch.testing.assert_close(grads[1][x], grad, rtol=0, atol=1e-12)


@every
def test_an_adapter_stands_before_the_edit_and_merges_into_the_projection(name, tmp_path):
    model, ids = converted(name), tokens()
    model.save_pretrained(tmp_path / "base")
    options = {"target_modules": "all-linear", "init_lora_weights": False}
    config = peft.LoraConfig(**options, task_type="CAUSAL_LM")
    adapted = heedful.get_peft_model(load(tmp_path / "base"), config)
    expected = logits(adapted, ids)
    assert not torch.allclose(expected, logits(model, ids), atol=1e-3)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), expected, rtol=0, atol=1e-11)
    for layer in merged.model.layers:
        assert len(layer.self_attn.v_proj._forward_hooks) == 1
    merged.save_pretrained(tmp_path / "merged")
    again = load(tmp_path / "merged")
    torch.testing.assert_close(logits(again, ids), expected, rtol=0, atol=1e-11)


def test_a_decoder_of_a_pair_is_edited_alone():
    model = encoder_families.tiny("bart")
    assert isinstance(model, BartForConditionalGeneration)
    conversion = convert(model, Canon())
    assert conversion.where == {Canon(): ("decoder",)}
    stir(model, 0.3, only=".heedful.")
    ids = tokens(2, 9)
    model(input_ids=ids, decoder_input_ids=ids).logits.sum().backward()
    assert all(bool((p.grad != 0).any()) for p in conversion.parameters().values())


def test_a_layer_without_its_hooks_raises():
    model = tiny()
    heedful.convert(model, Canon())
    with pytest.raises(ValueError, match="acts through hooks on its attention module"):
        logits(model, tokens())


def gated():
    model = tiny()
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 64, bias=False)
    return model


REFUSED = {
    "GPT2Attention must have a q_proj .* and has none": lambda: tiny("gpt2"),
    "GPTNeoXAttention must have a q_proj": lambda: tiny("gpt_neox"),
    "Phi3Attention must have a q_proj": lambda: tiny("phi3"),
    "LlamaAttention must have a q_proj that gives 32 .* and has one of 64 channels": gated,
}


@every
@pytest.mark.parametrize("message", REFUSED)
def test_other_families_are_refused_by_name(message, name):
    model = REFUSED[message]()
    kind = type(model)
    with pytest.raises(ValueError, match=message):
        convert(model, CONFIGS[name])
    assert type(model) is kind and not any(module._forward_hooks for module in model.modules())


def test_a_mechanism_of_every_nth_layer_must_have_one():
    with pytest.raises(ValueError, match=r"changes none of the 3 layers of LlamaForCausalLM .*`ev"):
        convert(tiny(), "simplicial")
    few = {"mta": [1], Simplicial(every=2): [0, 2]}
    with pytest.raises(ValueError, match=r"Simplicial\(.*changes none of the 2 layers"):
        convert(tiny(), few)
    assert Simplicial(every=2).build(HeadShape(4, 2, 8, 32, 1)).caches is False
