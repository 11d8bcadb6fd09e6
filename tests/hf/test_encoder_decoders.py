"""Encoder-decoders: what convert, generate, save and revert promise, family by family."""

import copy
import itertools

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, BartForCausalLM, DynamicCache, EncoderDecoderCache

import heedful
from heedful import eviction
from heedful.hf.auto_classes import register
from heedful.hf.versions import cache_argument, cache_of
from heedful.nn import Grouped, MultiToken, Selective, Standard, mechanism
from heedful.testing import assert_causal
from helpers.cached import tensors_in
from helpers.crosses import usually
from helpers.encoder_families import ENCODER_DECODERS, exactly, logits, tiny
from helpers.families import VOCABULARY, checkpoint_layers, ragged_mask, stir, tokens, varied

every = pytest.mark.parametrize("family", ENCODER_DECODERS)
MTA = MultiToken(conv=(3, 5), post_conv=(2, 3), conv_every=1)
BY_NAME = (
    "standard", "talking-heads", "selective", "differential",
    "forgetting",
)  # fmt: skip
MECHANISMS = {name: mechanism(name) for name in BY_NAME} | {
    "mta": MTA,
    "grouped": Grouped(size=2, window=1),  # two groups fit in T5Gemma's window of 4
    "grouped-cif": Grouped("cif", size=2, longest=3, window=1, share=2, refine="attention"),
}
FEW = ("t5", "t5gemma"), ("mta", "grouped-cif")
pairs = pytest.mark.parametrize(
    ("family", "name"), usually(itertools.product(ENCODER_DECODERS, MECHANISMS), *FEW)
)
UNCHANGING = {
    **{name: MECHANISMS[name] for name in ("standard", "talking-heads")},
    "mta": MultiToken(conv_every=1),
    "selective with an extra head": Selective(selector="extra"),
}
EVERYWHERE = ("decoder", "encoder", "cross")
ROLES = dict.fromkeys(("selective", "forgetting"), ("decoder",))


def converted(family: str, mechanism: object, **options):
    """A converted model whose parameters are no identities."""
    return varied(tiny(family), mechanism, **options)


