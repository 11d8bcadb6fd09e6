"""One model in two threads: what a call knows belongs to that call."""

import threading
from contextlib import nullcontext

import pytest
import torch

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf import conversion_of
from heedful.hf.after_eviction import AfterEviction, Calls
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.intercept import intercept
from heedful.hf.versions import cache_argument
from helpers.families import logits, stir, tiny, tokens

POLICY = MostHidden(tokens=14, sinks=2, recent=3)


def evict_model():
    from peft import LoraConfig

    torch.manual_seed(0)
    model = tiny()
    heedful.convert(model, heedful.Selective(selector="extra"))
    stir(model, 0.5, ".heedful.")
    config = LoraConfig(
        target_modules="all-linear", exclude_modules=r".*\.heedful(\..*)?", r=2, lora_alpha=2
    )
    wrapped = heedful.get_peft_model(model, config)
    stir(wrapped, 0.3, "lora_")
    conversion_of(model).after_eviction = AfterEviction(model)
    return model.eval()


def stepped(model, ids, length):
    """Logits of the last step of a row, after `length` tokens in the cache."""
    cache = heedful.new_cache(model, POLICY)
    with torch.no_grad():
        for part in (ids[:, :length], ids[:, length:]):
            out = model(input_ids=part, **cache_argument(model, cache)).logits
    return out


def between(model, first, second):
    """What `first` gives while `second` runs in another thread, in the middle of its last call."""
    main, begun, ended = threading.current_thread(), threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (begun.wait(30), second(), ended.set()))

    def pause(module, args):
        if threading.current_thread() is main and not begun.is_set():
            begun.set()
            assert ended.wait(30)

    layer = model.get_decoder().layers[0]
    other.start()
    hook = layer.register_forward_pre_hook(pause)
    try:
        return first()
    finally:
        hook.remove()
        begun.set()
        other.join()


def test_matrices_act_by_the_cache_of_their_own_call():
    model, ids = evict_model(), tokens(1, 40)
    whole, evicted = stepped(model, ids[:, :9], 8), stepped(model, ids, 32)
    cache = heedful.new_cache(model, POLICY)
    with torch.no_grad():
        model(input_ids=ids[:, :32], **cache_argument(model, cache))

        def last_call():
            return model(input_ids=ids[:, 32:], **cache_argument(model, cache)).logits

        actual = between(model, last_call, lambda: stepped(model, ids[:, :9], 8))
        assert torch.equal(actual, evicted)  # whose matrices act in full
        cache = heedful.new_cache(model, POLICY)
        model(input_ids=ids[:, :8], **cache_argument(model, cache))
        actual = between(
            model,
            lambda: model(input_ids=ids[:, 8:9], **cache_argument(model, cache)).logits,
            lambda: stepped(model, ids, 32),
        )
    assert torch.equal(actual, whole)  # whose matrices do not act


@pytest.mark.parametrize("context", ["evicting", "intercept", "simulate_chunks"])
def test_a_context_is_one_thread_s(context):
    model, ids = evict_model(), tokens(1, 40)
    expected, entered, left = logits(model, ids), threading.Event(), threading.Event()
    seen = []

    def around(layer, call, compute):
        seen.append(threading.current_thread())
        output = compute(call)
        return output._replace(output=output.output * 0)

    def inside():
        matrices = conversion_of(model).after_eviction
        contexts = {
            "evicting": lambda: evicting(model, StreamingLLM(tokens=14)),
            "intercept": lambda: intercept(model, around),
            "simulate_chunks": lambda: matrices.simulate_chunks(Calls((14, 14, 14), 8, 8)),
        }
        with contexts[context]():
            results.append(logits(model, ids))
            entered.set()
            assert left.wait(30)

    results, other = [], threading.Thread(target=inside)
    other.start()
    assert entered.wait(30)
    try:
        actual = logits(model, ids)
    finally:
        left.set()
        other.join()
    assert torch.equal(actual, expected)
    assert not torch.equal(results[0], expected)
    assert set(seen) <= {other}


def test_generating_in_threads_gives_what_each_call_gives_alone():
    model, rows = evict_model(), [tokens(1, length) for length in (10, 24, 40, 61)]

    def generate(ids):
        cache = heedful.new_cache(model, POLICY)
        options = {"max_new_tokens": 12, "do_sample": False, "prefill_chunk_size": 8}
        return model.generate(ids, cache=cache, pad_token_id=0, eos_token_id=None, **options)

    alone = [generate(ids) for ids in rows]
    replies = [None] * len(rows)

    def run(index):
        replies[index] = [generate(rows[index]) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, several in zip(alone, replies, strict=True):
        assert all(torch.equal(reply, expected) for reply in several)


def test_the_last_entered_is_called_first_and_passes_the_others():
    model, ids, order = tiny(), tokens(1, 9), []
    heedful.convert(model, "standard")

    def named(name):
        def around(layer, call, compute):
            order.append((name, layer.shape.layer))
            return compute(call)

        return around

    expected = logits(model, ids)
    with intercept(model, named("outer")), nullcontext(), intercept(model, named("inner")):
        assert torch.equal(logits(model, ids), expected)
    count = len(model.get_decoder().layers)
    assert order == [(name, i) for i in range(count) for name in ("inner", "outer")]
    order.clear()
    assert torch.equal(logits(model, ids), expected) and not order
