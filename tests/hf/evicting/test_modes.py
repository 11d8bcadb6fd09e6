"""Evicting caches of unconverted models in every mode of use, and what they leave alone."""

import copy
import pickle
import threading

import pytest
import torch
import transformers
from transformers import DynamicCache

import heedful
from heedful.compatibility import release
from heedful.eviction import (
    H2O,
    TOVA,
    MostHidden,
    SnapKV,
    StreamingLLM,
    Window,
)
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.evicting.hook import MaskColumns, hook_of, remove
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.versions import cache_argument, set_implementation
from helpers.cached import greedy, in_steps
from helpers.encoder_families import tiny as tiny_pair
from helpers.families import logits, ragged_mask, tiny, tokens
from helpers.unconverted import Knorm, beside, pair


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("policy", [StreamingLLM, Knorm, MostHidden, TOVA, H2O, SnapKV])
def test_generate_goes_on_as_with_a_converted_model(family, policy):
    models = pair(family, ranked=policy is MostHidden)
    ids, mask = tokens(2, 30), ragged_mask(2, 30)
    for options in (
        {},
        {"prefill_chunk_size": 7},
        {"num_beams": 3},
        {"num_return_sequences": 2, "num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
    ):
        caches = [heedful.new_cache(x, policy(tokens=15)) for x in models]
        results = []
        for model, cache in zip(models, caches, strict=True):
            torch.manual_seed(0)
            results.append(greedy(model, ids, 15, attention_mask=mask, cache=cache, **options))
        assert torch.equal(*results), options
        for own, other in zip(*(cache.positions() for cache in caches), strict=True):
            assert torch.equal(own, other)


@pytest.mark.skipif(
    release(transformers.__version__) < (5, 24),
    reason="transformers before 5.24 takes tokens back from a cache of its own in another way",
)
@pytest.mark.parametrize("policy", [StreamingLLM, Knorm, MostHidden])
def test_prompt_lookup_and_assisted_decoding(policy):
    models = pair(ranked=policy is MostHidden, max_position_embeddings=256)
    ids = tokens(1, 20).repeat(1, 2)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": tiny()}):
        caches = [heedful.new_cache(x, policy(tokens=24)) for x in models]
        results = [
            greedy(model, ids, 30, cache=cache, **options)
            for model, cache in zip(models, caches, strict=True)
        ]
        assert torch.equal(*results)
        assert caches[0].tokens == [23] * 3
        for own, other in zip(*(cache.positions() for cache in caches), strict=True):
            assert torch.equal(own, other)
        # Plain calls go on from it, and evict again.
        more = [greedy(x, results[0], 9, cache=c) for x, c in zip(models, caches, strict=True)]
        assert torch.equal(*more)
        assert caches[0].tokens == [23] * 3
        whole = greedy(models[0], ids, 30)
        cache = heedful.new_cache(models[0], policy(tokens=100))
        assert torch.equal(greedy(models[0], ids, 30, cache=cache, **options), whole)


@pytest.mark.parametrize("policy", [StreamingLLM, Knorm, MostHidden])
def test_crop_takes_back_what_was_recorded(policy):
    for family in ("llama", "gemma3_text"):
        model, ids = beside(tiny(family)), tokens(2, 40)
        cache, once = (heedful.new_cache(model, policy(tokens=20)) for _ in range(2))
        expected = in_steps(model, ids, [25, *[1] * 15], once)
        in_steps(model, ids[:, :25], [25], cache)
        cache.activate_past_recording()
        in_steps(model, tokens(2, 6), [4, 1, 1], cache)
        assert cache.tokens[1] == 25
        cache.crop(-6)
        assert cache.tokens[1] == 19
        actual = in_steps(model, ids[:, 25:], [1] * 15, cache)
        torch.testing.assert_close(actual, expected[:, 25:], rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="crop can take back 0 tokens here, asked for 1: call"):
            cache.crop(-1)
    with pytest.raises(ValueError, match="crop takes minus the number of tokens to remove, got 2"):
        cache.crop(2)


def test_turns_reset_and_other_batches():
    model, ids = beside(tiny()), tokens(2, 50)
    mask = ragged_mask(2, 50)
    for kind in (StreamingLLM, Knorm, MostHidden, TOVA, H2O, SnapKV):
        policy = kind(tokens=16)
        cache = heedful.new_cache(model, policy)
        first = in_steps(model, ids, [20, *[1] * 10, 20], cache, attention_mask=mask)
        cache.reset()
        assert cache.tokens == [0] * 3 and cache.nbytes == 0
        again = in_steps(model, ids, [20, *[1] * 10, 20], cache, attention_mask=mask)
        assert torch.equal(first, again)
        more = tokens(2, 6)
        full, grown = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
        expected = in_steps(
            model, full, [20, *[1] * 10, 20, 2, 1, 1, 1, 1], heedful.new_cache(model, policy),
            attention_mask=grown,
        )[:, 50:]  # fmt: skip
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
        cache.batch_select_indices(torch.tensor([0, 2]))  # rows 1 and 0
        rows = [1, 0]
        position, parts = 50, []
        with torch.no_grad():
            for piece in more[rows].split([2, 1, 1, 1, 1], 1):
                position += piece.shape[1]
                parts.append(
                    model(
                        piece,
                        attention_mask=grown[rows, :position],
                        **cache_argument(model, cache),
                    ).logits
                )
        torch.testing.assert_close(torch.cat(parts, 1), expected[rows], rtol=0, atol=1e-12)
        with pytest.raises(ValueError, match="has a batch of 2 sequences and the call has 1"):
            in_steps(model, tokens(1, 1), [1], cache)


def kept_by_hand(sizes: list[int], budget: StreamingLLM, slack: int) -> list[list[int]]:
    """What StreamingLLM has cached after each call."""
    cached, total, history = [], 0, []
    for size in sizes:
        cached += range(total, total + size)
        total += size
        if len(cached) > budget.tokens - 1 + slack:
            newest = cached[-(budget.tokens - 1 - budget.sinks) :]
            cached = cached[: budget.sinks] + newest
        history.append(list(cached))
    return history


@pytest.mark.parametrize("slack", [0, 1, 5, 30])
def test_slack_evicts_in_blocks(slack):
    model, ids = tiny("llama", max_position_embeddings=256), tokens(2, 120)
    budget, sizes = StreamingLLM(tokens=20, sinks=3, recent=4), [17, 1, 1, 40, 2, 3, *[1] * 56]
    cache = heedful.new_cache(model, budget, slack=slack)
    position, visible = 0, torch.zeros(120, 120, dtype=torch.bool)
    before, parts = [], []
    for size, kept in zip(sizes, kept_by_hand(sizes, budget, slack), strict=True):
        parts.append(in_steps(model, ids[:, position : position + size], [size], cache))
        for t in range(position, position + size):
            visible[t, [*before, *range(position, t + 1)]] = True
        position += size
        assert cache.positions()[1].tolist() == [kept, kept]
        assert cache.tokens == [len(kept)] * 3
        before = kept
    # The dense definition: one call with the mask of what each token's call has read.
    expected = logits(model, ids, attention_mask=visible[None, None].expand(2, 1, -1, -1))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=0, atol=1e-12)
    attended = visible[-56:].sum(1)
    assert attended.max() == 20 + slack and attended.min() >= 20
    with pytest.raises(ValueError, match="slack must be a whole number of at least 0, got -1"):
        heedful.new_cache(model, budget, slack=-1)