@pytest.mark.crossed
@every
@pytest.mark.parametrize("mechanism", UNCHANGING)
@pytest.mark.parametrize("of_source", [None, "left", "right"])
@pytest.mark.parametrize("of_target", [None, "left"])
def test_logits_are_unchanged(family, mechanism, of_source, of_target):
    dtype, tolerance = exactly(family)
    model, source, target = tiny(family, dtype), tokens(2, 11), tokens(2, 13)
    mask = of_source and ragged_mask(left=of_source == "left")
    inputs = of_target and ragged_mask(2, 13)
    before = logits(model, source, target, mask, decoder_attention_mask=inputs)
    heedful.convert(model, UNCHANGING[mechanism])
    actual = logits(model, source, target, mask, decoder_attention_mask=inputs)
    real = torch.ones_like(target).bool() if inputs is None else inputs.bool()
    torch.testing.assert_close(actual[real], before[real], rtol=0, atol=tolerance)


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["t5", "bart", "marian", "mbart"])
@pytest.mark.parametrize("mechanism", UNCHANGING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_whole_rows_are_unchanged_to_the_last_bit(family, mechanism, dtype):
    """With as many target tokens: of fewer, the maps are computed by the form for decoding."""
    model, source, target = tiny(family, dtype), tokens(2, 11), tokens(2, 13)
    before = logits(model, source, target)
    heedful.convert(model, UNCHANGING[mechanism])
    assert torch.equal(logits(model, source, target), before)


@every
def test_each_place_changes_logits_by_itself(family):
    source, target, results = tokens(2, 11), tokens(2, 7), []
    for where in (*EVERYWHERE, None):
        torch.manual_seed(0)
        model = converted(family, MTA, where=where)
        marked = {name.split(".heedful.")[0] for name in model._heedful.parameters()}
        assert all(("encoder." in name) == (where == "encoder") for name in marked) or where is None
        results.append(logits(model, source, target))
        assert all(not torch.equal(results[-1], before) for before in results[:-1])


@pairs
def test_no_target_token_changes_an_earlier_logit(family, name):
    model, source = converted(family, MECHANISMS[name]), tokens(1, 11)
    assert_causal(lambda ids: logits(model, source, ids), tokens(1, 7), dim=1)


MODES = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "samples": {"do_sample": True, "temperature": 5.0, "suppress_tokens": [0]},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


@pytest.mark.crossed
@pairs
@pytest.mark.parametrize("mode", MODES)
def test_cached_generation_is_the_uncached_one(family, name, mode):
    """Of sources with padding; what is looked up comes in one row."""
    rows = 1 if mode == "looked up" else 3
    model, source = converted(family, MECHANISMS[name]), tokens(3, 11)[:rows]
    mask, uncached = ragged_mask(3, left=False)[:rows], MODES[mode]
    if mode == "looked up":
        uncached = MODES["greedy"]
    actual = []
    for cached, options in ((True, MODES[mode]), (False, uncached)):
        torch.manual_seed(1)
        options = {"attention_mask": mask, "max_new_tokens": 7, "use_cache": cached} | options
        actual.append(model.generate(source, **options))
    assert torch.equal(*actual)
    assert mode != "samples" or len(actual[0].unique()) > 8


@pairs
def test_a_ragged_batch_is_its_rows(family, name):
    model = converted(family, MECHANISMS[name])
    rows = [tokens(1, n) for n in (3, 8)]
    source = torch.cat([torch.nn.functional.pad(row, (0, 8 - row.shape[1])) for row in rows])
    options = {"max_new_tokens": 5, "do_sample": False}
    together = model.generate(source, attention_mask=(source != 0).long(), **options)
    for row, actual in zip(rows, together, strict=True):
        alone = model.generate(row, attention_mask=torch.ones_like(row), **options)[0]
        assert torch.equal(actual[: len(alone)], alone)


CACHES = {
    "new": heedful.new_cache,
    "stock": lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "its own": lambda model: None,
}


@pytest.mark.crossed
@pairs
@pytest.mark.parametrize("kind", CACHES)
def test_target_tokens_in_pieces_are_the_whole_row(family, name, kind):
    """With left padding in the target."""
    model, source, target = converted(family, MECHANISMS[name]), tokens(2, 11), tokens(2, 12)
    mask, target_mask = ragged_mask(left=False), ragged_mask(2, 12, left=True)
    positions = {}
    if family == "t5gemma":
        positions["decoder_position_ids"] = (target_mask.cumsum(1) - 1).clamp(min=0)
    more = {"decoder_attention_mask": target_mask}
    expected = logits(model, source, target, mask, **more, **positions)
    cache, parts, position = CACHES[kind](model), [], 0
    for piece in target.split([5, 1, 3, 1, 2], dim=1):
        at, position = slice(position, position + piece.shape[1]), position + piece.shape[1]
        with torch.no_grad():
            out = model(
                input_ids=source, attention_mask=mask, decoder_input_ids=piece,
                decoder_attention_mask=target_mask[:, :position], cache=cache, use_cache=True,
                **{name: x[:, at] for name, x in positions.items()},
            )  # fmt: skip
        cache = cache_of(out)
        parts.append(out.logits)
    real = target_mask.bool()
    torch.testing.assert_close(torch.cat(parts, 1)[real], expected[real], rtol=0, atol=1e-11)


def test_a_padded_target_row_is_the_row_alone():
    """Of T5, whose positions are relative: cross-attention's kernels skip the padding above."""
    for name in MECHANISMS:
        model, source, target = converted("t5", MECHANISMS[name]), tokens(3, 11), tokens(3, 9)
        mask = ragged_mask(3, 9, left=True)
        padded = logits(model, source, target, decoder_attention_mask=mask)
        for row, real in enumerate(mask.bool()):
            alone = logits(model, source[row : row + 1], target[row : row + 1, real])
            torch.testing.assert_close(padded[row, real], alone[0], rtol=0, atol=1e-11)


@every
@pytest.mark.parametrize("name", ["mta", "selective"])
def test_the_cache_knows_its_bytes(family, name):
    model, source = converted(family, MECHANISMS[name]), tokens(2, 11)
    cache = heedful.new_cache(model)
    assert isinstance(cache, EncoderDecoderCache) and cache.nbytes == 0
    with torch.no_grad():
        model(input_ids=source, decoder_input_ids=tokens(2, 6), cache=cache)
    parts = (cache.self_attention_cache, cache.cross_attention_cache)
    storages = [x.untyped_storage() for part in parts for x in tensors_in(part.layers)]
    expected = sum({x.data_ptr(): x.nbytes() for x in storages}.values())
    assert cache.nbytes == expected <= cache.peak_nbytes
    narrow = family == "t5gemma"  # windows of 4, of which the newest token's own is not kept
    assert cache.tokens == ([3, 6, 3] if narrow and name == "selective" else [6, 6, 6])
    copied = copy.deepcopy(cache)
    cache.reset()
    assert cache.nbytes == 0 and cache.get_seq_length() == 0 and copied.get_seq_length() == 6


@pairs
def test_a_checkpoint_comes_back_bit_for_bit(family, name, tmp_path):
    model = tiny(family, torch.float32)
    conversion = heedful.convert(model, MECHANISMS[name])
    stir(model, 0.1, only=".heedful.")
    model.save_pretrained(tmp_path)
    again = heedful.load(tmp_path)
    assert again._heedful.where == conversion.where and type(again) is type(model)
    own, saved = model.state_dict(), again.state_dict()
    assert own.keys() == saved.keys() and all(torch.equal(own[key], saved[key]) for key in own)
    source, target, mask = tokens(2, 11), tokens(2, 7), ragged_mask()
    actual, expected = (logits(x, source, target, mask) for x in (again, model))
    if name == "grouped-cif":
        # A projection to one number adds up in another order where its weights lie elsewhere.
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=32 * 2**-23 * expected.abs().max()
        )
    else:
        assert torch.equal(actual, expected)


