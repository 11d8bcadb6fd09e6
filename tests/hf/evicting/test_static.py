"""Static caches: the tokens and logits of the others, in shapes that never change."""

import copy
import json
import subprocess
import sys

import pytest
import torch

import heedful
from heedful.eviction import (
    H2O,
    TOVA,
    KeyDiff,
    Knorm,
    MostHidden,
    Random,
    SnapKV,
    StreamingLLM,
    Window,
)
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.versions import cache_argument
from helpers import ROOT
from helpers.cached import greedy, in_steps
from helpers.families import ragged_mask, tiny, tokens
from helpers.unconverted import RANKED, Strongest, beside

QUICK = ("StreamingLLM", "KeyDiff with slack", "MostHidden with slack, padded",
         "generate, StreamingLLM")  # fmt: skip


def problems(*arguments: str) -> dict[str, str | None]:
    """What is wrong with each check of compiled_caches.py; `None` for nothing."""
    program = [sys.executable, "-m", "helpers.compiled_caches", *arguments]
    process = subprocess.run(program, cwd=ROOT / "tests", capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    lines = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    return {line["check"]: line["problem"] for line in lines}


def all_right(found: dict[str, str | None], count: int) -> None:
    assert len(found) == count
    wrong = {check: problem for check, problem in found.items() if problem is not None}
    assert not wrong, "\n".join(f"{check}: {problem}" for check, problem in wrong.items())


@pytest.mark.slow
def test_one_graph_for_any_length():
    all_right(problems("eager", *QUICK), len(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("backend, count", [("aot_eager", 14), ("inductor", 5)])
def test_one_graph_for_every_policy_and_mask(backend, count):
    all_right(problems(backend), count)


def pair(model, policy, **options):
    return [heedful.new_cache(model, policy, static=x, **options) for x in (False, True)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "policy", [StreamingLLM, Window, Random, Knorm, KeyDiff, Strongest, MostHidden]
)
@pytest.mark.parametrize("slack", [0, 5])
def test_turns_of_any_size_are_those_of_the_other_caches(family, policy, slack):
    model, ids = tiny(family, max_position_embeddings=256), tokens(2, 70)
    model = beside(model) if policy is MostHidden else model
    sizes = [1, 9, *[1] * 12, 7, 3, *[1] * 20, 11, *[1] * 7]
    for mask in (None, ragged_mask(*ids.shape)):
        named = {} if mask is None else {"attention_mask": mask}
        real = slice(None) if mask is None else mask.bool()
        for first in (0, 1):  # of a prompt of one token too
            calls = sizes if not first else [sum(sizes[:2]), *sizes[2:]]
            own, static = pair(model, policy(tokens=20, sinks=2, recent=4), slack=slack)
            expected = in_steps(model, ids, calls, own, **named)
            actual = in_steps(model, ids, calls, static, **named)
            torch.testing.assert_close(actual[real], expected[real], rtol=0, atol=1e-12)
            assert static.tokens == own.tokens
            for these, those in zip(own.positions(), static.positions(), strict=True):
                assert torch.equal(these, those)
            assert [x.counters.total for x in static.layers] == [70] * 3
    whole = in_steps(model, ids, [70])
    assert (actual - whole)[real].abs().max() > 1e-3  # something was evicted


def test_shapes_and_addresses_stay_from_the_prompt_on():
    model, ids = beside(tiny(max_position_embeddings=256)), tokens(2, 80)
    for policy in (StreamingLLM(tokens=24), KeyDiff(tokens=24), MostHidden(tokens=24)):
        cache = heedful.new_cache(model, policy, slack=4, static=True)

        def state(cache=cache):
            slots = [y for x in cache.layers for y in (*x._keys.tensors, *x._values.tensors)]
            places = [y for x in cache.layers for y in x.map.places.tensors]
            return [*slots, *(x for x in places if x is not None)]

        in_steps(model, ids[:, :10], [10], cache)
        before = [(x.data_ptr(), x.shape) for x in state()]
        in_steps(model, ids[:, 10:], [1] * 70, cache)
        assert [(x.data_ptr(), x.shape) for x in state()] == before
        assert cache.nbytes == nbytes_of(state())
        assert all(23 <= x < 28 for x in cache.tokens)
        keys = cache.layers[0].keys
        assert keys.shape[2] == 28 and cache.whole_nbytes > 0


def test_generate_with_beams_samples_and_chunks():
    model = beside(tiny(max_position_embeddings=256))
    ids, mask = tokens(2, 30), ragged_mask(2, 30)
    for policy in (StreamingLLM(tokens=15), KeyDiff(tokens=15), MostHidden(tokens=15)):
        for options in (
            {},
            {"prefill_chunk_size": 7},
            {"num_beams": 3},
            {"num_return_sequences": 2, "do_sample": True},
        ):
            results, caches = [], pair(model, policy)
            for cache in caches:
                torch.manual_seed(0)
                results.append(greedy(model, ids, 15, attention_mask=mask, cache=cache, **options))
            assert torch.equal(*results), options
            for own, other in zip(*(x.positions() for x in caches), strict=True):
                assert torch.equal(own, other)


def test_batches_copies_resets_and_inference_mode():
    model, ids = beside(tiny(max_position_embeddings=256)), tokens(2, 50)
    for policy in (StreamingLLM(tokens=16), Knorm(tokens=16), MostHidden(tokens=16)):
        own, static = pair(model, policy)
        expected = in_steps(model, ids, [20, *[1] * 30], own)
        with torch.inference_mode():
            first = in_steps(model, ids[:, :21], [20, 1], static)
        copied = copy.deepcopy(static)
        for cache in (static, copied):
            actual = torch.cat([first, in_steps(model, ids[:, 21:], [1] * 29, cache)], 1)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        more = tokens(4, 4)
        results = []
        for cache in (own, static):
            cache.batch_repeat_interleave(2)
            cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
            parts = in_steps(model, more, [1] * 4, cache)
            cache.batch_select_indices(torch.tensor([2, 0]))
            parts = torch.cat([parts[[2, 0]], in_steps(model, more[:2], [1, 2, 1], cache)], 1)
            results.append(parts)
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)
        static.reset()
        assert static.tokens == [0] * 3 and static.nbytes == 0
        again = in_steps(model, ids, [20, *[1] * 30], static)
        torch.testing.assert_close(again, expected, rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="has a batch of 2 sequences and the call has 1"):
            in_steps(model, tokens(1, 1), [1], static)


def test_eight_bits():
    model, ids = tiny(max_position_embeddings=256), tokens(2, 60)
    own, static = pair(model, KeyDiff(tokens=20), dtype=torch.int8)
    expected, actual = (in_steps(model, ids, [25, *[1] * 35], x) for x in (own, static))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert static.tokens == own.tokens


def test_what_a_static_cache_does_not_serve_is_refused_by_name():
    model = tiny(max_position_embeddings=256)
    for policy in (TOVA, H2O, SnapKV):
        with pytest.raises(ValueError, match=f"static: {policy.__name__} reads attention weights"):
            heedful.new_cache(model, policy(tokens=40), static=True)
    with pytest.raises(ValueError, match="static: StreamingLLM has keep_prompt=True"):
        heedful.new_cache(model, StreamingLLM(tokens=40, keep_prompt=True), static=True)
    for policy in (False, StreamingLLM(tokens=(20, None, 20))):
        with pytest.raises(ValueError, match=r"static: layer \d has no budget and keeps every"):
            heedful.new_cache(model, policy, static=True)
    with pytest.raises(ValueError, match="static must be True or False, got 'yes'"):
        heedful.new_cache(model, StreamingLLM(tokens=20), static="yes")
    policy, ids = StreamingLLM(tokens=20), tokens(1, 30)
    cache = heedful.new_cache(model, policy, static=True)
    with pytest.raises(ValueError, match="a static cache takes no tokens back, as assisted"):
        greedy(model, ids, 5, cache=cache, prompt_lookup_num_tokens=2)
    cache.reset()
    in_steps(model, ids, [28, 1, 1], cache)
    with pytest.raises(ValueError, match="crop: a static cache takes no tokens back, got 1"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="attention_mask of one token must have one column"):
        model(ids[:, :1], attention_mask=torch.ones(1, 1, 1, 31).bool(),
              **cache_argument(model, cache))  # fmt: skip
    cache = heedful.new_cache(model, policy, static=True)
    with torch.no_grad():
        model(tokens(2, 30), **cache_argument(model, cache))
        padded = torch.ones(2, 31)
        padded[0, -1] = 0
        with pytest.raises(ValueError, match="attention_mask: a token after the prompt is padding"):
            model(tokens(2, 1), attention_mask=padded, **cache_argument(model, cache))
    with pytest.raises(ValueError, match="save: StaticLayer"):
        cache.save("never")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="static: the attention implementation must be one of"):
        heedful.new_cache(model, policy, static=True)
    converted = tiny()
    heedful.convert(converted, RANKED)
    with pytest.raises(ValueError, match="static must be False for a converted model"):
        heedful.new_cache(converted, MostHidden(tokens=20), static=True)