@pytest.mark.parametrize("slack", [0, 1, 9])
@pytest.mark.parametrize("policy", [TOVA, H2O])
def test_slack_by_attention_is_its_definition(policy, slack):
    """A loop over calls, by the family's own weights in one layer under a mask of what they read.

    Every call is scored, those that evict nothing too.
    """
    model = tiny("llama", max_position_embeddings=256, num_hidden_layers=1)
    dense, ids = copy.deepcopy(model), tokens(1, 90)
    dense.set_attn_implementation("eager")
    budget, sizes = policy(tokens=20, sinks=3, recent=4), [17, 1, 1, 30, 2, 3, *[1] * 36]
    cache, position, cached = heedful.new_cache(model, budget, slack=slack), 0, []
    hidden, total = torch.full((90, 90), -1e9, dtype=torch.float64), torch.zeros(90)
    for size in sizes:
        end = position + size
        cached += range(position, end)
        for t in range(position, end):
            hidden[t, [j for j in cached if j <= t]] = 0
        in_steps(model, ids[:, position:end], [size], cache)
        with torch.no_grad():
            mask = hidden[None, None, :end, :end]
            maps = dense(ids[:, :end], attention_mask=mask, output_attentions=True).attentions[0]
        newest = 1 if policy is TOVA else size
        received = maps[0, :, -newest:].mean(0).sum(0)
        total[:end] = received + (0 if policy is TOVA else total[:end])
        if len(cached) > 19 + slack:
            others = [j for j in cached if 3 <= j < end - 4]
            lowest = sorted(others, key=lambda j: total[j])[: len(cached) - 19]
            cached = [j for j in cached if j not in lowest]
        position = end
        assert cache.positions()[0].tolist() == [cached]


