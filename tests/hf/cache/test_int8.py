"""An int8 cache: attention to quantized tokens, to the bit."""

import copy
import pickle

import pytest
import torch

import heedful
from heedful.eviction import H2O, POLICIES, MostHidden, StreamingLLM
from heedful.hf.cache import base as stored
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.cache.int8 import dequantize, quantize
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.cache.slots import Slots
from heedful.nn import Selective, Standard
from helpers.cached import MECHANISMS, converted, greedy, in_steps, serves, tensors_in
from helpers.families import logits, ragged_mask, tiny, tokens, varied

ONE_BY_ONE = [name for name in MECHANISMS if not name.startswith("grouped")]
WITH_ROWS = [name for name in MECHANISMS if name.startswith("mta")]
SERVED = [(name, policy) for name in ONE_BY_ONE for policy in (None, *POLICIES)
          if policy is None or (name not in WITH_ROWS and serves(policy, name))]  # fmt: skip
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize(x), x.dtype)


def int8(model, eviction=False):
    return heedful.new_cache(model, eviction, dtype=torch.int8)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 3e3])
def test_numbers_are_moved_by_half_a_scale_at_most(dtype, size):
    x = (torch.randn(2, 3, 50, 16, generator=torch.manual_seed(0)) * size).to(dtype)
    x[:, :, 3] = 0
    codes, scales = quantize(x)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    error = (codes.double() * scales.double() - x.double()).abs()
    assert (error <= scales.double() * 0.50001).all()
    largest = x.double().abs().argmax(-1, keepdim=True)
    assert (error.gather(-1, largest) <= scales.double() * 1e-4).all()
    assert error.max() > 0.4 * scales.double().max()
    assert (codes[:, :, 3] == 0).all() and codes.abs().amax(-1)[:, :, 4:].min() == 127
    read = in_eight_bits(x)
    assert read.dtype == dtype
    slack = torch.finfo(dtype).eps * x.abs().double() + torch.finfo(dtype).smallest_normal
    assert ((read.double() - x.double()).abs() <= scales.double() * 0.50001 + slack).all()


class QuantizedFirst(Slots):
    """Tokens are quantized and restored before an ordinary cache keeps them."""

    def append(self, new, limit=None):
        return super().append(in_eight_bits(new) if new.is_floating_point() else new, limit)


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("name", "policy"), SERVED)
def test_attention_is_to_quantized_tokens(name, policy, family, monkeypatch):
    """To the bit, in whatever calls they come; evicted are the same ones."""
    window = {"sliding_window": 20} if family == "mistral" else {}
    model, ids = converted(name, family, **window), tokens(2, 30)
    sinks = 0 if policy is not None and policy.__name__ == "Window" else 2
    eviction = False if policy is None else policy(tokens=13, sinks=sinks, recent=3)
    exact = in_steps(model, ids, [9, 7, 1, 13], heedful.new_cache(model, eviction))
    caches = [int8(model, eviction) for _ in range(2)]
    actual, steps = in_steps(model, ids, [9, 7, 1, 13], caches[0]), None
    if policy is None:
        steps = in_steps(model, ids, [1] * 30, caches[1])
    with monkeypatch.context() as patched:
        patched.setattr(stored, "Slots", QuantizedFirst)
        cache = heedful.new_cache(model, eviction)
        expected = in_steps(model, ids, [9, 7, 1, 13], cache)
    assert torch.equal(actual, expected)
    assert all(map(torch.equal, caches[0].positions(), cache.positions()))
    assert caches[0].nbytes == nbytes_of(tensors_in(caches[0].layers))
    if steps is not None:
        torch.testing.assert_close(steps, expected, rtol=0, atol=1e-11)
    assert (actual - exact).abs().max() > 1e-7


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", ["mta-flash", "mta-selective"])
def test_a_long_call_of_filtered_keys_is_its_steps(name, family):
    """Longer than the band of near keys, which are never quantized."""
    window = {"sliding_window": 20} if family == "mistral" else {}
    model, ids = converted(name, family, **window), tokens(2, 40)
    whole, steps = (in_steps(model, ids, sizes, int8(model)) for sizes in ([40], [1] * 40))
    torch.testing.assert_close(whole, steps, rtol=0, atol=1e-11)
    assert (whole - logits(model, ids)).abs().max() > 1e-4


MODES = {
    "padded": {"attention_mask": ragged_mask(3, 11)},
    "beams": {"num_beams": 3},
    "beams of several": {"num_beams": 4, "num_return_sequences": 2},
    "a look into the prompt": {"prompt_lookup_num_tokens": 3},
    "chunks": {"prefill_chunk_size": 4},
}


