"""`generate(cache_implementation="offloaded")` through transformers' own loop, without a GPU.

On one device a tensor that was not fetched back reads as well as one that was. So here what lies
elsewhere has its sign turned: whoever attends to it without fetching it generates other tokens.
"""

from contextlib import nullcontext
from weakref import WeakSet

import pytest
import torch

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.cache.base import AttentionCache
from heedful.hf.cache.layer import LayerCache
from heedful.hf.cache.summaries import SummaryCache
from heedful.nn import NAMES, Grouped
from helpers.cached import converted, greedy
from helpers.families import fits, logits, tiny, tokens

CASES = [(x, y) for x in NAMES for y in ("llama", "mistral", "gpt2") if fits(x, y)]


class Stream(nullcontext):
    """In the place of a stream of a GPU; transformers enters it and waits for it."""

    def wait_stream(self, other: object) -> None:
        pass


class Moves:
    """What was brought away and back, in order."""

    def __init__(self) -> None:
        self.away: WeakSet = WeakSet()
        self.places: list[str] = []
        self.going = "away"


@pytest.fixture
def moves(monkeypatch) -> Moves:
    """Streams that do nothing, and layers whose keys and values turn their sign when they leave."""
    monkeypatch.setattr("heedful.hf.cache.new._device_types", lambda model: {"cuda"})
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    moves = Moves()

    def turn(cache: AttentionCache, where: str) -> None:
        if (where == "away") == (cache in moves.away):
            return
        moves.places.append(where)
        (moves.away.add if where == "away" else moves.away.discard)(cache)
        if isinstance(cache, SummaryCache):
            names = ("keys", "values", "group_keys", "group_values")
            turned = {x: -getattr(cache._state, x) for x in names}
            cache._state = cache._state._replace(**turned).with_views()
        else:
            for slots in (cache._streams["keys"], cache._streams["values"]):
                slots.map_batch(torch.neg)

    def going(where: str, then):
        def do(cache: SummaryCache) -> None:
            moves.going = where
            then(cache)

        return do

    monkeypatch.setattr(LayerCache, "offload", lambda cache: turn(cache, "away"))
    monkeypatch.setattr(LayerCache, "prefetch", lambda cache: turn(cache, "back"))
    # Summaries leave when their tokens have been attended to: its own code says when.
    monkeypatch.setattr(SummaryCache, "offload", going("away", SummaryCache.offload))
    monkeypatch.setattr(SummaryCache, "prefetch", going("back", SummaryCache.prefetch))
    monkeypatch.setattr(SummaryCache, "_move", lambda cache, device: turn(cache, moves.going))
    return moves


@pytest.mark.crossed
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("name", "family"), CASES)
def test_offloaded_is_not_offloaded(name, family, beams, moves):
    """Longer than Mistral's window of 4, so that what leaves it is let go in both places."""
    model, ids = converted(name, family), tokens(2, 7)
    expected = greedy(model, ids, 6, num_beams=beams)
    assert not moves.places
    actual = greedy(model, ids, 6, num_beams=beams, cache_implementation="offloaded")
    assert torch.equal(actual, expected)
    # Of three layers each leaves at each of the six calls, and comes back before the next.
    assert moves.places.count("away") == 3 * 6 and moves.places.count("back") >= 3 * 5


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("name", ["standard", "selective"])
def test_offloaded_under_a_budget(name, family, moves):
    model, ids = converted(name, family), tokens(2, 20)
    policy = (MostHidden if name == "selective" else StreamingLLM)(tokens=14)
    caches = [heedful.new_cache(model, policy, offloading=x) for x in (False, True)]
    expected, actual = (greedy(model, ids, 6, cache=cache) for cache in caches)
    assert torch.equal(actual, expected) and moves.places.count("away") >= 3 * 6
    whole = torch.cat([ids, expected[:, 20:]], dim=1)
    assert caches[1].tokens == caches[0].tokens and whole.shape == actual.shape


@pytest.mark.parametrize("config", ["selective", Grouped(size=2, window=2)])
def test_what_is_not_fetched_back_is_found(config, moves, monkeypatch):
    """The control: with every fetch left out, the numbers are others."""
    model, ids = tiny("llama"), tokens(2, 12)
    heedful.convert(model, config)
    for kind in (LayerCache, SummaryCache):
        monkeypatch.setattr(kind, "prefetch", lambda cache: None)
    cache = heedful.new_cache(model, offloading=True)
    steps = [model(input_ids=ids[:, i : i + 1], cache=cache).logits for i in range(12)]
    assert (torch.cat(steps, dim=1) - logits(model, ids)).abs().max() > 1e-3


def test_without_a_gpu_it_is_refused_at_the_call():
    model = tiny()
    heedful.convert(model, "standard")
    message = r"offloading=True .*needs a model on a CUDA device, this one is on cpu; leave it out"
    with pytest.raises(ValueError, match=message):
        heedful.new_cache(model, offloading=True)
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, 5), max_new_tokens=2, cache_implementation="offloaded")
    heedful.new_cache(model)