@pytest.mark.parametrize("policy", [StreamingLLM, Knorm, MostHidden, TOVA, H2O])
def test_slack_on_ragged_batches_and_windows(policy):
    """Each row keeps what it keeps alone."""
    for family in ("llama", "mistral"):
        model = beside(tiny(family, max_position_embeddings=256, **window(family)))
        rows = [tokens(1, n) for n in (14, 8)]
        ids = torch.cat([torch.nn.functional.pad(x, (14 - x.shape[1], 0)) for x in rows])
        more = tokens(2, 40)
        both, mask = torch.cat([ids, more], 1), torch.cat([ids != 0, more > 0], 1).long()
        budget = policy(tokens=16, sinks=2, recent=3)
        cache = heedful.new_cache(model, budget, slack=4)
        together = in_steps(model, both, [14, *[1] * 40], cache, attention_mask=mask)
        assert set(cache.tokens) <= set(range(15, 20))
        alone = in_steps(
            model, both[:1], [14, *[1] * 40], heedful.new_cache(model, budget, slack=4)
        )
        torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-12)


def window(family: str) -> dict[str, int]:
    return {"sliding_window": 30} if family == "mistral" else {}


@pytest.mark.parametrize("slack", [0, 7])
def test_bytes_are_those_of_the_slots(slack):
    model = tiny(dtype=torch.float32, max_position_embeddings=512)
    budget, chunk, row = 40, 16, 2 * 2 * 8 * 4  # key heads of K and V, dim, bytes
    cache = heedful.new_cache(model, StreamingLLM(tokens=budget), slack=slack)
    for sizes in ([chunk] * 6, [1] * 24):
        in_steps(model, tokens(1, sum(sizes)), sizes, cache)
        parts = [x for layer in cache.layers for x in (layer._keys.buffer, layer._values.buffer)]
        assert cache.nbytes == nbytes_of([*parts, *cache.layers[0].map.tensors])
    assert cache.nbytes <= 3 * (budget + slack) * row + (budget + slack) * 8
    assert cache.peak_nbytes <= cache.nbytes + (budget + slack + chunk) * row
    assert cache.whole_nbytes == 3 * 120 * row == 2 * cache.bf16_nbytes
    places = set()
    for _ in range(30):
        in_steps(model, tokens(1, 1), [1], cache)
        places.add(cache.layers[1].keys.untyped_storage().data_ptr())
    assert len(places) == 1  # no step makes a tensor of the cache anew


@pytest.mark.parametrize("slack", [0, 7])
def test_bytes_of_caches_that_observe(slack):
    model = tiny(dtype=torch.float32, max_position_embeddings=512)
    cache = heedful.new_cache(model, H2O(tokens=40), slack=slack)
    for size in [16, 16, 9, 1, 16, *[1] * 30]:
        in_steps(model, tokens(1, size), [size], cache)
        parts = [
            y for x in cache.layers for y in (x._keys.buffer, x._values.buffer, *x.map.tensors)
        ]
        assert cache.nbytes == nbytes_of(parts)
    row = 2 * 2 * 8 * 4  # key heads of K and V, dim, bytes
    assert cache.nbytes <= 3 * (40 + slack) * (row + 8 + 4)  # position and score
    assert cache.peak_nbytes <= cache.nbytes + 2 * (40 + slack + 16) * row