def test_auto_classes_load_a_checkpoint(tmp_path):
    model = converted("t5", MTA)
    model.save_pretrained(tmp_path)
    register()
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    source, target = tokens(2, 11), tokens(2, 7)
    actual = logits(again.double(), source, target)
    torch.testing.assert_close(actual, logits(model, source, target))


@pairs
def test_revert_restores_everything(family, name):
    model, source, target = tiny(family), tokens(2, 11), tokens(2, 7)

    def state() -> dict:
        return {
            "classes": [type(m) for m in model.modules()],
            "keys": list(model.state_dict()),
            "config": model.config.to_dict(),
            "implementations": [
                m.config._attn_implementation for m in model.modules() if hasattr(m, "config")
            ],
            "generation": model.generation_config.to_dict(),
        }

    before, at_first = state(), logits(model, source, target)
    heedful.convert(model, MECHANISMS[name])
    assert all(p.requires_grad for p in model._heedful.parameters().values())
    assert heedful.revert(model) is model
    assert state() == before
    assert torch.equal(logits(model, source, target), at_first)


@pairs
def test_gradients_reach_every_parameter(family, name):
    model, source = converted(family, MECHANISMS[name]), tokens(2, 11)
    model.train()
    model(input_ids=source, attention_mask=ragged_mask(), labels=tokens(2, 9)).loss.backward()
    for parameter, p in model.named_parameters():
        unused = "embed_positions" in parameter or "lm_head" in parameter
        assert unused or (p.grad is not None and bool((p.grad != 0).any())), parameter


