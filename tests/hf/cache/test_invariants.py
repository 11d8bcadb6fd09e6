"""What holds between the counters and the tensors of every layer's cache, after every call."""

import pytest
import torch

import heedful
from heedful.eviction import POLICIES, Window
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.streams import Numbers
from heedful.hf.cache.summaries import SummaryCache
from helpers.cached import MECHANISMS, converted, in_steps, serves, tensors_in
from helpers.encoder_families import tiny as tiny_pair
from helpers.families import stir, tokens

TOKENS = 30
WAYS = {"whole": [TOKENS], "chunks": [9, 7, 1, 1, 6, 1, 5], "steps": [1] * TOKENS}
WITH_ROWS = [name for name in MECHANISMS if name.startswith(("mta", "grouped"))]
SERVED = [(name, policy) for name in MECHANISMS for policy in (None, *POLICIES)
          if policy is None or name not in WITH_ROWS
          if serves(policy, name)]  # fmt: skip


def new_cache(model, policy=None):
    sinks = 0 if policy is Window else 2
    return heedful.new_cache(model, policy and policy(tokens=13, sinks=sinks, recent=3))


def check(part: AttentionCache) -> None:
    """The invariants that `Counters` states, between two calls of the model."""
    counters, length = part.counters, part.length
    assert counters.pending == 0
    assert 0 <= length <= counters.total and 0 <= counters.prompt <= counters.total
    assert counters.prompt == counters.total or not counters.prefill
    positions = part.positions()
    assert positions.shape[-1] == length
    assert (positions.diff(dim=1) > 0).all() and (positions < counters.total).all()
    if not part.record_past or not isinstance(part, SummaryCache):
        assert part._nbytes == nbytes_of(tensors_in(part))
    if isinstance(part, LayerCache):
        check_tokens(part)
    elif isinstance(part, SummaryCache):
        check_summaries(part)
    else:
        assert length == counters.total


def check_tokens(part: LayerCache) -> None:
    counters, streams = part.counters, part._streams
    if not part.record_past:
        assert part._undo is None
        most = counters.total if part.window is None else part.window - 1 + part._past
        most = most if part.budget is None else min(most, part.budget.tokens - 1)
        assert part.length == min(counters.total, most)
    for stream in streams.values():
        if isinstance(stream, Numbers):
            assert stream.contents is None or stream.contents.shape[2] == part.length
        elif part.is_initialized:
            assert stream.length == part.length
            assert 0 <= stream.start <= stream.buffer.shape[2] - stream.length
    assert (streams.positions is None) == (part.budget is None or not part.is_initialized)
    if (past := part._tails["queries"]).rows is not None:
        count, least = past.rows.shape[2], min(past.count, counters.total)
        assert least <= count <= counters.total and (part.record_past or count == least)


def check_summaries(part: SummaryCache) -> None:
    total, state = part.counters.total, part._state
    assert 0 <= state.ledger.first <= state.ledger.opened <= total
    assert part.length == total - state.ledger.first == state.ledger.index.shape[1]
    assert state.open.count == total - state.ledger.opened
    assert nbytes_of([state.keys, state.open.keys]) == nbytes_of([state.keys])
    assert (state.ledger.count <= state.ledger.start.shape[1]).all()


def check_all(cache) -> None:
    for part in cache.layers:
        check(part)
    assert cache.nbytes == sum(part._nbytes for part in cache.layers) <= cache.peak_nbytes
    assert len({part.counters.total for part in cache.layers}) == 1


@pytest.fixture(autouse=True)
def pending_tokens(monkeypatch):
    """Within a call, the tokens that wait for attention are the last ones, in order."""

    def checked(attend):
        def do(part, layer, q, *args, **kwargs):
            new, total = part.counters.pending, part.counters.total
            assert new == q.shape[2] <= total
            if isinstance(part, LayerCache):
                assert new <= part.length
                if (positions := part._streams.positions) is not None:
                    expected = torch.arange(total - new, total)
                    assert (positions[:, part.length - new :] == expected).all()
            return attend(part, layer, q, *args, **kwargs)

        return do

    for kind in (LayerCache, SummaryCache):
        monkeypatch.setattr(kind, "attend", checked(kind.attend))


