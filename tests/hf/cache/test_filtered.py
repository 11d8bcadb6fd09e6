"""Caches of filtered keys: what is evicted leaves no other logit changed, and the tail stays."""

import pytest
import torch
from torch import Tensor

import heedful
from heedful.eviction import H2O, TOVA, KeyDiff, Knorm, Random, SnapKV, StreamingLLM
from heedful.eviction.policy import Budget
from heedful.hf.cache.filtered import FilteredKeysCache
from heedful.hf.versions import cache_argument, cache_of
from heedful.nn import HeadShape, LayerInputs, MultiToken
from heedful.ops import Visibility, multi_token_attention
from heedful.ops.common.standard import masked_softmax
from heedful.ops.mta.reference import mix_heads
from helpers.cached import converted, in_steps
from helpers.families import tokens

SHAPE = HeadShape(heads=4, key_heads=2, dim=8, hidden=32, layer=0)
FORMS = {
    "flash": MultiToken.flash(),
    "look-back": MultiToken((6, 6), None, 1, None, 2, rank=2, centred=False),
    "pairs": MultiToken((6, 11), None, 1, 2, 2, rank=2),
    "few": MultiToken((1, 3), None, 1, None, None, rank=1),
    "one key": MultiToken((4, 1), None, 1, None, 2, rank=1),
    "long": MultiToken((9, 21), None, 1, None, 2, rank=3),
}
POLICIES = (StreamingLLM, H2O, TOVA, SnapKV, Knorm, KeyDiff, Random)


def layer_of(form: str):
    torch.manual_seed(3)
    layer = FORMS[form].build(SHAPE).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.6)
    return layer.requires_grad_(False)


def drawn(count: int, batch: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(4)
    return tuple(torch.randn(batch, h, count, 8, dtype=torch.float64) for h in (4, 2, 2))


def over(layer, q: Tensor, k: Tensor, v: Tensor, kept: Tensor, padding=None) -> Tensor:
    """Dense attention in which query i sees `kept[b, i]`, with the logits of the whole."""
    steps: dict[str, Tensor] = {}
    inputs, visibility = LayerInputs(), Visibility(padding=padding)
    whole = layer._map(q, k, visibility, None, inputs, steps)
    last = [name for name in ("logits", "conv", "mix") if name in steps][-1]
    maps = masked_softmax(steps[last], kept[:, None], None)
    if layer.post_mix is not None:
        maps = mix_heads(maps, layer.post_mix, 2)
    assert whole.shape == maps.shape
    return maps @ v.repeat_interleave(2, dim=1)


@torch.no_grad()
def stepped(layer, cache, q, k, v, sizes: list[int], padding=None) -> tuple[Tensor, Tensor]:
    """Outputs of calls of so many tokens, and what each query could see."""
    total, outputs, start = q.shape[2], [], 0
    kept = torch.zeros(len(q), total, total, dtype=torch.bool)
    for size in sizes:
        stop = start + size
        part = Visibility(padding=None if padding is None else padding[:, :stop])
        cached = cache.positions() if start else torch.empty(len(q), 0, dtype=torch.int64)
        cache.expect(part)
        keys, values = cache.update(k[:, :, start:stop], v[:, :, start:stop])
        out = cache.attend(
            layer, q[:, :, start:stop], keys, values, visibility=part, scale=None,
            inputs=LayerInputs(),
        )  # fmt: skip
        outputs.append(out)
        for i in range(start, stop):
            kept[:, i].scatter_(1, cached, True)
            kept[:, i, start : i + 1] = True
        start = stop
    return torch.cat(outputs, dim=2), kept


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "sizes", [[1] * 90, [50, *[1] * 40], [30, 1, 1, 25, 3, *[1] * 30]], ids=len
)
def test_evicted_tokens_are_hidden_and_nothing_else_changes(form, policy, sizes):
    layer = layer_of(form)
    q, k, v = drawn(90)
    budget = Budget(policy(tokens=44, sinks=2), 44)
    cache = FilteredKeysCache(layer, budget=budget)
    actual, kept = stepped(layer, cache, q, k, v, sizes)
    assert cache.length == 43 and int(kept[0, -1].sum()) == 44
    torch.testing.assert_close(actual, over(layer, q, k, v, kept), rtol=0, atol=1e-12)
    newest = layer.newest_keys
    if newest:
        last = cache._streams.positions[:, -newest:]
        assert bool((last == torch.arange(90 - newest, 90)).all()), "in order, at the end"