@pytest.mark.parametrize("mechanism", UNCHANGING)
def test_the_relative_bias_of_t5_learns_as_before(mechanism):
    """Of encoder and decoder, whose table all layers share."""
    model, source, target = tiny("t5"), tokens(2, 11), tokens(2, 9)
    tables = [p for name, p in model.named_parameters() if "relative_attention_bias" in name]

    def grads() -> list[Tensor]:
        loss = model(input_ids=source, attention_mask=ragged_mask(), labels=target).loss
        return torch.autograd.grad(loss, tables)

    before = grads()
    assert len(before) == 2
    heedful.convert(model, UNCHANGING[mechanism])
    for actual, expected in zip(grads(), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@every
def test_gradient_checkpointing_hands_over_the_same(family):
    model, source, target = converted(family, MTA), tokens(2, 11), tokens(2, 9)
    model.train()
    options = {"attention_mask": ragged_mask(), "decoder_attention_mask": ragged_mask(2, 9)}

    def grads() -> list[Tensor]:
        loss = model(input_ids=source, labels=target, use_cache=False, **options).loss
        own = list(model._heedful.parameters().values())
        return torch.autograd.grad(loss, own)

    before = grads()
    checkpoint_layers(model)
    for actual, expected in zip(grads(), before, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


def test_mechanisms_by_place():
    """The same layers may have one mechanism in the encoder and another in the decoder."""
    plan = {"mta": range(2), "selective": range(3)}
    model = tiny("t5")
    with pytest.raises(ValueError, match=r"layers must have one mechanism each, .* \[0, 1\]"):
        heedful.convert(model, plan)
    conversion = heedful.convert(model, plan, where={"mta": "encoder", "selective": "decoder"})
    assert conversion.where == {MultiToken(): ("encoder",), Selective(): ("decoder",)}
    kinds = {
        name: type(module.heedful).__name__
        for name, module in model.named_modules()
        if hasattr(module, "heedful")
    }
    for name, kind in kinds.items():
        encoder, cross = name.startswith("encoder"), "EncDec" in name
        expected = "MultiToken" if encoder else "Standard" if cross else "Selective"
        assert kind == f"{expected}Attention", name


def test_where_a_mechanism_stands():
    for name, config in MECHANISMS.items():
        assert heedful.convert(tiny("bart"), config).where == {config: ROLES.get(name, EVERYWHERE)}
    assert heedful.convert(tiny("bart"), "mta", where=["cross", "encoder"]).where == {
        MultiToken(): ("encoder", "cross")
    }
    assert heedful.convert(tiny("t5"), Standard(window=4)).where == {
        Standard(window=4): ("decoder", "encoder")
    }


def test_an_encoders_kernels_are_centred_over_queries():
    model = tiny("t5")
    heedful.convert(model, MultiToken(conv_every=1))
    encoder, decoder = model.encoder.block[0].layer[0], model.decoder.block[0].layer
    assert encoder.SelfAttention.heedful.conv.shape == (4, 7, 11)
    assert not encoder.SelfAttention.heedful.tails
    for attention in (decoder[0].SelfAttention, decoder[1].EncDecAttention):
        assert attention.heedful.conv.shape == (4, 6, 11)
        assert attention.heedful.tails == {"queries": 10}


WRONG_ROLES = {
    "where='encoder': Selective.* is not defined there, but in decoder attention only": {
        "mechanism": "selective",
        "where": "encoder",
    },
    "where='cross': Selective": {"mechanism": "selective", "where": ("decoder", "cross")},
    "where='cross': Standard.window=3. is not defined there": {
        "mechanism": Standard(window=3),
        "where": "cross",
    },
    "where must be one or several of decoder, encoder, cross, got 'middle'": {"where": "middle"},
    "where must be one or several of .* got 3": {"where": 3},
    r"where must be one or several of .* got \[\]": {"where": []},
    r"layers must be among 0 to 1, got \[2\]": {"where": "encoder", "layers": [2]},
    "where must be a role or several where mechanism is a single one": {"where": {"mta": "cross"}},
    r"where must name the roles of the same mechanisms, got \['mta'\] for \['standard'\]": {
        "mechanism": {"standard": [0]},
        "where": {"mta": "cross"},
    },
}


def test_wrong_places():
    model = tiny("t5")
    before = [type(m) for m in model.modules()]
    for message, options in WRONG_ROLES.items():
        with pytest.raises(ValueError, match=message):
            heedful.convert(model, **({"mechanism": "mta"} | options))
        assert [type(m) for m in model.modules()] == before


@every
def test_padding_of_the_wrong_shape(family):
    model, source, target = converted(family, "mta"), tokens(2, 11), tokens(2, 7)
    ones = torch.ones(2, 16, dtype=torch.long)
    with pytest.raises(ValueError, match=r"attention_mask must .*\[2, 11\].*got \(2, 10\)"):
        logits(model, source, target, ones[:, :10])
    with pytest.raises(
        ValueError, match=r"attention_mask must have one entry per token \(7\), got 8"
    ):
        logits(model, source, target, decoder_attention_mask=ones[:, :8])
    encoded = model.get_encoder()(input_ids=source)
    with pytest.raises(ValueError, match=r"encoder_attention_mask .* \[2, 11\], one .* \(2, 16\)"):
        logits(model, None, target, ones, encoder_outputs=encoded)
    with pytest.raises(
        ValueError, match=r"attention_mask must be 2-D \[B, tokens\] .* \(2, 1, 7, 11\)"
    ):
        logits(model, None, target, torch.ones(2, 1, 7, 11), encoder_outputs=encoded)


@pytest.mark.parametrize("family", ["bart", "t5gemma"])
def test_budgets_are_of_the_self_attention(family):
    model, source = converted(family, "selective"), tokens(2, 11)
    cache = heedful.new_cache(model, eviction.StreamingLLM(tokens=6, sinks=1, recent=2))
    actual = model.generate(
        source, cache=cache, do_sample=False, min_new_tokens=12, max_new_tokens=12
    )
    assert actual.shape[1] > 8 and max(cache.tokens) <= 6, actual
    assert [layer.length for layer in cache.cross_attention_cache.layers] == [11] * 3


def test_what_caches_of_encoder_decoders_refuse():
    t5 = converted("t5", MTA)
    with pytest.raises(
        ValueError, match=r"StreamingLLM does not support this family, .* position bias"
    ):
        heedful.new_cache(t5, eviction.StreamingLLM(tokens=6, sinks=1, recent=2))
    source, target, cache = tokens(2, 11), tokens(2, 7), heedful.new_cache(t5)
    t5(input_ids=source, decoder_input_ids=target, cache=cache)
    with pytest.raises(ValueError, match=r"crop can take back 0 tokens here, asked for 1"):
        cache.crop(-1)
    cache.is_updated.clear()
    with pytest.raises(ValueError, match=r"has the keys of a source already, .* reset\(\)"):
        t5(input_ids=source, decoder_input_ids=target, cache=cache)
    filled = EncoderDecoderCache(DynamicCache(), DynamicCache())
    heedful.revert(t5)(input_ids=source, decoder_input_ids=target, **cache_argument(t5, filled))
    heedful.convert(t5, MTA, where="cross")
    with pytest.raises(ValueError, match=r"keys and values only of the source, .*\(the newest 3 q"):
        t5(input_ids=source, decoder_input_ids=target[:, :1], cache=filled)


def test_taking_tokens_back_leaves_the_cache_as_it_was():
    for family in ENCODER_DECODERS:
        model, source, target = converted(family, MTA), tokens(2, 11), tokens(2, 12)
        caches = [heedful.new_cache(model) for _ in range(2)]
        with torch.no_grad():
            for cache in caches:
                model(input_ids=source, decoder_input_ids=target[:, :6], cache=cache)
            caches[0].activate_past_recording()
            model(input_ids=source, decoder_input_ids=target[:, 6:9], cache=caches[0])
            caches[0].crop(-2)
            model(input_ids=source, decoder_input_ids=target[:, 6:7], cache=caches[1])
            actual = [
                model(input_ids=source, decoder_input_ids=target[:, 9:], cache=c).logits
                for c in caches
            ]
        torch.testing.assert_close(*actual, rtol=0, atol=1e-12)


def test_packed_documents_are_refused_where_cross_attention_would_mix_them():
    model, source, target = converted("t5gemma", "mta"), tokens(1, 11), tokens(1, 7)
    at = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="position_ids start again, and cross-attention would mix"):
        logits(model, source, target, decoder_position_ids=at)


def test_the_memory_loss_of_an_encoder_decoder():
    model, source = converted("t5", "selective"), tokens(2, 11)
    memory = heedful.MemoryLoss(model)
    model(input_ids=source, labels=tokens(2, 9), use_cache=False)
    value = memory()
    assert 0 < value.item() < 9 and value.requires_grad


def test_a_look_at_two_rows_is_refused():
    with pytest.raises(ValueError, match="model must be one stack of layers, and"):
        heedful.look(converted("bart", "mta"), tokens(1, 5))


def test_a_decoder_with_cross_attention_works_alone():
    """As BartForCausalLM, which is given no source."""
    model = BartForCausalLM(ENCODER_DECODERS["bart"]()).double().eval()
    stir(model, 0.2)
    ids = tokens(2, 9)
    before = model(input_ids=ids, use_cache=False).logits
    heedful.convert(model, "mta")
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, before)
    stir(model, 0.2, only=".heedful.")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": VOCABULARY - 1}
    expected = model.generate(ids, use_cache=False, **options)
    with pytest.warns(UserWarning, match="family's cache is not enough"):
        assert torch.equal(model.generate(ids, use_cache=True, **options), expected)