@pytest.mark.parametrize("policy", [StreamingLLM, TOVA, SnapKV])
def test_eight_bits(policy):
    models, ids = pair(dtype=torch.float32), tokens(2, 40)
    caches = [heedful.new_cache(x, policy(tokens=14), dtype=torch.int8) for x in models]
    sizes = [9, 1, 7, *[1] * 23]
    actual, expected = (in_steps(x, ids, sizes, c) for x, c in zip(models, caches, strict=True))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    for own, other in zip(*(cache.positions() for cache in caches), strict=True):
        assert torch.equal(own, other)
    whole = heedful.new_cache(models[0], policy(tokens=14))
    in_steps(models[0], ids, sizes, whole)
    assert caches[0].nbytes < whole.nbytes / 2


def test_hooks_leave_other_caches_and_the_model_alone():
    model, ids, mask = tiny(dtype=torch.float32), tokens(2, 30), ragged_mask(2, 30)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    sizes = [20, 1, 1, 8]

    def results():
        own = DynamicCache(config=model.config)
        return [
            logits(model, ids, attention_mask=mask), greedy(model, ids, 5, attention_mask=mask),
            in_steps(model, ids, sizes, own, attention_mask=mask),
        ]  # fmt: skip

    expected, state = results(), torch.get_rng_state()
    for policy in (StreamingLLM, TOVA, StreamingLLM):
        cache = heedful.new_cache(model, policy(tokens=16))
        in_steps(model, ids, sizes, cache, attention_mask=mask)
    assert torch.equal(torch.get_rng_state(), state)
    attention = [x for x in model.modules() if hook_of(x)]
    assert [len(x._forward_pre_hooks) for x in attention] == [1] * 3
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(map(torch.equal, results(), expected))
    remove(model)
    assert not any(x._forward_pre_hooks for x in model.modules())
    assert all(x.config is model.config for x in attention)
    assert all(map(torch.equal, results(), expected))


def test_observed_models_follow_another_implementation():
    models, ids = pair(attention="sdpa"), tokens(2, 40)
    for cache in (heedful.new_cache(models[0], TOVA(tokens=16)), None):
        models[0].set_attn_implementation("eager")
        twin = tiny(attn_implementation="eager")
        twin.load_state_dict(models[0].state_dict())
        assert torch.equal(logits(models[0], ids), logits(twin, ids))
        cache = heedful.new_cache(models[0], TOVA(tokens=16)) if cache is None else cache
        other = heedful.new_cache(models[1], TOVA(tokens=16))
        sizes = [20, *[1] * 20]
        actual, expected = (
            in_steps(models[0], ids, sizes, cache),
            in_steps(models[1], ids, sizes, other),
        )
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        assert all(map(torch.equal, cache.positions(), other.positions()))
    set_implementation(models[0].config, "flash_attention_2")
    with pytest.raises(ValueError, match="its attention implementation 'flash_attention_2' tells"):
        heedful.new_cache(models[0], TOVA(tokens=16))


def test_a_model_without_the_hooks_is_said():
    cache = heedful.new_cache(tiny(), TOVA(tokens=16))
    with pytest.raises(ValueError, match="TOVA reads attention, and attention layer 0 was called"):
        in_steps(tiny(), tokens(1, 21), [20, 1], cache)


def test_copies_of_models_and_caches_go_on():
    model, ids, mask = beside(tiny()), tokens(2, 40), ragged_mask(2, 40)
    for kind in (StreamingLLM, Knorm, MostHidden, TOVA, H2O):
        policy = kind(tokens=16)
        sizes = [20, 1, 1, 8, *[1] * 10]
        expected = in_steps(
            model, ids, sizes, heedful.new_cache(model, policy), attention_mask=mask
        )
        cache = heedful.new_cache(model, policy)
        in_steps(model, ids[:, :22], sizes[:3], cache, attention_mask=mask)
        for do in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
            twin, again = do(model), do(cache)
            assert sum(isinstance(hook_of(x), MaskColumns) for x in twin.modules()) == 3
            parts, position = [], 22
            for size in sizes[3:]:
                position += size
                with torch.no_grad():
                    out = twin(
                        ids[:, position - size : position], **cache_argument(model, again),
                        attention_mask=mask[:, :position],
                    )  # fmt: skip
                parts.append(out.logits)
            torch.testing.assert_close(torch.cat(parts, 1), expected[:, 22:], rtol=0, atol=1e-12)
    heedful.revert(model)
    assert not any(hook_of(x) for x in model.modules())
    heedful.convert(model, "standard")
    assert not isinstance(heedful.new_cache(model, False).layers[0], EvictingLayer)