@pytest.mark.parametrize("form", FORMS)
def test_padding_and_no_budget(form):
    layer, (q, k, v) = layer_of(form), drawn(60)
    padding = torch.ones(2, 60, dtype=torch.bool)
    padding[0, :17] = False
    for sizes in ([60], [1] * 60, [20, 1, 1, 30, 8]):
        for mask in (None, padding):
            actual, kept = stepped(layer, FilteredKeysCache(layer), q, k, v, sizes, mask)
            if mask is not None:
                kept &= mask[:, None]
                kept &= mask[:, :, None]
            expected = over(layer, q, k, v, kept, mask)
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_documents(form):
    layer, (q, k, v) = layer_of(form), drawn(60)
    documents = (torch.arange(60) // 23)[None]
    whole = layer(q, k, v, visibility=Visibility(documents=documents)).output
    cache, start = FilteredKeysCache(layer), 0
    for size in (20, 1, 5, *[1] * 34):
        part, rows = Visibility(documents=documents[:, : start + size]), slice(start, start + size)
        cache.expect(part)
        keys, values = cache.update(k[:, :, rows], v[:, :, rows])
        out = cache.attend(
            layer, q[:, :, rows], keys, values, visibility=part, scale=None, inputs=LayerInputs()
        )
        torch.testing.assert_close(out, whole[:, :, rows], rtol=0, atol=1e-12)
        start += size


@pytest.mark.parametrize("form", FORMS)
def test_windows_and_bytes(form):
    """What leaves a window leaves the cache; filtered keys have what it gave its neighbours."""
    layer, (q, k, v) = layer_of(form), drawn(60, 1)
    cache, parts = FilteredKeysCache(layer, sliding=8), []
    for i in range(60):
        keys, values = cache.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
        parts.append(cache.attend(
            layer, q[:, :, i : i + 1], keys, values, visibility=Visibility(window=8), scale=None,
            inputs=LayerInputs(),
        ))  # fmt: skip
    expected = layer(q, k, v, visibility=Visibility(window=8)).output
    torch.testing.assert_close(torch.cat(parts, dim=2), expected, rtol=0, atol=1e-12)
    assert cache.length == 7 and cache.bf16_nbytes == 2 * 7 * 2 * 16
    rank = layer.w.shape[1]
    assert cache.whole_nbytes == 8 * 7 * 2 * 8 * (rank + 1)
    whole = FilteredKeysCache(layer)
    stepped(layer, whole, q, k, v, [60])
    assert whole.whole_nbytes == 8 * 60 * 2 * 8 * 2, "as the model's own where nothing leaves"


def test_calls_that_are_taken_back():
    """Of ten tokens six; filtered keys of those before them go back to what they were."""
    layer, (q, k, v) = layer_of("flash"), drawn(70)
    cache = FilteredKeysCache(layer)

    @torch.no_grad()
    def call(start: int, stop: int) -> Tensor:
        keys, values = cache.update(k[:, :, start:stop], v[:, :, start:stop])
        return cache.attend(
            layer, q[:, :, start:stop], keys, values, visibility=Visibility(), scale=None,
            inputs=LayerInputs(),
        )  # fmt: skip

    call(0, 40)
    cache.activate_past_recording()
    call(40, 50)
    cache.crop(-6)
    q, k, v = (torch.cat([x[:, :, :44], x[:, :, 50:]], dim=2) for x in (q, k, v))
    actual = torch.cat([call(i, i + 1) for i in range(44, 64)], dim=2)
    expected = layer(q, k, v).output[:, :, 44:]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_gradients_through_a_cache():
    """Of a call that goes on from cached tokens: those of all at once."""
    model, ids = converted("mta-flash"), tokens(2, 20)
    whole = model(input_ids=ids, use_cache=False).logits[:, 12:]
    expected = torch.autograd.grad(whole.square().sum(), list(model.parameters()))
    cache = cache_of(model(input_ids=ids[:, :12], use_cache=True))
    later = model(input_ids=ids[:, 12:], use_cache=True, **cache_argument(model, cache))
    actual = torch.autograd.grad(later.logits.square().sum(), list(model.parameters()))
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)  # its own parameters are in fp32


def test_int8_is_near_the_whole_cache():
    model, ids = converted("mta-flash"), tokens(2, 40)
    whole, eight = (
        in_steps(model, ids, [30, *[1] * 10], heedful.new_cache(model, dtype=dtype))
        for dtype in (None, torch.int8)
    )
    assert 0 < float((eight - whole).abs().max()) < 0.2 * float(whole.abs().max())


def test_what_a_budget_must_hold():
    model = converted("mta-flash")
    message = "tokens must be at least 16 here: 4 sinks, the 10 newest, whose keys are not final"
    with pytest.raises(ValueError, match=message):
        heedful.new_cache(model, StreamingLLM(tokens=15))
    assert heedful.new_cache(model, StreamingLLM(tokens=16)).tokens == [0, 0, 0]


def test_a_family_that_changes_keys_after_the_cache():
    layer, (q, k, v) = layer_of("flash"), drawn(3)
    cache = FilteredKeysCache(layer)
    keys, values = cache.update(k, v)
    with pytest.raises(ValueError, match="changes keys or values after the cache has returned"):
        cache.attend(
            layer, q, keys * 1, values, visibility=Visibility(), scale=None, inputs=LayerInputs()
        )


def test_what_is_shown_of_the_kernels_is_what_the_operator_takes():
    layer, (q, k, v) = layer_of("flash"), drawn(20)
    expected = layer(q, k, v).output
    actual = multi_token_attention(q, k, v, **layer.shown())
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
