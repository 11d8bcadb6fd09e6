"""Cached generation, in every mode and with every mechanism, is the uncached one."""

import copy
import functools
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

import heedful
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.summaries import SummaryCache
from heedful.hf.versions import cache_of
from helpers.cached import MECHANISMS, converted, greedy, in_steps
from helpers.encoder_families import tiny as tiny_encoder
from helpers.families import EAGER, fits, logits, ragged_mask, tiny, tokens, twin

GROUPED = ["grouped", "grouped-sliding", "grouped-cif"]
RIVALS = ["gated", "local-global"]
RIVALS += ["forgetting"]
RIVALS += []
FEW = ["standard", "mta-everywhere", "selective", "selective-extra", "differential", *GROUPED]
FEW += RIVALS
EVERY_GROUPED = [name for name in MECHANISMS if name.startswith("grouped") and name not in FEW]
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt2", "gpt_neox", "qwen3", "phi3", "olmo2", *EAGER]
FITTING = [(name, family) for name in MECHANISMS for family in FAMILIES if fits(name, family)]


CACHES = {
    "no cache": lambda model: {},
    "our cache": lambda model: {"cache": heedful.new_cache(model)},
    "its cache": lambda model: {"cache": DynamicCache(config=model.config)},
}


@pytest.mark.crossed
@pytest.mark.parametrize("inputs", CACHES)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize(("name", "family"), FITTING)
def test_cached_steps_are_the_full_forward(name, family, padded, inputs):
    """Longer than the sliding windows of 4, so that these layers let tokens go."""
    model, ids = converted(name, family), tokens(3, 16)
    mask = ragged_mask(3, 16) if padded else torch.ones_like(ids)
    given = {"attention_mask": mask} if padded else {}
    sizes = [6, 1, 5, 1, 1, 2]
    actual = in_steps(model, ids, sizes, **CACHES[inputs](model), **given)
    expected, real = logits(model, ids, **given), mask.bool()
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-11)


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", [name for name in MECHANISMS if name.startswith("grouped")])
@pytest.mark.parametrize("rows", [slice(0, 4), slice(0, 1), slice(2, 4), slice(3, 4)], ids=str)
@pytest.mark.parametrize("sizes", [[23], [6, 1, 1, 1, 5, 1, 1, 1, 1, 5], [1] * 23], ids=len)
def test_padding_anywhere_in_steps_is_the_full_forward(name, family, rows, sizes):
    """On the right, in between, longer than a piece, in all rows at once, and a row of nothing."""
    model, ids = converted(name, family), tokens(4, 23)
    mask = torch.ones(4, 23).long()
    mask[0, 4:8] = mask[0, 15:17] = mask[1, 16:] = mask[2, :] = mask[3, :9] = 0
    row, real = ids[rows], mask[rows].bool()
    expected = logits(model, row, attention_mask=mask[rows])
    actual = in_steps(model, row, sizes, attention_mask=mask[rows])
    torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-11)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "beams": {"num_beams": 3},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "beams of several": {"num_beams": 4, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 4},
}


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FEW)
def test_every_mode_of_generate_is_the_uncached_one(name, mode, family):
    """Token for token in fp32, in a batch of ragged prompts."""
    model = converted(name, family, dtype=torch.float32)
    ids, mask = tokens(3, 11), ragged_mask(3, 11)
    uncached = {k: x for k, x in MODES[mode].items() if k != "prefill_chunk_size"}
    torch.manual_seed(0)
    expected = greedy(model, ids, 5, attention_mask=mask, use_cache=False, **uncached)
    torch.manual_seed(0)
    actual = greedy(model, ids, 5, attention_mask=mask, use_cache=True, **MODES[mode])
    assert torch.equal(actual, expected)


DRAFTS = {
    "a look into the prompt": lambda name, family, model: {"prompt_lookup_num_tokens": 3},
    "standard": lambda name, family, model: {"assistant_model": converted("standard", family)},
    "other weights": lambda name, family, model: {"assistant_model": converted(name, family)},
    "itself": lambda name, family, model: {"assistant_model": twin(model)},
    # A stock draft with a sliding window fails in transformers 5.17, whatever the model.
    "unconverted": lambda name, family, model: {"assistant_model": tiny("llama")},
}