@pytest.mark.crossed
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["standard", "selective-extra", "mta-everywhere"])
def test_every_mode_of_generate_keeps_quantized_tokens(name, mode, monkeypatch):
    model, rows = converted(name), 1 if mode == "a look into the prompt" else 3
    ids = tokens(rows, 11)
    actual = greedy(model, ids, 8, cache=int8(model), **MODES[mode])
    with monkeypatch.context() as patched:
        patched.setattr(stored, "Slots", QuantizedFirst)
        cache = heedful.new_cache(model)
        assert torch.equal(greedy(model, ids, 8, cache=cache, **MODES[mode]), actual)


def test_a_quantized_cache_can_be_copied_and_stored():
    model, ids = converted("selective-extra"), tokens(2, 12)
    cache = int8(model, MostHidden(tokens=8, sinks=1, recent=2))
    in_steps(model, ids[:, :9], [9], cache)
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    expected = in_steps(model, ids[:, 9:], [3], cache)
    for again in copies:
        assert torch.equal(in_steps(model, ids[:, 9:], [3], again), expected)


@pytest.mark.parametrize("eviction", [False, StreamingLLM(tokens=33, sinks=2, recent=3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_counted_with_the_copies_that_attention_reads(dtype, eviction):
    """A number and its share of a scale: (32 + 4) of 4 x 32 bytes, or of 2 x 32."""
    model = varied(tiny(head_dim=32, dtype=dtype), Standard())
    cache, plain, ids = int8(model, eviction), heedful.new_cache(model, eviction), tokens(2, 97)
    for x in (cache, plain):
        in_steps(model, ids, [32, 32, 32, 1], x)
    positions = 0 if eviction is False else 2 * 33 * 8 * len(cache.layers)
    share = (32 + 4) / (32 * dtype.itemsize)
    assert cache.nbytes - positions == pytest.approx(share * (plain.nbytes - positions), rel=1e-3)
    assert cache.whole_nbytes == plain.whole_nbytes
    # At its peak the last layer reads copies of all its tokens, which others have quantized.
    one = plain.whole_nbytes / 97 / len(cache.layers)
    read = one * (97 if eviction is False else 64)
    assert cache.peak_nbytes >= cache.nbytes + read * (1 if eviction is False else 0)
    assert cache.peak_nbytes < plain.peak_nbytes + read


@pytest.mark.parametrize("policy", [None, StreamingLLM, H2O, MostHidden])
def test_whole_rows_are_their_steps(policy):
    model, ids = varied(tiny(num_hidden_layers=2), Selective(selector="extra")), tokens(2, 26)
    eviction = None if policy is None else policy(tokens=11, sinks=2, recent=3)
    with evicting(model, eviction, 6, 4, dtype=torch.int8) as peaks:
        actual = logits(model, ids)
    cache = int8(model, eviction or False)
    expected = in_steps(model, ids, [6, 4, 4, 4, 4, 4], cache)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    assert (actual - logits(model, ids)).abs().max() > 1e-7
    assert 0 < peaks.nbytes < heedful.new_cache(model).nbytes + cache.peak_nbytes


def test_what_cannot_be_quantized_is_refused():
    model = converted("standard")
    for dtype in (torch.float16, torch.uint8, "int8"):
        with pytest.raises(ValueError, match=r"dtype must be torch\.int8, or None"):
            heedful.new_cache(model, dtype=dtype)
        refusal = pytest.raises(ValueError, match=r"dtype must be torch\.int8, or None")
        with refusal, evicting(model, None, dtype=dtype):
            pass
    grouped = converted("grouped")
    with pytest.raises(ValueError, match="dtype: GroupedAttention keeps summaries"):
        int8(grouped)
    with pytest.raises(ValueError, match="quantizes tokens, which has no gradients"):
        model(input_ids=tokens(1, 4), cache=int8(model), use_cache=True)
    with pytest.raises(ValueError, match=r"new_cache\(model, dtype=torch\.int8\)"):
        greedy(model, tokens(1, 4), cache_implementation="quantized")


@pytest.mark.parametrize(("name", "part"), [("mta-everywhere", "queries"), ("selective", "F")])
def test_query_rows_and_states_are_not_quantized(name, part):
    """Of the first layer, to which quantized tokens of other layers make no difference."""
    model, ids = converted(name), tokens(1, 9)
    first = []
    for cache in (int8(model), heedful.new_cache(model)):
        in_steps(model, ids, [9], cache)
        layer = cache.layers[0]
        kept = layer._tails[part].rows if part == "queries" else layer._streams[part].contents
        first.append(kept)
    if part == "queries":
        assert torch.equal(*first)
    else:  # F is of quantized logits, with all its digits
        torch.testing.assert_close(*first, rtol=0.1, atol=0.1)
        assert (first[0] != 0).any() and not torch.equal(*first)
