"""Budgets of single key heads: what each head attends to, and what is there once for all."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

import heedful
from heedful.eviction import H2O, TOVA, LowestGate, MostHidden, Random, SnapKV, StreamingLLM
from heedful.hf.cache.budget import Budget
from heedful.hf.cache.by_head import ByHeadCache
from heedful.hf.cache.counters import nbytes_of
from heedful.hf.cache.int8 import dequantize, quantize
from heedful.hf.cache.rows_under_budget import evicting
from heedful.nn import HeadShape, LayerInputs, RetentionGate, Selective, Standard
from heedful.ops import Visibility
from helpers.cached import greedy, in_steps, tensors_in
from helpers.families import logits, ragged_mask, tiny, tokens, varied

MECHANISMS = {
    "standard": Standard(),
    "selective-extra": Selective(selector="extra", dim=4),
    "retention-gate": RetentionGate(),
    "self-pruned": RetentionGate(window=3),
}
SERVED = [
    ("standard", StreamingLLM),
    ("standard", Random),
    ("selective-extra", MostHidden),
    ("selective-extra", StreamingLLM),
    ("retention-gate", LowestGate),
    ("self-pruned", LowestGate),
]
UNLIKE = ((11, 15), (17, 9), (12, 12))  # of three layers' two key heads


def model_of(name: str, family: str = "llama", **changes):
    """Mistral's window is wider than some budgets, and narrower than others."""
    if family == "mistral":
        changes["sliding_window"] = 14
    return varied(tiny(family, num_hidden_layers=3, **changes), MECHANISMS[name])


def cache_of(model, policy, budgets=UNLIKE, **options):
    return heedful.new_cache(model, policy(tokens=budgets, sinks=2, recent=3), **options)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@torch.no_grad()
def by_hand(layer, policy, budgets, q, k, v, x, quantized) -> tuple[Tensor, list[list[list[int]]]]:
    """One sequence, token by token: outputs, and which tokens each head caches after each."""
    heads, size = len(budgets), q.shape[1] // len(budgets)
    cached: list[list[int]] = [[] for _ in budgets]
    f = torch.zeros(q.shape[2], dtype=q.dtype)
    outputs, history = [], []
    for t in range(q.shape[2]):
        row = []
        for head in range(heads):
            cached[head].append(t)
            at = cached[head]
            for i in range(head * size, (head + 1) * size):
                scores = k[0, head, at] @ q[0, i, t] * q.shape[-1] ** -0.5 - f[at]
                row.append(scores.softmax(0) @ v[0, head, at])
        outputs.append(torch.stack(row)[None, :, None])
        if isinstance(policy, MostHidden):
            most = cached[max(range(heads), key=budgets.__getitem__)]
            for j in most:
                if j not in (0, t):
                    selected = layer.query(x[0, t]) @ quantized(layer.key(x[0, j]))
                    f[j] += max(0.0, selected.item() * q.shape[-1] ** -0.5)
        kept: list[int] = []
        for head in sorted(range(heads), key=budgets.__getitem__):
            if len(cached[head]) >= budgets[head]:
                free = [j for j in cached[head] if policy.sinks <= j <= t - policy.recent]
                free = [j for j in free if j not in kept]
                hides = isinstance(policy, MostHidden)
                cached[head].remove(max(free, key=lambda j: (f[j].item() if hides else 0, -j)))
            kept = cached[head]
        history.append([sorted(at) for at in cached])
    return torch.cat(outputs, 2), history


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("kind", [MostHidden, StreamingLLM])
@pytest.mark.parametrize("budgets", [(9, 13), (14, 8), (10, 10)])
def test_each_head_attends_to_its_own_tokens(kind, budgets, int8):
    """The rule by loops, in fp64; in eight bits of what these stand for."""
    mechanism = Selective(selector="extra", dim=8) if kind is MostHidden else Standard()
    layer = mechanism.build(HeadShape(4, 2, 8, 32, 0)).double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    policy = kind(tokens=20, sinks=2, recent=3)
    q, k, v = (torch.randn(1, h, 40, 8, dtype=torch.float64) for h in (4, 2, 2))
    x = torch.randn(1, 40, 32, dtype=torch.float64)
    cache = ByHeadCache(layer, None, Budget(policy, budgets), int8=int8)

    def quantized(x: Tensor) -> Tensor:
        if not int8:
            return x
        x = x.reshape(1, -1, x.shape[-2] if x.ndim > 1 else 1, x.shape[-1])
        return dequantize(*quantize(x), torch.float64)

    exact = (quantized(k).view_as(k), quantized(v).view_as(v))
    expected, history = by_hand(
        layer, policy, budgets, q, *exact, x, lambda key: quantized(key).view_as(key)
    )
    for t in range(40):
        now = slice(t, t + 1)
        with torch.no_grad():
            actual = cache.attend(
                layer, q[:, :, now], *cache.update(k[:, :, now], v[:, :, now]),
                visibility=Visibility(), scale=None, inputs=LayerInputs(input=x[:, now]),
            )  # fmt: skip
        torch.testing.assert_close(actual, expected[:, :, now], rtol=0, atol=1e-12)
        places = {head: group for group in cache._tokens.groups for head in group.heads}
        actual = [places[i].of(cache._tokens.positions[:, 0])[0].sort().values for i in range(2)]
        assert [at.tolist() for at in actual] == history[t]