@functools.cache
def from_the_seed(name: str, family: str) -> tuple:
    """A model, a prompt, and what the model writes on without a cache."""
    torch.manual_seed(0)
    model, ids = converted(name, family), tokens(1, 9)
    return model, ids, greedy(model, ids, 10, use_cache=False)


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("inputs", CACHES)
@pytest.mark.parametrize("name", FEW)
def test_assisted_decoding_is_greedy_decoding(name, inputs, draft, family):
    model, ids, expected = from_the_seed(name, family)
    cache = CACHES[inputs](model)
    actual = greedy(model, ids, 10, **cache, **DRAFTS[draft](name, family, model))
    assert torch.equal(actual, expected)
    if cache:
        assert cache["cache"].get_seq_length() == expected.shape[1] - 1


@pytest.mark.parametrize("name", FEW)
def test_a_cache_goes_on_over_several_turns(name):
    model, ids = converted(name), tokens(1, 6)
    cache = heedful.new_cache(model)
    for turn in (5, 3, 7):
        actual = greedy(model, ids, 4, cache=cache)
        assert torch.equal(actual, greedy(model, ids, 4, use_cache=False))
        ids = torch.cat([actual, tokens(1, turn)], dim=1)


@pytest.mark.parametrize("name", FEW)
def test_a_prompt_is_read_once_for_several_answers(name):
    model, ids = converted(name), tokens(2, 8)
    cache = heedful.new_cache(model)
    in_steps(model, ids, [8], cache)
    for again in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        longer = torch.cat([ids, tokens(2, 3)], dim=1)
        actual = greedy(model, longer, 4, cache=again)
        assert torch.equal(actual, greedy(model, longer, 4, use_cache=False))


