"""Who sees whom in a converted model: what the family says, packed documents, and refusals."""

import gc
import itertools
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Lfm2Config
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

import heedful
from heedful.hf.family.mask import _window_of, visibility_for
from heedful.hf.versions import cache_of
from heedful.nn import Differential, MultiToken, Selective, TalkingHeads
from heedful.ops import Visibility
from helpers.families import (
    SMALL,
    checkpoint_layers,
    chunked,
    logits,
    tiny,
    tokens,
    twin,
    varied,
    windowed,
)

MECHANISMS = {
    "standard": "standard",
    "mta": MultiToken(conv_every=1),
    "talking-heads": TalkingHeads(),
    "selective": Selective(),
    "differential": Differential(),
}


def windowed_above():
    """A Qwen2 with a window in its last two layers."""
    return tiny("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=1)


FAMILIES = {"chunks": chunked, "window": windowed, "window in some layers": windowed_above}


def left_padded(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return mask


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_says_in_its_mask_function_holds(family):
    model, ids = FAMILIES[family](), tokens(2, 17)
    masks = (None, torch.ones_like(ids), left_padded(ids), left_padded(ids).flip(1))
    before = [logits(model, ids, attention_mask=mask) for mask in masks]
    generated = [generate(model, ids, mask) for mask in masks[1:3]]
    heedful.convert(model, "standard")
    for mask, expected in zip(masks, before, strict=True):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        actual = logits(model, ids, attention_mask=mask)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-11)
    for mask, expected in zip(masks[1:3], generated, strict=True):
        assert torch.equal(generate(model, ids, mask), expected)


def generate(model, ids, mask):
    """With a cache, past the window or the chunk."""
    ids = ids.where(mask.bool(), 0)
    return model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)


def positions_of(lengths: list[int], padding: int = 0) -> torch.Tensor:
    parts = [torch.ones(padding).long(), *map(torch.arange, lengths)]
    return torch.cat(parts)[None]


CALLS = list(itertools.product((False, True), (None, "ones", "left"), (False, True)))


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("family", ["llama", "mistral", "chunks"])
def test_packed_documents_are_apart_in_every_call(name, family):
    """With a cache and without, any mask, and in training too."""
    model = chunked() if family == "chunks" else tiny(family)
    varied(model, MECHANISMS[name])
    lengths = [5, 1, 8]
    ids = tokens(1, sum(lengths))
    alone = torch.cat([logits(model, part) for part in ids.split(lengths, 1)], 1)
    for cache, mask, training in CALLS:
        inputs, positions, padding = ids, positions_of(lengths), 0
        if mask == "left":
            padding = 3
            inputs = torch.nn.functional.pad(ids, (padding, 0))
            positions = positions_of(lengths, padding)
        masks = {None: None, "ones": torch.ones_like(inputs), "left": (inputs != 0).long()}
        model.train(training)
        with torch.no_grad():
            actual = model(
                input_ids=inputs,
                attention_mask=masks[mask],
                position_ids=positions,
                use_cache=cache,
            ).logits[:, padding:]
        # A Llama 4 rotates and routes in fp32, whose last digit depends on where a row lies.
        bound = 1e-6 if family == "chunks" else 1e-11
        gap = (actual - alone).abs().max()
        assert gap <= bound, (cache, mask, training, gap)


