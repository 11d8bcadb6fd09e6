"""The door before the rotation: which channels are whose, in every family."""

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DbrxConfig

import heedful
from heedful.hf.family.projections import PROJECTION_HOOKS
from heedful.nn import Canon, KnockingHeads
from helpers import encoder_families
from helpers.families import FAMILIES, logits, stir, tiny, tokens, twin, varied

ENCODERS = ("bart", "bert", "t5", "modernbert", "t5gemma")


def model_of(family: str):
    return tiny(family) if family in FAMILIES else encoder_families.tiny(family)


@torch.no_grad()
def outputs(model, ids: Tensor) -> Tensor:
    target = {"decoder_input_ids": ids[:, :7]} if model.config.is_encoder_decoder else {}
    return logits(model, ids, **target) if not target else model(input_ids=ids, **target).logits


def fold(weight: Tensor, matrix: Tensor) -> None:
    """Multiply what every head of a projection `[C, E]`, or a bias `[C]`, gives by a matrix."""
    heads = weight.data.unflatten(0, (-1, len(matrix)))
    heads.copy_(torch.einsum("hd...,dc->hc...", heads, matrix))


def parts_of(module: nn.Module) -> dict[str, list[Tensor]]:
    """Weights and biases by part, as views `[C, ...]`, written down by hand per family."""
    for names in (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v")):
        if all(hasattr(module, name) for name in names):
            each = zip("qkv", (getattr(module, name) for name in names), strict=True)
            return {part: [p.data for p in one.parameters()] for part, one in each}
    if hasattr(module, "query_key_value"):  # per head, its query, its key, its value
        one = module.query_key_value
        split = [p.data.unflatten(0, (4, 3, -1)) for p in (one.weight, one.bias)]
        return {part: [x[:, i] for x in split] for i, part in enumerate("qkv")}
    if hasattr(module, "c_attn"):
        one = [module.c_attn.weight.data.mT, module.c_attn.bias.data]
        return dict(zip("qkv", zip(*(x.chunk(3) for x in one), strict=True), strict=True))
    one = getattr(module, "qkv_proj", getattr(module, "Wqkv", None)).weight.data
    keys = (len(one) - 32) // 2
    return {part: [x] for part, x in zip("qkv", one.split([32, keys, keys]), strict=True)}


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODERS])
def test_linear_knocking_heads_fold_into_every_familys_projections(family):
    """W' = W T per head, for queries, keys and values; so no channel is taken for another."""
    model = model_of(family)
    ids, plain = tokens(), twin(model)
    before = outputs(model, ids)
    conversion = heedful.convert(model, KnockingHeads(("q", "k", "v")))
    exact = 1e-4 if family == "t5gemma" else 1e-10  # whose own softmax is in fp32
    torch.testing.assert_close(outputs(model, ids), before, rtol=0, atol=exact)
    stir(model, 0.3, only=".heedful.")
    folded = dict(plain.named_modules())
    for path, module in model.named_modules():
        if not hasattr(module, PROJECTION_HOOKS):
            continue
        shared = module.heedful.shared
        for part, tensors in parts_of(folded[path]).items():
            for x in tensors:
                if x.ndim == 3 or (x.ndim == 2 and hasattr(folded[path], "query_key_value")):
                    x.copy_(torch.einsum("hd...,dc->hc...", x, shared[part].to(x)))
                else:
                    fold(x, shared[part].to(x))
    actual = outputs(model, ids)
    assert (actual - before).abs().max() > 1e-2
    torch.testing.assert_close(actual, outputs(plain, ids), rtol=0, atol=exact)
    conversion.revert()
    assert torch.equal(outputs(model, ids), before)


def clipping():
    config = DbrxConfig(
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": 40},
        attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    )
    return AutoModelForCausalLM.from_config(config)


def gated():
    model = tiny()
    model.model.layers[1].self_attn.q_proj = nn.Linear(32, 64, bias=False)
    return model


def without_names():
    model = tiny()
    attention = model.model.layers[0].self_attn
    attention.other, attention.q_proj = attention.q_proj, None
    return model


REFUSED = {
    "not every channel that its Wqkv gives reaches its attention as it is": clipping,
    "its q_proj gives 64 channels, and its queries, keys and values have 32, 16 and 16": gated,
    r"it has neither projections of .* \(q_proj, k_proj, v_proj\) nor one": without_names,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_projections_that_cannot_be_distinguished_are_refused(reason):
    model = REFUSED[reason]()
    kind = type(model)
    with pytest.raises(ValueError, match=f"before the rotary embedding, because {reason}"):
        heedful.convert(model, KnockingHeads())
    assert type(model) is kind and not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("config", [Canon(), KnockingHeads(("q",))], ids=str)
def test_a_model_without_numbers_is_converted(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny("qwen3").config)
        assert heedful.convert(model, config).layers == (0, 1, 2)


def test_a_layer_of_neighbours_beside_others():
    """Rows from before the rotation are the layer's own; other layers have none."""
    model, ids = tiny(), tokens(2, 12)
    varied(model, {Canon("B"): [0], "selective": [1], "gated": [2]})
    cache, parts = heedful.new_cache(model), []
    with torch.no_grad():
        for piece in ids.split([5, 1, 4, 1, 1], dim=1):
            parts.append(model(input_ids=piece, cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, 1), logits(model, ids), rtol=0, atol=1e-11)
    shapes = [[tuple(x.rows.shape) for x in layer._inputs.values()] for layer in cache.layers]
    assert shapes == [[(2, 3, 4, 8), (2, 3, 2, 8), (2, 3, 2, 8)], [], []]
