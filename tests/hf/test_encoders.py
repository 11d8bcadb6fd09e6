"""Encoders alone: BERT, and ModernBERT with its windows to both sides."""

import pytest
import torch
from torch import Tensor
from transformers import T5EncoderModel

import heedful
from heedful.nn import (
    Differential,
    MultiToken,
    Selective,
    Standard,
    TalkingHeads,
)
from helpers.encoder_families import ENCODER_DECODERS, ENCODERS, tiny
from helpers.families import ragged_mask, stir, tokens, varied

every = pytest.mark.parametrize("family", ENCODERS)
IDENTITIES = {
    "standard": Standard(),
    "mta": MultiToken(conv_every=1),
    "talking-heads": TalkingHeads(),
}
MECHANISMS = IDENTITIES | {
    "mta": MultiToken(conv=(3, 5), post_conv=(2, 3), conv_every=1),
    "differential": Differential(),
}
each = pytest.mark.parametrize("name", MECHANISMS)
MASKS = {"whole": None, "left": ragged_mask(left=True), "right": ragged_mask(left=False)}


@torch.no_grad()
def logits(model, ids: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    return model(input_ids=ids, attention_mask=mask, **options).logits


def converted(family: str, name: str):
    return varied(tiny(family), MECHANISMS[name])


@every
@pytest.mark.parametrize("name", IDENTITIES)
def test_logits_are_unchanged(family, name):
    model, ids = tiny(family), tokens()
    before = {kind: logits(model, ids, mask) for kind, mask in MASKS.items()}
    heedful.convert(model, IDENTITIES[name])
    for kind, mask in MASKS.items():
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        torch.testing.assert_close(
            logits(model, ids, mask)[real], before[kind][real], rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", IDENTITIES)
def test_logits_of_whole_rows_are_unchanged_to_the_last_bit(name):
    model, ids = tiny("bert", torch.float32), tokens()
    before = logits(model, ids)
    heedful.convert(model, IDENTITIES[name])
    assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("name", MECHANISMS)
def test_right_padding_is_as_if_it_were_not_there(name):
    """Of BERT, whose positions count from the row's first token."""
    model, ids = converted("bert", name), tokens(3)
    mask = ragged_mask(3, left=False)
    padded = logits(model, ids, mask)
    for row, real in enumerate(mask.bool()):
        alone = logits(model, ids[row : row + 1, real])[0]
        torch.testing.assert_close(padded[row, real], alone, rtol=0, atol=1e-11)


@every
@each
def test_packed_documents_are_separate_documents(family, name):
    model, lengths = converted(family, name), [5, 1, 7]
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = logits(model, ids, position_ids=positions)
    for part, alone in zip(packed.split(lengths, 1), ids.split(lengths, 1), strict=True):
        torch.testing.assert_close(part, logits(model, alone), rtol=0, atol=1e-11)


@every
@each
def test_saved_loaded_trained_and_reverted(family, name, tmp_path):
    model, ids = tiny(family, torch.float32), tokens()
    at_first = logits(model, ids)
    conversion = heedful.convert(model, MECHANISMS[name])
    assert conversion.where == {MECHANISMS[name]: ("encoder",)}
    stir(model, 0.1, only=".heedful.")
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(bool(p.grad.any()) for p in conversion.parameters().values())
    heedful.revert(model)
    assert torch.equal(logits(model, ids), at_first)


def test_a_look_at_an_encoder():
    model, ids = converted("bert", "mta"), tokens(1, 9)
    looks = heedful.look(model, ids)
    assert sorted(looks) == [0, 1, 2] and looks[0].weights.shape == (4, 9, 9)
    assert bool((looks[0].weights.triu(1) != 0).any()), "later tokens are seen"


@every
def test_causal_mechanisms_asked_of_an_encoder(family):
    for mechanism in ("selective", Selective(selector="extra")):
        with pytest.raises(ValueError, match=r"mechanism Selective.* is not defined in encoder at"):
            heedful.convert(tiny(family), mechanism)
    with pytest.raises(ValueError, match=r"where='decoder': .* has no such attention, but encoder"):
        heedful.convert(tiny(family), "mta", where="decoder")


@every
def test_what_encoders_refuse(family):
    model, ids = converted(family, "mta"), tokens()
    with pytest.raises(ValueError, match="is an encoder, which keeps nothing between calls"):
        heedful.new_cache(model)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 11\], one .* \(2, 9\)"):
        logits(model, ids, torch.ones(2, 9, dtype=torch.long))


def test_the_encoder_of_t5_alone():
    """Two-sided, with its position bias."""
    model = T5EncoderModel(ENCODER_DECODERS["t5"]()).double().eval()
    stir(model, 0.3)
    ids, mask = tokens(), ragged_mask(left=False)
    before = model(input_ids=ids, attention_mask=mask)[0]
    assert heedful.convert(model, "mta").where == {MultiToken(): ("encoder",)}
    after = model(input_ids=ids, attention_mask=mask)[0]
    real = mask.bool()
    torch.testing.assert_close(after[real], before[real], rtol=0, atol=1e-12)