def test_cumulative_lengths_alone_are_documents():
    model = tiny()
    heedful.convert(model, "mta")
    ids = tokens(1, 12)
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.arange(12)[None]  # as one document's
    apart = logits(model, ids, position_ids=positions_of([5, 7]))
    marked = logits(model, ids, position_ids=positions, cu_seq_lens_q=offsets)
    tail = logits(model, ids[:, 5:])
    torch.testing.assert_close(apart[:, 5:], tail, rtol=0, atol=1e-11)
    assert not torch.allclose(marked[:, 5:], logits(model, ids)[:, 5:], atol=1e-3)
    # Only differences of positions count, but the rotary embedding is computed in fp32.
    torch.testing.assert_close(marked[:, 5:], tail, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fill", [0, 1])
def test_positions_of_padding_start_no_document(fill):
    """As `generate` fills them."""
    model = tiny()
    heedful.convert(model, "standard")
    ids = tokens(2, 11)
    mask = left_padded(ids)
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, fill)
    actual = logits(model, ids, attention_mask=mask, position_ids=positions)
    torch.testing.assert_close(actual[1, 4:], logits(model, ids[1:, 4:])[0], rtol=0, atol=1e-11)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for start, stop in ((0, 3), (3, 5), (5, 11)):
            out = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=positions[:, start:stop],
                cache=cache,
            )
    torch.testing.assert_close(out.logits[1], actual[1, 5:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("positions", [[[0, 1]], [[4, 0]], [[3, 3]]], ids=str)
def test_a_restart_that_continues_a_filled_cache_is_refused(positions):
    model = tiny()
    heedful.convert(model, "standard")
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens(1, 4), cache=cache)
    with pytest.raises(ValueError, match="position_ids start again in a step that continues a fil"):
        model(input_ids=tokens(1, 2), position_ids=torch.tensor(positions), cache=cache)
    assert cache.get_seq_length() == 4


def test_a_cache_of_packed_documents_is_not_continued():
    model = tiny()
    heedful.convert(model, "standard")
    packed = cache_of(model(input_ids=tokens(1, 9), position_ids=positions_of([5, 4])))
    with pytest.raises(ValueError, match=r"cache holds packed documents, .* one docum"):
        model(input_ids=tokens(1, 1), position_ids=torch.tensor([[4]]), cache=packed)


def test_an_error_in_a_packed_call_leaves_nothing_behind():
    model = tiny()
    heedful.convert(model, "standard")
    ids = tokens(1, 9)
    before = logits(model, ids)
    with pytest.raises(ValueError, match="attention_mask must be 2-D"):
        mask = torch.ones(1, 1, 9, 9)
        logits(model, ids, position_ids=positions_of([5, 4]), attention_mask=mask)
    assert torch.equal(logits(model, ids), before)


def test_documents_hold_where_a_step_is_computed_again():
    """Gradient checkpointing runs the layers once more in the backward pass, after the forward."""
    model = varied(tiny(num_hidden_layers=2), MultiToken(conv_every=1))
    ids = tokens(1, 9)
    options = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    grads = []
    for checkpointing in (False, True):
        model.train().zero_grad()
        if checkpointing:
            checkpoint_layers(model, {"use_reentrant": False})
        model(**options, position_ids=positions_of([5, 4])).loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for plain, again in zip(*grads, strict=True):
        assert torch.equal(plain, again)


def test_a_model_that_mixes_tokens_elsewhere_refuses_packed_documents():
    sizes = {name: value for name, value in SMALL.items() if "experts" not in name}
    layers = ["conv", "full_attention", "conv"]
    model = AutoModelForCausalLM.from_config(Lfm2Config(**sizes, layer_types=layers)).eval()
    heedful.convert(model, "standard")
    ids = tokens(1, 9)
    logits(model, ids)
    with pytest.raises(ValueError, match=r"layers beside attention .* give each a row of its own"):
        logits(model, ids, position_ids=positions_of([5, 4]))


def look_ahead(batch, head, i, j):
    return j <= i + 1


def forget_multiples_of_three(batch, head, i, j):
    return (j <= i) & ((j % 3 != 0) | (i == j))


def see_images_whole(batch, head, i, j):
    """Tokens 6 to 8 and 9 to 12 are two images."""
    image = (i >= 6) & (j >= 6) & (i < 13) & (j < 13) & ((i < 9) == (j < 9))
    return (j <= i) | image


def documents_of_four(batch, head, i, j):
    return (j <= i) & (i // 4 == j // 4)


@pytest.mark.parametrize(
    "message",
    [
        look_ahead,
        forget_multiples_of_three,
        lambda b, h, i, j: (j <= i) & (i - j < 5 + b),
        lambda b, h, i, j: abs(i - j) < 3,
    ],
)
def test_masks_that_a_visibility_cannot_say(message):
    with pytest.raises(ValueError, match=r"this model hides or shows other tokens .*revert"):
        visibility_for(2, 17, 17, mask_function=message)


def test_masks_that_a_visibility_can_say():
    for queries, keys, first in ((17, 17, 0), (1, 17, 0), (3, 9, 5), (1, 1, 16)):
        token = torch.arange(first, first + keys)
        size = {"kv_length": keys, "kv_offset": first}
        for message, window in (
            (causal_mask_function, None),
            (sliding_window_causal_mask_function(5), 5),
            (sliding_window_causal_mask_function(5), None),  # which it does not tell
            (see_images_whole, None),
            (documents_of_four, None),
            (documents_of_four, 4),
        ):
            visibility = visibility_for(
                2, queries, q_offset=first + keys - queries, **size,
                mask_function=message, local_size=window,
            )  # fmt: skip
            expected = message(0, 0, token[-queries:, None], token)
            actual = visibility.dense(queries, keys, token.device)
            assert torch.equal(actual.expand(2, -1, -1), expected.expand(2, -1, -1))


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def within_recursively(batch, head, i, j):
    """A window of five, if helpers that call each other are right about numbers."""
    return (j <= i) & (i - j < (5 if even(4) else 50))


def test_helpers_that_call_themselves_or_each_other():
    def least(n):
        return n if n < 6 else least(n - 1)

    def of_own_closure(batch, head, i, j):
        return (j <= i) & (i - j < least(9))

    for function in (within_recursively, of_own_closure):
        visibility = visibility_for(2, 17, 17, mask_function=function)
        assert visibility == Visibility(window=5), function


def test_a_list_that_holds_itself():
    widths = [5]
    widths.append(widths)

    def within(batch, head, i, j):
        return (j <= i) & (i - j < widths[0])

    for widths[0] in (5, 3):
        assert visibility_for(2, 17, 17, mask_function=within).window == widths[0]


STARTS = torch.tensor([0, 4])


def test_a_tensor_in_a_function_inside_is_looked_at_in_every_call(monkeypatch):
    def since(batch, head, i, j):
        width = (lambda: STARTS)()[1]
        return (j <= i) & (i - j < width)

    for width in (4, 6):
        monkeypatch.setitem(globals(), "STARTS", torch.tensor([0, width]))
        assert visibility_for(2, 17, 17, mask_function=since).window == width


def test_what_a_mask_function_shows_is_known_without_keeping_the_function():
    def of_width(width):
        return lambda batch, head, i, j: (j <= i) & (i - j < width)

    function = of_width(7)
    assert visibility_for(2, 17, 17, mask_function=function).window == 7
    gone = weakref.ref(function)
    del function
    gc.collect()
    assert gone() is None
    before = _window_of.cache_info().hits
    assert visibility_for(2, 17, 17, mask_function=of_width(7)).window == 7
    assert _window_of.cache_info().hits == before + 1


def test_flags_and_arguments_that_the_door_does_not_know_are_refused_by_name():
    model, ids = tiny(), tokens()
    heedful.convert(model, "mta")
    for options, message in (
        ({"output_attentions": True}, r"output_attentions=True is not supported.*look\("),
        ({"position_bias": torch.zeros(1)}, "LlamaAttention passes position_bias to its attention"),
        ({"sinks": torch.zeros(4)}, "passes sinks to its attention, .* will not drop"),
        ({"s_aux": torch.zeros(4)}, "LlamaAttention passes s_aux to its attention"),
        ({"softcap": 30.0}, "LlamaAttention passes softcap to its attention, .* will not drop"),
    ):
        for mask in (None, torch.ones_like(ids)):
            with pytest.raises(ValueError, match=message):
                logits(model, ids, attention_mask=mask, **options)
    logits(model, ids, num_items_in_batch=torch.tensor(3), position_bias=None)


@pytest.mark.parametrize("name", ["standard", "mta", "talking-heads"])
def test_a_call_that_is_not_causal_lets_tokens_see_later_ones(name):
    model, ids = tiny(), tokens(2, 11)
    masks = (None, torch.ones_like(ids), left_padded(ids), left_padded(ids).flip(1))
    before = [logits(model, ids, attention_mask=mask, is_causal=False) for mask in masks]
    causal = logits(model, ids)
    assert not torch.allclose(before[0], causal, atol=1e-3)
    heedful.convert(model, name)  # all start as the identity
    for mask, expected in zip(masks, before, strict=True):
        real = torch.ones_like(ids).bool() if mask is None else mask.bool()
        actual = logits(model, ids, attention_mask=mask, is_causal=False)
        torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-12)
    assert torch.equal(logits(model, ids), causal)
    heedful.revert(model)
    heedful.convert(model, "selective")
    with pytest.raises(ValueError, match="visibility must be causal for selective attention"):
        logits(model, ids, is_causal=False)


@pytest.mark.parametrize("tokens_of_mask", [9, 13])
def test_a_mask_of_another_length(tokens_of_mask):
    model, ids = tiny(), tokens(2, 11)
    heedful.convert(model, "standard")
    mask = torch.ones(2, tokens_of_mask)
    with pytest.raises(ValueError, match=rf"one entry per token \(11\), got {tokens_of_mask}"):
        logits(model, ids, attention_mask=mask)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, cache=cache)
    with pytest.raises(ValueError, match=r"those in the cache included \(12\), got 1"):
        model(input_ids=ids[:, :1], attention_mask=mask[:, :1], cache=cache)


def test_copies_and_other_models_keep_their_own_documents():
    model, ids = tiny(), tokens(1, 9)
    heedful.convert(model, "standard")
    copied = twin(model)
    packed = logits(model, ids, position_ids=positions_of([5, 4]))
    assert torch.equal(logits(copied, ids, position_ids=positions_of([5, 4])), packed)
    assert not torch.allclose(logits(copied, ids), packed, atol=1e-3)