@pytest.mark.parametrize(("name", "policy"), SERVED)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_equal_budgets_of_heads_are_those_of_the_layer(name, policy, family):
    model, ids, mask = model_of(name, family), tokens(3, 30), ragged_mask(3, 30)
    sizes = [9, 7, 1, 1, 6, 1, 5]
    layers, heads = (cache_of(model, policy, x) for x in ((11, 13, 9), ((11,) * 2, (13,) * 2, 9)))
    expected = in_steps(model, ids, sizes, layers, attention_mask=mask)
    actual = in_steps(model, ids, sizes, heads, attention_mask=mask)
    same(actual[mask.bool()], expected[mask.bool()])
    assert heads.tokens == layers.tokens
    assert heads.nbytes == layers.nbytes


@pytest.mark.parametrize(("name", "policy"), [x for x in SERVED if x[1] is not Random])
def test_a_batch_is_its_rows(name, policy):
    """Padding leaves first. (Chance draws by the place in the row, padding included.)"""
    model, rows = model_of(name), [tokens(1, n) for n in (28, 19, 24)]
    ids = torch.cat([torch.nn.functional.pad(row, (28 - row.shape[1], 0)) for row in rows])
    sizes = [24, *[1] * 4]
    together = in_steps(
        model, ids, sizes, cache_of(model, policy), attention_mask=(ids != 0).long()
    )
    for actual, row in zip(together, rows, strict=True):
        count = row.shape[1]
        alone = in_steps(model, row, [count - 4, *[1] * 4], cache_of(model, policy))
        # A rotary embedding turns by fp32 angles, which are others behind padding.
        torch.testing.assert_close(actual[-count:], alone[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "policy"), SERVED)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_heads_are_nested_and_every_byte_counted(name, policy, int8, family):
    dtype = torch.int8 if int8 else None
    model = model_of(name, family)
    cache = cache_of(model, policy, dtype=dtype)
    for sizes in ([20], [1] * 12, [7]):
        in_steps(model, tokens(2, sum(sizes)), sizes, cache)
        for part, budgets in zip(cache.layers, UNLIKE, strict=True):
            window = part.window or 99
            assert part._nbytes == nbytes_of(tensors_in(part))
            positions = part._tokens.positions[:, 0]
            assert positions.shape[1] == part.length == min(max(budgets), window) - 1
            larger = None
            for group in part._tokens.groups:
                own = group.of(positions)
                assert own.shape[1] == group.keys.length == group.values.length
                assert own.shape[1] == min(budgets[group.heads[0]], window) - 1
                for row, ids in enumerate(own.tolist()):
                    assert len(set(ids)) == len(ids)
                    assert larger is None or set(ids) <= set(larger[row])
                larger = own.tolist()
            if part._state is not None:
                assert part._state.shape[2] == part.length
    assert cache.nbytes == sum(part._nbytes for part in cache.layers) <= cache.peak_nbytes
    whole = cache_of(model, policy, tuple(max(x) for x in UNLIKE), dtype=dtype)
    for sizes in ([20], [1] * 12, [7]):
        in_steps(model, tokens(2, sum(sizes)), sizes, whole)
    assert cache.nbytes < whole.nbytes and cache.whole_nbytes == whole.whole_nbytes