@pytest.mark.crossed
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(("name", "policy"), SERVED)
def test_counters_and_tensors_agree_after_every_call(name, policy, family, way):
    """Mistral's window of 20 is wider than the budget, and narrower than the text."""
    window = {"sliding_window": 20} if family == "mistral" else {}
    model, ids = converted(name, family, **window), tokens(2, TOKENS)
    cache, position = new_cache(model, policy), 0
    for piece in ids.split(WAYS[way], dim=1):
        in_steps(model, piece, [piece.shape[1]], cache)
        position += piece.shape[1]
        assert cache.get_seq_length() == position
        check_all(cache)
    cache.batch_repeat_interleave(2)
    check_all(cache)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0 and cache.tokens == [0] * 3


@pytest.mark.crossed
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("name", "policy"),
    # Scores that add up over queries cannot be taken back.
    [(name, policy) for name, policy in SERVED if policy is None or policy.observes == 0],
)
def test_counters_and_tensors_agree_after_calls_that_are_taken_back(name, policy, family):
    window = {"sliding_window": 20} if family == "mistral" else {}
    model, cache = converted(name, family, **window), None
    cache = new_cache(model, policy)
    in_steps(model, tokens(2, 18), [18], cache)
    cache.activate_past_recording()
    for sizes, back in (([4], 4), ([3], 1), ([1, 1, 1], 2), ([2], 0), ([1], 1), ([1] * 3, 3)):
        in_steps(model, tokens(2, sum(sizes)), sizes, cache)
        check_all(cache)
        cache.crop(-back)
        check_all(cache)
    for part in cache.layers:
        part.end_past_recording()
    check_all(cache)


def test_tokens_that_were_taken_back_are_no_part_of_the_prompt():
    model = converted("standard")
    cache = new_cache(model)
    cache.activate_past_recording()
    in_steps(model, tokens(1, 12), [12], cache)
    cache.crop(-3)
    check_all(cache)
    in_steps(model, tokens(1, 1), [1], cache)
    assert [part.counters.prompt for part in cache.layers] == [9] * 3


@pytest.mark.parametrize("mechanism", ["mta", "standard"])
def test_of_a_source_all_tokens_are_cached_and_none_is_pending(mechanism):
    pair = tiny_pair("bart")
    heedful.convert(pair, mechanism)
    stir(pair, 0.2, only=".heedful.")
    source, target, cache = tokens(2, 11), tokens(2, 9), heedful.new_cache(pair)
    for piece in target.split([4, 1, 3, 1], dim=1):
        with torch.no_grad():
            pair(input_ids=source, decoder_input_ids=piece, cache=cache)
        for part in (*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers):
            check(part)
    assert [part.length for part in cache.cross_attention_cache.layers] == [11] * 3


def off_by_one(name):
    def change(part):
        setattr(part.counters, name, getattr(part.counters, name) + 1)

    return change


def shorter(part, slots="keys"):
    part._streams[slots].length -= 1


def doubled(part):
    positions = part._streams.positions
    positions[..., 1] = positions[..., 0]


def without_one(name):
    def change(part):
        numbers = part._streams[name]
        numbers.contents = numbers.contents[..., 1:]

    return change


def one_row(part):
    tail = part._tails["queries"]
    tail.rows = tail.rows[:, :, 1:]


def larger_count(part):
    part._nbytes += 8


def opened_later(part):
    ledger = part._state.ledger
    part._state = part._state._replace(ledger=ledger._replace(opened=ledger.opened + 1))


BREAKS = {
    "total": ("standard", None, off_by_one("total")),
    "pending": ("standard", None, off_by_one("pending")),
    "prompt": ("selective", None, off_by_one("prompt")),
    "length": ("standard", None, shorter),
    "one stream": ("selective-extra", None, lambda part: shorter(part, "selector keys")),
    "a budget's length": ("standard", POLICIES[1], shorter),
    "positions": ("standard", POLICIES[1], doubled),
    "state": ("selective", None, without_one("F")),
    "score": ("standard", POLICIES[2], without_one("score")),
    "query rows": ("mta-everywhere", None, one_row),
    "bytes": ("standard", None, larger_count),
    "open tokens": ("grouped", None, opened_later),
    "near tokens": ("grouped", None, off_by_one("total")),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_invariant_is_noticed(what):
    name, policy, change = BREAKS[what]
    model = converted(name)
    cache = new_cache(model, policy)
    in_steps(model, tokens(2, 20), [12, 8], cache)
    check(cache.layers[0])
    change(cache.layers[0])
    with pytest.raises(AssertionError):
        check(cache.layers[0])
