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
from heedful.checks import UserError
from heedful.eviction import (
    H2O,
    POLICIES,
    KeyDiff,
    MostHidden,
    SnapKV,
    StreamingLLM,
    Window,
)
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.cache.file import _DIGEST, _NAME, _digest
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.versions import cache_argument
from helpers.cached import converted, greedy
from helpers.families import exactly, ragged_mask, tiny, tokens
from helpers.unconverted import Knorm, Strongest, beside

AS_THEY_ARE = [policy for policy in POLICIES if "positions" not in policy.needs]
CONVERTED = [
    *((name, None) for name in ("standard", "mta-everywhere", "selective")),
    *(("standard", policy) for policy in (StreamingLLM, SnapKV, H2O, KeyDiff)),
    ("selective-extra", MostHidden),
    ("selective-per-head", MostHidden),
    ("forgetting", MostHidden),
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


@pytest.mark.parametrize(("slack", "dtype"), [(0, None), (5, None), (5, torch.int8)])
@pytest.mark.parametrize("policy", [None, Strongest, *AS_THEY_ARE])
def test_a_cache_of_a_model_as_it_is_goes_on(tmp_path, policy, slack, dtype):
    """After a prompt, and after steps into slots of evicted tokens; with padding and windows."""
    given = at(policy) if policy is Strongest else None
    for family in ("llama", "gemma3_text"):
        model, ids = beside(tiny(family)), tokens(2, 45)
        for mask in (None, ragged_mask(2, 45)):
            eviction = False if policy is None else at(policy)
            cache = heedful.new_cache(model, eviction, slack=slack, dtype=dtype)
            for sizes in ([9, 9], [1, 1, 1], [9]):
                calls(model, ids, sizes, cache, mask)
                cache.save(tmp_path / "cache")
                loaded = heedful.load_cache(tmp_path / "cache", model, given)
                agree(loaded, cache)
                kept = copy.deepcopy(cache)
                rest = [1, 1, 4, 1]
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
    assert written == cache.contents_nbytes < cache.nbytes / 2


@dataclass(frozen=True)
class Landmarks(StreamingLLM):
    """A policy of a user's own."""

    every: int = 8


def own(**options):
    """The same model each time, with selectors."""
    torch.manual_seed(0)
    return beside(tiny(**options))


@pytest.fixture
def file(tmp_path):
    """A saved cache of a small model under a policy of heedful's."""
    model = own()
    cache = heedful.new_cache(model, at(MostHidden))
    calls(model, tokens(1, 30), [30], cache)
    cache.save(tmp_path / "cache")
    return tmp_path / "cache"


def about(change, signed=True):
    """A change of what a file says of itself, by who knows how it is signed, or does not."""

    def of(path) -> None:
        with safe_open(path, framework="pt") as file:
            data, digest = json.loads(file.metadata()[_NAME]), file.metadata()[_DIGEST]
        change(data)
        text, tensors = json.dumps(data), load_file(path)
        save_file(
            tensors, path, {_NAME: text, _DIGEST: _digest(text, tensors) if signed else digest}
        )

    return of


def one_bit(path) -> None:
    """The last bit of a file is another one."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "is not a file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "is damaged"),
        (lambda path: path.write_bytes(pickle.dumps({})), "is damaged"),
        (lambda path: save_file(load_file(path), path), "a file of cache.save in format 3"),
        (about(lambda x: x.update(format=2)), "format 3; save the cache again with this version"),
        (about(lambda x: x.update(slack=3), signed=False), "is damaged .it is not what was wri"),
        (one_bit, "is damaged .it is not what was written"),
        (about(lambda x: x["maps"].pop()), "layers in 2 groups, and this model's has 3 in 3"),
    ],
)
def test_a_damaged_file_is_answered_by_its_name(file, change, message):
    change(file)
    with pytest.raises(UserError, match=message) as error:
        heedful.load_cache(file, own())
    assert "\n" not in str(error.value)


def test_another_model_is_refused(file):
    stirred = own()
    next(stirred.parameters()).data[0, 0] += 1
    selectors = own()
    next(x for n, x in selectors.named_parameters() if ".heedful." in n).data += 1
    torch.manual_seed(0)
    plain, theta = tiny(), own()
    theta.config.rms_norm_eps = 0.1
    for model, message in (
        (stirred, r"another model \(other weights, or the same in another precision\)"),
        (own(dtype=torch.float32), "in another precision; other selectors"),
        (selectors, r"another model \(other selectors or LoRA\)"),
        (plain, "other selectors or LoRA; another mechanism"),
        (theta, "another configuration"),
    ):
        with pytest.raises(ValueError, match=message):
            heedful.load_cache(file, model)
    same = own()
    same.generation_config.max_new_tokens = 3  # decides nothing of what is cached
    heedful.load_cache(file, same)


def test_the_policy_is_the_saved_one(tmp_path, file):
    model, landmarks = own(), Landmarks(tokens=15)
    heedful.load_cache(file, model, at(MostHidden))
    with pytest.raises(ValueError, match="eviction must be the policy of the saved cache"):
        heedful.load_cache(file, model, replace(at(MostHidden), tokens=16))
    cache = heedful.new_cache(model, landmarks)
    calls(model, tokens(1, 30), [30], cache)
    cache.save(tmp_path / "own")
    with pytest.raises(ValueError, match=r"a policy of your own, Landmarks: hand it over with ev"):
        heedful.load_cache(tmp_path / "own", model)
    agree(heedful.load_cache(tmp_path / "own", model, landmarks), cache)


def test_what_cannot_be_saved_is_refused(tmp_path, monkeypatch):
    path, ids = tmp_path / "cache", tokens(1, 30)
    grouped = converted("grouped")
    with pytest.raises(ValueError, match="save: SummaryCache keeps more than tokens one by one"):
        heedful.new_cache(grouped).save(path)
    standard = converted("standard")
    cache = heedful.new_cache(standard, False)
    with pytest.raises(ValueError, match="needs the model that the cache was made for"):
        pickle.loads(pickle.dumps(cache)).save(path)
    calls(standard, ids, [20], cache)
    cache.activate_past_recording()
    with pytest.raises(ValueError, match="save needs a cache between two calls"):
        cache.save(path)
    model = tiny()
    cache = heedful.new_cache(model, StreamingLLM(tokens=15))
    monkeypatch.setattr(model.model.layers[2], "forward", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calls(model, ids, [20], cache)
    with pytest.raises(ValueError, match="in the middle of a call that was interrupted"):
        cache.save(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path, file, monkeypatch):
    """Where a write fails, what was there before stays, and nothing beside it."""
    model, before = own(), file.read_bytes()
    cache = heedful.load_cache(file, model)
    calls(model, tokens(1, 40), [5], cache)

    def fails(*paths) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="No space left"):
        cache.save(file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_keys_and_values_of_an_offloaded_cache(file, monkeypatch):
    """All but the first layer's, which is the next one at work, are brought away."""
    monkeypatch.setattr("heedful.hf.cache.new._device_types", lambda model: {"cuda"})
    monkeypatch.setattr(torch, "Stream", lambda *args, **options: None)
    away = []
    monkeypatch.setattr(EvictingLayer, "offload", lambda self: away.append(self.index))
    model = own()
    cache = heedful.load_cache(file, model, offloading=True)
    assert away == [1, 2] and cache.offloading
    agree(cache, heedful.load_cache(file, model))
    with monkeypatch.context() as patched:
        patched.setattr("heedful.hf.cache.new._device_types", lambda model: {"cpu"})
        with pytest.raises(ValueError, match=r"offloading=True .* needs a model on a CUDA device"):
            heedful.load_cache(file, model, offloading=True)