@pytest.mark.parametrize(("name", "policy"), SERVED)
@pytest.mark.parametrize(("first", "step"), [(1, 1), (15, 1), (6, 4)])
def test_a_whole_row_is_its_steps(name, policy, first, step):
    model, ids = model_of(name), tokens(3, 26)
    eviction = policy(tokens=UNLIKE, sinks=2, recent=3)
    sizes = [first, *[step] * ((26 - first) // step)]
    expected = in_steps(model, ids, sizes, heedful.new_cache(model, eviction))
    with evicting(model, eviction, first, step):
        same(logits(model, ids), expected)
    assert not torch.allclose(expected, logits(model, ids), atol=1e-4)


@pytest.mark.parametrize(("name", "policy"), SERVED)
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_calls_can_be_taken_back(name, policy, dtype):
    """Whole calls, and the last tokens of one."""
    model, ids, new = model_of(name), tokens(2, 25), tokens(2, 9)
    for back in (9, 4):
        cache, plain = (cache_of(model, policy, dtype=dtype) for _ in range(2))
        for x in (cache, plain):
            in_steps(model, ids, [20, 5], x)
        cache.activate_past_recording()
        in_steps(model, new, [9], cache)
        cache.crop(-back)
        for layer in cache.layers:
            layer.end_past_recording()
        if back < 9:
            plain.activate_past_recording()
            in_steps(model, new[:, : 9 - back], [9 - back], plain)
            for layer in plain.layers:
                layer.end_past_recording()
        last = tokens(2, 6)
        same(in_steps(model, last, [6], cache), in_steps(model, last, [6], plain))


@pytest.mark.parametrize(("name", "policy"), SERVED)
def test_generate_beams_copies_and_files(name, policy):
    model = model_of(name, dtype=torch.float32)
    ids, mask = tokens(2, 14), ragged_mask(2, 14)
    for options in ({}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
        cache = cache_of(model, policy)
        assert greedy(model, ids, 10, attention_mask=mask, cache=cache, **options).shape[1] == 24
        assert cache.tokens == [max(x) - 1 for x in UNLIKE]
    cache = cache_of(model, policy)
    in_steps(model, ids, [14], cache)
    copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    expected = in_steps(model, ids[:, :5], [1] * 5, cache)
    for again in copies:
        assert torch.equal(in_steps(model, ids[:, :5], [1] * 5, again), expected)


def test_a_models_own_budgets_are_stored(tmp_path):
    model = model_of("selective-extra")
    eviction = MostHidden(tokens=((13, 15), None, 14), sinks=2, recent=3)
    heedful.hf.budgets.write_budgets(tmp_path / "budgets.json", eviction, model, {})
    assert heedful.hf.budgets.read_budgets(tmp_path / "budgets.json", model) == eviction
    cache = heedful.new_cache(model, eviction)
    in_steps(model, tokens(1, 30), [30], cache)
    assert cache.tokens == [14, 30, 13]


@pytest.mark.parametrize(
    ("policy", "tokens", "message"),
    [
        (MostHidden, ((13, 14, 15), 13, 13), "one for each of its 2 key heads, got 3 numbers"),
        (
            MostHidden,
            ((13, 12), 13, 13),
            "tokens must be whole numbers .* = 13, got 12",
        ),
        (MostHidden, ((), 13, 13), r"tokens must be whole numbers .* got \(\)"),
        (TOVA, ((13, 14), 13, 13), "TOVA reads what all heads attend to"),
        (H2O, ((13, 14), 13, 13), "H2O reads what all heads attend to"),
        (SnapKV, ((13, 14), 13, 13), "SnapKV reads what all heads attend to"),
    ],
)
def test_wrong_budgets_are_refused(policy, tokens, message):
    with pytest.raises(ValueError, match=message):
        heedful.new_cache(model_of("selective-extra"), policy(tokens=tokens))


@pytest.mark.parametrize("mechanism", [Selective(), heedful.nn.Gated()])
def test_heads_that_depend_on_each_other_are_refused(mechanism):
    model = varied(tiny(num_hidden_layers=3), mechanism)
    with pytest.raises(ValueError, match="need a layer whose heads are independent"):
        heedful.new_cache(model, StreamingLLM(tokens=((13, 14), 13, 13)))


def test_keys_that_a_family_changes_behind_the_cache_are_refused():
    layer = Standard().build(HeadShape(4, 2, 8, 32, 0))
    cache = ByHeadCache(layer, None, Budget(StreamingLLM(20), (13, 14)))
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"keys must have the 2 key heads .* got 4; give"):
        cache.update(q, q)
    keys, values = cache.update(k, k)
    with pytest.raises(ValueError, match="changes keys or values after the cache has returned"):
        cache.attend(
            layer, q, 2 * keys, values, visibility=Visibility(), scale=None, inputs=LayerInputs()
        )


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_keys_and_values_of_all_heads_are_offloaded(dtype):
    model = model_of("selective-extra")
    cache = cache_of(model, MostHidden, dtype=dtype)
    in_steps(model, tokens(1, 20), [20], cache)
    part = cache.layers[0]
    part.device = torch.device("meta")
    part.prefetch()
    for group in part._tokens.groups:
        for slots in (group.keys, group.values):
            assert {x.device.type for x in slots.tensors} == {"meta"}
    assert part._tokens.positions.device.type == part._state.device.type == "cpu"