def test_threads_share_a_model():
    model = beside(tiny())
    rows = [tokens(1, 60) for _ in range(6)]
    policies = [
        StreamingLLM(tokens=14),
        Knorm(tokens=16),
        MostHidden(tokens=20),
        Window(tokens=9),
        TOVA(tokens=16),
        H2O(tokens=16),
    ]

    def run(i: int, results: dict) -> None:
        cache = heedful.new_cache(model, policies[i], slack=i % 2)
        results[i] = in_steps(model, rows[i], [20, *[1] * 40], cache)

    alone, together = {}, {}
    for i in range(6):
        run(i, alone)
    threads = [threading.Thread(target=run, args=(i, together)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(alone[i], together[i]) for i in range(6))


class Placed(StreamingLLM):
    """A policy of a user's own that reads the position of the next token."""

    needs = ("positions",)


def test_what_an_evicting_cache_does_not_serve_is_said():
    model = tiny()
    for policy, message in (
        (Placed(tokens=16), "Placed needs a converted model, as it reads positions"),
        (StreamingLLM(tokens=(16, 20)), "one for each of the model's 3 attention layers"),
        (
            heedful.eviction.MostHidden(tokens=16),
            "MostHidden needs selectors, and this model has none: heedful.load",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            heedful.new_cache(model, policy)
    with pytest.raises(ValueError, match="is an encoder-decoder, whose cache needs a converted"):
        heedful.new_cache(tiny_pair("t5"), StreamingLLM(tokens=16))
    with pytest.raises(ValueError, match="which has no gradients"):
        cache = heedful.new_cache(model, StreamingLLM(tokens=16))
        model(tokens(1, 30), **cache_argument(model, cache))
    cache = heedful.new_cache(model, StreamingLLM(tokens=16))
    mask = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    in_steps(model, tokens(1, 30), [30], cache)
    with pytest.raises(ValueError, match="attention_mask must have a column for each of the 30"):
        in_steps(model, tokens(1, 1), [1], cache, attention_mask=mask)
    heedful.convert(model, "standard")
    for size in (5, 1):
        with pytest.raises(ValueError, match="was made for a model that is not converted"):
            in_steps(model, tokens(1, size), [size], heedful.new_cache(tiny(), None))
    with pytest.raises(ValueError, match="was made for a model that is not converted"):
        in_steps(model, tokens(1, 1), [1], cache)
    with pytest.raises(ValueError, match="slack must be 0 for a converted model, got 3"):
        heedful.new_cache(model, StreamingLLM(tokens=16), slack=3)


def test_an_interrupted_call_is_said():
    model, ids = tiny(), tokens(1, 30)
    cache = heedful.new_cache(model, StreamingLLM(tokens=16))

    def stop(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        in_steps(model, ids, [30], cache)
    hook.remove()
    with pytest.raises(ValueError, match="in the middle of a call that was interrupted"):
        in_steps(model, ids, [30], cache)
    cache.reset()
    assert in_steps(model, ids, [30], cache).isfinite().all()


def test_a_decoded_token_without_padding_gets_no_mask():
    model = tiny()
    cache = heedful.new_cache(model, StreamingLLM(tokens=24))
    masks = []

    def note(module, args, kwargs):
        masks.append(kwargs["attention_mask"])

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        for piece in tokens(2, 60).split([30, *[1] * 30], dim=1):
            model(piece, **cache_argument(model, cache))
    assert len(masks) == 3 * 31 and all(mask is None for mask in masks)
