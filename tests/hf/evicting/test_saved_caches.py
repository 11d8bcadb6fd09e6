"""Caches in files: they go on bit for bit, with the same bytes, and with no other model."""

import copy
import json
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import heedful
from heedful.eviction import POLICIES, MostHidden, StreamingLLM, Window
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.versions import cache_argument
from helpers.cached import MECHANISMS, converted, greedy, serves
from helpers.families import exactly, ragged_mask, tiny, tokens
from helpers.unconverted import Knorm, Strongest, beside

AS_THEY_ARE = [
    policy
    for policy in POLICIES
    if not any(need in ("gate", "positions") or isinstance(need, tuple) for need in policy.needs)
]
ONE_BY_ONE = [name for name in MECHANISMS if not name.startswith("grouped")]
CONVERTED = [
    (name, policy)
    for name in ONE_BY_ONE
    for policy in (None, *POLICIES)
    if policy is None
    or (serves(policy, name) and not name.startswith(("mta", "simplicial", "canon")))
]


def at(policy):
    """A small budget."""
    return policy(tokens=15, sinks=0 if policy is Window else 2, recent=3)


@torch.no_grad()
def calls(model, ids, sizes, cache, mask=None) -> torch.Tensor:
    """Logits of calls that follow what the cache has read."""
    read, parts = cache.get_seq_length(), []
    for piece in ids[:, read : read + sum(sizes)].split(sizes, 1):
        read += piece.shape[1]
        more = {} if mask is None else {"attention_mask": mask[:, :read]}
        with exactly():
            parts.append(model(piece, **cache_argument(model, cache), **more).logits)
    return torch.cat(parts, 1)


def agree(loaded, cache) -> None:
    """The same tokens in as many bytes, which are those of the tensors."""
    assert loaded.nbytes == cache.nbytes and loaded.contents_nbytes == cache.contents_nbytes
    assert loaded.bf16_nbytes == cache.bf16_nbytes and loaded.whole_nbytes == cache.whole_nbytes
    assert loaded.tokens == cache.tokens
    if isinstance(loaded.layers[0], EvictingLayer):
        slots = [y for x in loaded.layers for y in (x._keys, x._values)]
        own = [y for x in slots for y in x.tensors]
        maps = dict.fromkeys(x.map for x in loaded.layers)
        assert loaded.nbytes == nbytes_of([*own, *(y for x in maps for y in x.tensors)])
    assert all(map(torch.equal, loaded.positions(), cache.positions()))  # writes late ones


@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("policy", [None, Strongest, *AS_THEY_ARE])
def test_a_cache_of_a_model_as_it_is_goes_on(tmp_path, policy, slack, dtype):
    """After a prompt, and after steps into the slots of evicted tokens; with padding and windows."""
    given = at(policy) if policy is Strongest else None
    for family in ("llama", "gemma3_text"):
        model, ids = beside(tiny(family)), tokens(2, 45)
        for mask in (None, ragged_mask(2, 45)):
            eviction = False if policy is None else at(policy)
            cache = heedful.new_cache(model, eviction, slack=slack, dtype=dtype)
            for sizes in ([9, 9], [1, 1, 1], [9], [1] * 5):
                calls(model, ids, sizes, cache, mask)
                cache.save(tmp_path / "cache")
                loaded = heedful.load_cache(tmp_path / "cache", model, given)
                agree(loaded, cache)
                kept = copy.deepcopy(cache)
                rest = [1, 1, 4, *[1] * 4]
                expected = calls(model, ids, rest, kept, mask)
                assert torch.equal(calls(model, ids, rest, loaded, mask), expected)
                agree(loaded, kept)


@pytest.mark.parametrize("dtype", [None, torch.int8])
@pytest.mark.parametrize(("name", "policy"), CONVERTED)
def test_a_cache_of_a_converted_model_goes_on(tmp_path, name, policy, dtype):
    """Query rows, rows from before the rotation, F, gates, own selectors' keys, added-up scores."""
    model, ids, mask = converted(name), tokens(2, 45), ragged_mask(2, 45)
    cache = heedful.new_cache(model, False if policy is None else at(policy), dtype=dtype)
    for sizes in ([18], [1, 1, 5]):
        calls(model, ids, sizes, cache, mask)
        cache.save(tmp_path / "cache")
        loaded = heedful.load_cache(tmp_path / "cache", model)
        agree(loaded, cache)
        kept = copy.deepcopy(cache)
        expected = calls(model, ids, [1, 4, 1, 1], kept, mask)
        assert torch.equal(calls(model, ids, [1, 4, 1, 1], loaded, mask), expected)
        agree(loaded, kept)


@pytest.mark.parametrize("policy", [StreamingLLM, Knorm, MostHidden])
def test_many_questions_about_one_text(tmp_path, policy):
    """Copies of a loaded cache, and one of several sequences, leave no trace in it."""
    model, text = beside(tiny()), tokens(1, 60)
    cache, given = heedful.new_cache(model, at(policy)), at(policy) if policy is Knorm else None
    calls(model, text, [20, 20, 20], cache)
    cache.save(tmp_path / "cache")
    loaded = heedful.load_cache(tmp_path / "cache", model, given)
    questions = [torch.cat([text, tokens(1, n)], 1) for n in (5, 9)]
    for ids in questions * 2:
        expected = greedy(model, ids, 6, cache=copy.deepcopy(cache))
        assert torch.equal(greedy(model, ids, 6, cache=copy.deepcopy(loaded)), expected)
    both = copy.deepcopy(loaded)
    both.batch_repeat_interleave(2)
    rows = torch.cat([text, tokens(1, 5)], 1).repeat(2, 1)
    rows[1, 60:] = tokens(1, 5).flip(1)
    for row, ids in zip(greedy(model, rows, 6, cache=both), rows, strict=True):
        assert torch.equal(greedy(model, ids[None], 6, cache=copy.deepcopy(loaded))[0], row)
    agree(loaded, cache)


def test_prompt_lookup_beams_and_resets(tmp_path):
    model, ids = tiny(max_position_embeddings=256), tokens(1, 20).repeat(1, 2)
    cache = heedful.new_cache(model, StreamingLLM(tokens=24))
    once = greedy(model, ids, 10, cache=cache, prompt_lookup_num_tokens=3)
    cache.save(tmp_path / "cache")
    loaded = heedful.load_cache(tmp_path / "cache", model)
    agree(loaded, cache)
    for options in ({"prompt_lookup_num_tokens": 3}, {}):
        results = [greedy(model, once, 9, cache=x, **options) for x in (cache, loaded)]
        assert torch.equal(*results)
        once = results[0]
    loaded.reset()
    assert loaded.nbytes == 0
    loaded.save(tmp_path / "empty")
    empty = heedful.load_cache(tmp_path / "empty", model)
    agree(empty, loaded)
    calls(model, ids, [30], empty)
    assert empty.tokens == [23] * 3


def test_the_file_has_no_room_for_later_tokens(tmp_path):
    model = tiny(dtype=torch.float32)
    cache = heedful.new_cache(model, StreamingLLM(tokens=200))
    calls(model, tokens(1, 40), [39, 1], cache)
    cache.save(tmp_path / "cache")
    written = nbytes_of(list(load_file(tmp_path / "cache").values()))
    positions = 40 * 8
    assert written == cache.contents_nbytes - (cache.nbytes - whole_room(cache)) + positions
    assert (tmp_path / "cache").read_bytes()[:1] != b"\x80"  # of a pickle


def whole_room(cache) -> int:
    """Bytes of the buffers of keys and values."""
    return sum(y.nbytes for x in cache.layers for y in (x._keys, x._values))
