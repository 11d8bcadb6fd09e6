"""Models that also take images: their text part is converted, and images still look ahead."""

import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import heedful
from helpers.families import logits, ragged_mask, stir, tokens

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def seeing_model():
    text = SMALL | {"head_dim": 16, "intermediate_size": 48, "num_key_value_heads": 2}
    text |= {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=text | {"vocab_size": 64},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    model = Gemma3ForConditionalGeneration(config).double().eval()
    stir(model, 0.2)
    return model


def test_of_a_model_that_sees_only_the_text_part_is_converted():
    model = seeing_model()
    ids = tokens(1, 14)
    ids[0, 3:7] = 60
    inputs = {"pixel_values": torch.randn(1, 3, 28, 28).double()}
    # As its processor gives them: tokens of an image see each other, the later ones too.
    marked = inputs | {"token_type_ids": (ids == 60).long(), "attention_mask": torch.ones_like(ids)}
    before, apart = logits(model, ids, **inputs), logits(model, ids, **marked)
    assert not torch.allclose(before, apart, atol=1e-3)
    classes = [type(m) for m in model.model.vision_tower.modules()]
    conversion = heedful.convert(model, "mta")
    assert [type(m) for m in model.model.vision_tower.modules()] == classes
    torch.testing.assert_close(logits(model, ids, **inputs), before, rtol=0, atol=1e-12)
    torch.testing.assert_close(logits(model, ids, **marked), apart, rtol=0, atol=1e-12)
    stir(model, 0.2, only=".heedful.")
    assert not torch.allclose(logits(model, ids, **marked), apart, atol=1e-3)
    conversion.revert()
    assert torch.equal(logits(model, ids, **marked), apart)


def test_a_model_that_sees_generates_from_left_padded_rows_with_a_cache():
    model, ids = seeing_model(), tokens(2, 9)
    mask = ragged_mask(2, 9)
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids.where(mask.bool(), 0), **options)
    heedful.convert(model, "talking-heads")
    assert torch.equal(model.generate(ids.where(mask.bool(), 0), **options), expected)
