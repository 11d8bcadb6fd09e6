"""Families that cap logits or have sinks: training and maps as their own attention."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

import heedful
from heedful.nn import MultiToken, Selective, Standard, TalkingHeads
from helpers import encoder_families
from helpers.encoder_families import ENCODER_DECODERS
from helpers.families import EAGER, exactly, logits, ragged_mask, stir, tiny, tokens, twin

each_family = pytest.mark.parametrize("family", EAGER)
UNCHANGING = {
    "standard": Standard(),
    "mta": MultiToken(conv_every=1, mix=2),
    "talking-heads": TalkingHeads(),
    "selective": Selective(selector="extra"),
}


def gradients(model, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.train()
    with exactly():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@each_family
@pytest.mark.parametrize("mechanism", UNCHANGING)
def test_one_step_of_training(family, mechanism):
    """From the family's own gradients, and the mechanism's beside them."""
    model, ids = tiny(family), tokens(2, 13)
    own = twin(model)
    conversion = heedful.convert(model, UNCHANGING[mechanism])
    (before, expected), (loss, actual) = gradients(own, ids), gradients(model, ids)
    torch.testing.assert_close(loss, before, rtol=0, atol=1e-10)
    # The family's norms and rotations are in fp32.
    for name, grad in expected.items():
        torch.testing.assert_close(actual[name], grad, rtol=1e-5, atol=1e-6)
    if mechanism != "selective":  # whose query learns after its key
        assert all(bool(p.grad.any()) for p in conversion.parameters().values())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids, use_cache=False).loss < loss


@each_family
def test_maps_are_those_of_the_family(family):
    model, ids = tiny(family, torch.float32), tokens(1, 11)
    with torch.no_grad():
        expected = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    heedful.convert(model, "mta")
    for index, layer in heedful.look(model, ids).items():
        torch.testing.assert_close(layer.weights, expected[index][0], rtol=0, atol=2e-5)


def test_the_sinks_of_the_small_models_change_much_and_learn():
    model, ids = tiny("gpt_oss"), tokens()
    heedful.convert(model, "mta")
    before = logits(model, ids)
    _, grads = gradients(model, ids)
    sinks = [name for name in grads if name.endswith("self_attn.sinks")]
    assert len(sinks) == 3 and all(bool((grads[name] != 0).all()) for name in sinks)
    with torch.no_grad():
        for name in sinks:
            model.get_parameter(name).sub_(30)
    assert (logits(model, ids) - before).abs().max() > 1e-2


def capped_t5gemma():
    config = ENCODER_DECODERS["t5gemma"]()
    for part in (config.encoder, config.decoder):
        part.attn_logit_softcapping = 2.0
    # SDPA drops the cap without a word, which 5.17 takes by default.
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    stir(model, 0.3)
    return model


@pytest.mark.parametrize("mechanism", UNCHANGING)
def test_capped_encoder_decoders(mechanism):
    """T5Gemma, in fp32 as everywhere; a cap that changes much."""
    model, source, target = capped_t5gemma(), tokens(2, 11), tokens(2, 13)
    own = twin(model)
    before = encoder_families.logits(model, source, target, ragged_mask())
    heedful.convert(model, UNCHANGING[mechanism])
    actual = encoder_families.logits(model, source, target, ragged_mask())
    torch.testing.assert_close(actual, before, rtol=0, atol=1e-4)
    for module in own.modules():
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
    uncapped = encoder_families.logits(own, source, target, ragged_mask())
    assert (uncapped - before).abs().max() > 1e-2
    options = {"max_new_tokens": 6, "do_sample": False}
    actual = (model.generate(source, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(*actual)


def test_the_cap_of_the_small_models_changes_much():
    model, ids = tiny("gemma2"), tokens()
    uncapped = tiny("gemma2", attn_logit_softcapping=None)
    uncapped.load_state_dict(model.state_dict())
    actual = [logits(heedful.convert(x, "standard").model, ids) for x in (model, uncapped)]
    assert (actual[0] - actual[1]).abs().max() > 1e-2