@pytest.mark.parametrize("name", FEW)
def test_rows_are_repeated_chosen_and_reordered_whole(name):
    model, ids = converted(name), tokens(2, 12)
    cache = heedful.new_cache(model)
    in_steps(model, ids[:, :7], [5, 2], cache)
    cache.batch_repeat_interleave(2)  # rows 0 0 1 1
    cache.reorder_cache(torch.tensor([3, 0, 1, 2]))  # rows 1 0 0 1
    cache.batch_select_indices(torch.tensor([0, 1]))  # rows 1 0
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    actual = in_steps(model, ids.flip(0)[:, 7:], [1, 1, 3], cache)
    torch.testing.assert_close(actual, logits(model, ids.flip(0))[:, 7:], rtol=0, atol=1e-11)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.nbytes == 0
    actual = in_steps(model, ids, [7, 5], cache)
    torch.testing.assert_close(actual, logits(model, ids), rtol=0, atol=1e-11)


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", [*FEW, "mta-pre", "local", *EVERY_GROUPED])
@pytest.mark.parametrize("first", [3, 12])
def test_calls_can_be_taken_back(name, family, first):
    """Of one call or several, some of their tokens, all, or none."""
    model, ids = converted(name, family), tokens(1, 24)
    cache = heedful.new_cache(model)
    cache.activate_past_recording()
    at = 0
    for sizes, back in (([first], 0), ([4], 4), ([3], 1), ([1, 1, 1], 2), ([2], 0), ([1], 1)):
        length = sum(sizes)
        in_steps(model, torch.cat([ids[:, at : at + length - back], tokens(1, back)], 1), sizes,
                 cache)  # fmt: skip
        cache.crop(-back)
        at += length - back
        assert cache.get_seq_length() == at
    actual = in_steps(model, ids[:, at:], [1, 24 - at - 1], cache)
    torch.testing.assert_close(actual, logits(model, ids)[:, at:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["selective", "selective-extra"])
def test_a_long_call_can_be_taken_back_in_part(name):
    """As the first one of assisted decoding, which holds the prompt and the first candidates."""
    model = converted(name, max_position_embeddings=512)
    ids = tokens(1, 300)
    cache = heedful.new_cache(model)
    cache.activate_past_recording()
    in_steps(model, torch.cat([ids[:, :280], tokens(1, 5)], 1), [285], cache)
    cache.crop(-5)
    actual = in_steps(model, ids[:, 280:], [20], cache)
    torch.testing.assert_close(actual, logits(model, ids)[:, 280:], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="crop can take back 20 tokens here, asked for 21"):
        cache.crop(-21)


@pytest.mark.parametrize("name", FEW)
def test_half_precision_steps_are_as_near_as_the_full_forward(name):
    """bf16: cached and whole differ from fp64 by the same rounding."""
    model, ids = converted(name), tokens(2, 21)
    exact = logits(model, ids)
    half = twin(model).to(torch.bfloat16)
    for module in half.modules():
        if isinstance(getattr(module, "heedful", None), torch.nn.Module):
            module.heedful.float()
    whole = (logits(half, ids) - exact).abs().max()
    steps = (in_steps(half, ids, [12, *[1] * 9]) - exact).abs().max()
    assert steps <= 2 * whole


def test_bytes_are_those_of_the_tensors():
    model = converted("selective", num_hidden_layers=2, max_position_embeddings=2048)
    cache = heedful.new_cache(model)
    assert cache.nbytes == cache.peak_nbytes == 0
    in_steps(model, tokens(2, 512), [512], cache)
    keys = 2 * 2 * 512 * 8 * 8  # batch, heads, tokens, dim, bytes
    f = 2 * 512 * 8
    assert cache.nbytes == 2 * (2 * keys + f)
    before = cache.nbytes
    in_steps(model, tokens(2, 8), [1] * 8, cache)
    room = 512 + 1 + 64  # an eighth more, 64 tokens at least
    assert cache.nbytes == 2 * (2 * keys // 512 * room + f // 512 * 520)
    assert before < cache.nbytes <= cache.peak_nbytes
    assert cache.tokens == [520, 520]


def test_a_windowed_layer_holds_its_window():
    model = converted("standard", "mistral", max_position_embeddings=2048)
    cache = heedful.new_cache(model)
    in_steps(model, tokens(1, 400), [3, *[1] * 397], cache)
    assert cache.tokens == [3, 3, 3]  # with the next token that makes the window of 4
    assert cache.nbytes < 3 * 2 * 2 * 8 * 8 * (4 + 64 + 8)
    everywhere = converted("mta-everywhere", "mistral")
    cache = heedful.new_cache(everywhere)
    in_steps(everywhere, tokens(1, 40), [20, 20], cache)
    assert cache.tokens == [8, 8, 8]  # 3 + 5 more rows, each with its own window


def test_no_token_copies_the_cache():
    """A step writes one row: the tensors stay where they are until their room is full."""
    model = converted("selective", max_position_embeddings=2048)
    cache = heedful.new_cache(model)
    in_steps(model, tokens(1, 300), [300], cache)
    places = set()
    for _ in range(120):
        in_steps(model, tokens(1, 1), [1], cache)
        places.add(cache.layers[0].keys.untyped_storage().data_ptr())
    assert len(places) <= 2


@pytest.mark.parametrize("name", ["selective"])
def test_gradients_go_through_a_cache(name):
    model, ids = converted(name).double().train(), tokens(2, 12)
    model(input_ids=ids, use_cache=False).logits.square().sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    first = model(input_ids=ids[:, :7], use_cache=True)
    second = model(input_ids=ids[:, 7:], cache=cache_of(first))
    torch.cat([first.logits, second.logits], 1).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["selective", *GROUPED])
def test_gradients_of_a_call_outlive_later_calls(name):
    model, ids = converted(name).train(), tokens(1, 20)
    expected, actual = (model(input_ids=ids, use_cache=True) for _ in range(2))
    with torch.no_grad():
        in_steps(model, ids[:, :8], [1] * 8, cache_of(actual))
    own = list(model.model.layers[0].self_attn.parameters())[:3]
    grads = [torch.autograd.grad(out.logits.square().sum(), own) for out in (expected, actual)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_summaries_leave_for_the_cpu_after_they_are_attended_to(monkeypatch):
    """Transformers offloads a layer within `update`, when it has returned keys and values."""
    model, ids = converted("grouped"), tokens(1, 12)
    update, move, moved = SummaryCache.update, SummaryCache._move, []

    def and_offload(cache, *args, **kwargs):
        cache.prefetch()
        out = update(cache, *args, **kwargs)
        cache.offload()
        return out

    def to(cache, device):
        moved.append((device.type, cache.counters.pending))
        move(cache, device)

    monkeypatch.setattr(SummaryCache, "update", and_offload)
    monkeypatch.setattr(SummaryCache, "_move", to)
    cache = heedful.new_cache(model)
    actual = in_steps(model, ids, [5, 7], cache)
    torch.testing.assert_close(actual, logits(model, ids), rtol=0, atol=1e-11)
    assert len(moved) == 3 + 6 and all(pending == 0 for _, pending in moved)


def test_a_cache_from_a_file_cannot_take_back_a_part_of_a_call():
    model, ids = converted("grouped"), tokens(1, 20)
    cache = heedful.new_cache(model)
    cache.activate_past_recording()
    in_steps(model, ids[:, :10], [10], cache)
    again = pickle.loads(pickle.dumps(cache))
    with pytest.raises(ValueError, match=r"in a cache that comes from a file: call the model with"):
        again.crop(-3)
    in_steps(model, ids[:, 10:14], [4], again)
    again.crop(-3)
    actual = in_steps(model, ids[:, 11:], [9], again)
    torch.testing.assert_close(actual, logits(model, ids)[:, 11:], rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", FEW)
def test_the_default_of_use_cache_stays(name):
    model = converted(name)
    assert model.config.use_cache is True
    ids = tokens(1, 5)
    cache = cache_of(model(input_ids=ids))
    assert all(isinstance(layer, AttentionCache) for layer in cache.layers)


@pytest.mark.parametrize("name", ["mta-everywhere", "selective"])
def test_a_used_plain_cache_is_refused(name):
    model, plain, ids = converted(name), tiny(), tokens(1, 5)
    cache = cache_of(plain(input_ids=ids, use_cache=True))
    before = [layer.keys.clone() for layer in cache.layers]
    for call in (lambda: model(input_ids=ids[:, :1], cache=cache),
                 lambda: greedy(model, tokens(1, 7), cache=cache)):  # fmt: skip
        with pytest.raises(ValueError, match=r"holds keys and values only .DynamicLayer., and .* "
                                             r"pass heedful.new_cache.model."):  # fmt: skip
            call()
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_a_used_plain_cache_serves_what_needs_no_more():
    model, ids = converted("standard"), tokens(1, 9)
    cache = cache_of(heedful.revert(twin(model))(input_ids=ids[:, :5], use_cache=True))
    actual = model(input_ids=ids[:, 5:], cache=cache).logits
    torch.testing.assert_close(actual, logits(model, ids)[:, 5:], rtol=0, atol=1e-12)


def test_caches_of_others_are_refused():
    one, other, third = converted("selective"), converted("selective"), converted("standard")
    ids = tokens(1, 5)
    cache = cache_of(one(input_ids=ids))
    for model in (other, third):
        with pytest.raises(ValueError, match=r"belongs to another model or mechanism .Selective"):
            model(input_ids=ids, cache=cache)
    with pytest.raises(ValueError, match="has a batch of 1 sequences and the call has 2"):
        one(input_ids=tokens(2, 1), cache=cache)
    actual = in_steps(one, ids, [1] * 5, cache)  # and it is as it was
    whole = logits(one, torch.cat([ids, ids], 1))[:, 5:]
    torch.testing.assert_close(actual, whole, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["standard", "selective"])
def test_static_and_quantized_caches_are_refused_by_name(name):
    model, ids = converted(name), tokens(1, 5)
    for kind in ("static", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation='{kind}' is not supported"):
            greedy(model, ids, cache_implementation=kind)
    static = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(ValueError, match="must not be a static cache"):
        greedy(model, ids, cache=static)


def test_continuous_batching_is_refused():
    model = converted("standard")
    before = model.config._attn_implementation
    for call in (model.generate_batch, model.init_continuous_batching):
        with pytest.raises(ValueError, match="would switch the mechanism off"):
            call([[3, 4, 5]])
    assert model.config._attn_implementation == before


def test_what_cannot_have_a_cache_says_so():
    with pytest.raises(ValueError, match="model must have a decoder"):
        heedful.new_cache(tiny_encoder("bert"))
    with pytest.raises(ValueError, match="eviction must be a policy such as"):
        heedful.new_cache(converted("standard"), eviction=64)
