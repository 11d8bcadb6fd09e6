"""TriAttention: a calibration by hand, scores by hand, and what its caches hold."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import heedful
from heedful.eviction import CachedTokens
from heedful.hf.budgets import write_budgets
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.family.modules import attention_modules
from heedful.hf.family.rotation import rotation_of
from heedful_lab.rivals.calibration import (
    bands_of,
    calibrate,
    read_calibration,
    write_calibration,
)
from heedful_lab.rivals.triattention import (
    OFFSETS,
    Bands,
    Calibration,
    QueryStatistics,
    TriAttention,
)
from helpers.cached import converted, greedy, in_steps
from helpers.families import FAMILIES, GROUPED, logits, ragged_mask, tiny, tokens

ROTARY = ("llama", "qwen3", "gemma2", "gpt_neox", "glm", "cohere")


def calibrated(name: str = "standard", **options):
    model = converted(name, **options)
    return model, calibrate(model, [tokens(2, 30), tokens(1, 12)])


def by_hand(layer: QueryStatistics, keys: Tensor, position: int, heads: str) -> list[float]:
    """Each key's score, term by term; a key is un-rotated where the definition has it so."""
    centre, lengths, (partners, frequencies, _) = layer
    group = len(centre) // len(keys)
    of_heads = []
    for head in range(len(centre)):
        scores = []
        for key in keys[head // group]:
            total, band = 0.0, 0
            for c, partner in enumerate(partners.tolist()):
                if partner < c:
                    continue
                w = frequencies[c].item()
                q = complex(centre[head, c], 0 if partner == c else centre[head, partner])
                k = complex(key[c], 0 if partner == c else key[partner])
                for offset in OFFSETS:
                    turn = complex(
                        math.cos(w * (position + offset)), math.sin(w * (position + offset))
                    )
                    total += (q * turn * k.conjugate()).real / len(OFFSETS)
                mean = lengths[head, band].item()
                total += (1 - abs(q) / mean) * mean * abs(k)
                band += 1
            scores.append(total)
        mean = sum(scores) / len(scores)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in scores) / len(scores))
        of_heads.append([(x - mean) / deviation for x in scores])
    each = zip(*of_heads, strict=True)
    return [max(x) if heads == "max" else sum(x) / len(x) for x in each]


@pytest.mark.parametrize("heads", ["max", "mean"])
def test_the_score_is_its_definition(heads):
    """One channel of nine is not rotated; each query head's key is shared by two."""
    partners = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3, 8])
    w = torch.tensor([1.0, 0.2, 0.03, 1e-4], dtype=torch.float64)
    bands = Bands.of(partners, torch.cat([w, -w, w.new_zeros(1)]))
    centre = torch.randn(4, 9, dtype=torch.float64)
    lengths = bands.lengths(centre) * (1 + torch.rand(4, 5, dtype=torch.float64))
    layers = tuple(QueryStatistics(c * centre, c * lengths, bands) for c in (1.0, 3.0, 2.0))
    layers = (*layers[:2], QueryStatistics(centre.flip(0), lengths.flip(0), bands))
    keys = torch.randn(2, 2, 7, 9, dtype=torch.float64)
    at = torch.tensor([90, 40_000])
    policy = TriAttention(5, 1, 1, calibration=Calibration(layers, {}), heads=heads)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[1, [0, 5]] = False
    places = torch.arange(7).expand(2, -1)
    for index in (0, 2):
        cached = CachedTokens(places, 7, keys=keys, layer=index, next=at)
        actual = policy.score(cached)
        for row in range(2):
            expected = by_hand(layers[index], keys[row], at[row].item(), heads)
            torch.testing.assert_close(actual[row].tolist(), expected, rtol=1e-9, atol=1e-9)
        masked = policy.score(cached._replace(real=real))
        expected = by_hand(layers[index], keys[1][:, real[1]], at[1].item(), heads)
        torch.testing.assert_close(masked[1, real[1]].tolist(), expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(masked[0], actual[0], rtol=1e-12, atol=1e-12)


def test_a_query_at_the_centre_has_the_logits_that_are_expected():
    """The first sum, for one offset, is the logit of the centre rotated there by the family."""
    model, calibration = calibrated()
    module = model.model.layers[1].self_attn
    rotation, layer = rotation_of(model, module), calibration.layers[1]
    key = torch.randn(1, 4, 1, 8, dtype=torch.float64)
    cached = rotation(key, torch.tensor([[7.0]], dtype=torch.float64))
    for ahead in (1, 64, 4096):
        place = torch.tensor([[float(20 + ahead)]], dtype=torch.float64)
        query = rotation(layer.centre.double()[None, :, None], place)
        angles = (20 + ahead) * layer.bands.frequencies
        own = layer.bands.rotated(layer.centre.double(), angles.cos(), angles.sin())
        expected = (query * cached).sum(-1).flatten()
        # The family's own angles are in fp32.
        torch.testing.assert_close((own * cached[0, :, 0]).sum(-1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ROTARY)
def test_bands_rotate_as_the_family_does(family):
    config = CONFIG_MAPPING[family](**(FAMILIES.get(family, GROUPED | {"head_dim": 8})))
    model = AutoModelForCausalLM.from_config(config).double()
    heedful.convert(model, "standard")
    for module in attention_modules(model):
        rotation = rotation_of(model, module)
        bands = bands_of(rotation, module.heedful.shape.dim)
        x = torch.randn(1, 2, 5, module.heedful.shape.dim, dtype=torch.float64)
        places = torch.tensor([[0.0, 1.0, 3.0, 50.0, 900.0]])
        angles = places[0, :, None].double() * bands.frequencies
        own = bands.rotated(x, angles.cos(), angles.sin())
        torch.testing.assert_close(own, rotation(x, places), rtol=2e-4, atol=2e-4)
        torch.testing.assert_close(bands.lengths(own), bands.lengths(x))
        alone = bands.partners == torch.arange(len(bands.partners))
        assert bool(alone.any()) == (family in ("gpt_neox", "glm"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_calibration_is_the_mean_of_the_queries_before_the_rotation(family):
    """Read off the projection, and the norm behind it, by hooks of one's own."""
    model = converted("standard", family)
    first, second = tokens(2, 30), tokens(1, 12)
    dim = 16 if family == "qwen3" else 8
    calibration = calibrate(model, [first, second])
    queries: dict[int, list[Tensor]] = {}
    for index, module in enumerate(attention_modules(model)):
        source = module.q_norm if family == "qwen3" else module.q_proj
        source.register_forward_hook(
            lambda *a, index=index: queries.setdefault(index, []).append(a[2].reshape(-1, 4, dim))
        )
    for ids in (first, second):
        logits(model, ids)
    for index, layer in enumerate(calibration.layers):
        all_queries = torch.cat(queries[index])
        assert len(all_queries) == 72
        torch.testing.assert_close(layer.centre.double(), all_queries.mean(0), rtol=1e-4, atol=1e-5)
        pairs = all_queries.unflatten(-1, (2, dim // 2)).norm(dim=-2)
        torch.testing.assert_close(layer.lengths.double(), pairs.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["standard", "selective", "differential"])
def test_budgets_hold_and_a_full_one_is_none(name):
    model, calibration = calibrated(name, dtype=torch.float32)
    ids = tokens(2, 40)
    sizes = [9, 1, 1, 4, *[1] * 25]
    whole, cache = (
        heedful.new_cache(model),
        heedful.new_cache(model, TriAttention(40, calibration=calibration)),
    )
    expected = in_steps(model, ids, sizes, whole)
    assert torch.equal(in_steps(model, ids, sizes, cache), expected)
    small = heedful.new_cache(model, TriAttention(15, calibration=calibration))
    actual = in_steps(model, ids, sizes, small)
    assert set(small.tokens) == {14} and small.nbytes < whole.nbytes / 2
    assert not torch.allclose(actual, expected)
    for positions in small.positions():
        assert {0, 1, 2, 3, *range(32, 40)} <= set(positions[0].tolist())


def test_the_cache_evicts_what_the_score_says():
    """Layer 0, whose keys do not depend on what was evicted, token by token."""
    model, calibration = calibrated()
    ids = tokens(1, 30)
    policy = TriAttention(9, 2, 3, calibration=calibration)
    whole, small = heedful.new_cache(model), heedful.new_cache(model, policy)
    in_steps(model, ids, [30], whole)
    keys = whole.layers[0].keys[0]
    cached: list[int] = []
    for t in range(30):
        with torch.no_grad():
            model(ids[:, t : t + 1], past_key_values=small)
        cached.append(t)
        if len(cached) >= 9:
            scores = by_hand(calibration.layers[0], keys[:, cached], t + 1, "max")
            free = [(s, j) for s, j in zip(scores, cached, strict=True) if 2 <= j <= t - 3]
            cached.remove(min(free)[1])
        assert small.positions()[0][0].tolist() == cached


def test_padded_rows_are_single_rows():
    model, calibration = calibrated()
    policy = TriAttention(12, 2, 3, calibration=calibration)
    ids, mask = tokens(3, 20), ragged_mask(3, 20)
    options = {"new": 15, "pad_token_id": 0, "eos_token_id": None}
    both = greedy(
        model, ids, cache=heedful.new_cache(model, policy), attention_mask=mask, **options
    )
    for row in range(3):
        own = ids[row : row + 1, 3 * row :]
        alone = greedy(model, own, cache=heedful.new_cache(model, policy), **options)
        assert torch.equal(both[row, 20:], alone[0, own.shape[1] :])
    whole = greedy(model, ids, attention_mask=mask, **options)
    assert not torch.equal(both, whole)


def test_whole_sequences_are_steps():
    model, calibration = calibrated()
    policy = TriAttention(12, calibration=calibration, sinks=2, recent=3)
    ids = tokens(2, 40)
    expected = in_steps(model, ids, [1] * 40, heedful.new_cache(model, policy))
    inputs = [module.heedful.needs for module in attention_modules(model)]
    with evicting(model, policy):
        torch.testing.assert_close(logits(model, ids), expected, rtol=1e-10, atol=1e-10)
    assert inputs == [module.heedful.needs for module in attention_modules(model)]


def test_taken_back_tokens_leave_no_trace():
    """As assisted decoding does: a call is recorded, cropped, and another one comes."""
    model, calibration = calibrated()
    policy = TriAttention(12, 2, 3, calibration=calibration)
    ids, wrong = tokens(1, 30), tokens(1, 4)
    straight, cropped = heedful.new_cache(model, policy), heedful.new_cache(model, policy)
    expected = in_steps(model, ids, [20, 2, 8], straight)
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cropped)
        cropped.activate_past_recording()
        model(torch.cat([ids[:, 20:22], wrong], 1), past_key_values=cropped)
        cropped.crop(-4)
        actual = model(ids[:, 22:], past_key_values=cropped).logits
    torch.testing.assert_close(actual, expected[:, 22:], rtol=1e-10, atol=1e-10)


def test_a_file_gives_the_same_policy(tmp_path):
    model, calibration = calibrated(dtype=torch.float32)
    path, ids = tmp_path / "deep" / "calibration.safetensors", tokens(2, 30)
    write_calibration(path, calibration, {"data": ["a book"]})
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["heedful.calibration"])
    assert about["about"] == {"data": ["a book"]}
    again = read_calibration(path, model)
    expected, actual = (
        in_steps(model, ids, [1] * 30, heedful.new_cache(model, TriAttention(13, calibration=x)))
        for x in (calibration, again)
    )
    assert torch.equal(actual, expected)
    read_calibration(path, model.bfloat16())  # the same weights, rounded


def test_what_is_no_calibration_of_the_model_is_refused(tmp_path):
    model, calibration = calibrated(dtype=torch.float32)
    path = tmp_path / "calibration.safetensors"
    write_calibration(path, calibration, {})
    for other in (converted("standard"), converted("selective"), converted("standard", "qwen3")):
        with pytest.raises(ValueError, match=r"calibration .* is that of another model"):
            read_calibration(path, other)
    wider = converted("standard", head_dim=16)
    with pytest.raises(ValueError, match=r"layer 0 has 4 query heads of 16 here, and 4 .* of 8"):
        heedful.new_cache(wider, TriAttention(20, calibration=calibration))
    fewer = Calibration(calibration.layers[:1], calibration.model)
    with (
        pytest.raises(ValueError, match=r"layer 1 has 4 .* here, and no such layer there"),
        evicting(model, TriAttention(20, calibration=fewer)),
    ):
        pass
    data = path.read_bytes()
    for damaged in (data[: len(data) // 2], data[:5], b"", b"text" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"calibration .* is damaged"):
            read_calibration(path, model)
    with pytest.raises(ValueError, match=r"missing.safetensors is not a file; write_calib"):
        read_calibration(Path("missing.safetensors"), model)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="must be a file of write_calibration in format 1"):
        read_calibration(path, model)
    layers = (calibration.layers[0]._replace(centre=calibration.layers[0].centre * math.nan),)
    write_calibration(path, Calibration(layers, calibration.model), {})
    with pytest.raises(ValueError, match="lacks layer 0, or holds NaN there"):
        read_calibration(path, model)


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match=r"Attention 0 has no rotary embedding, which a calib"):
        calibrate(converted("standard", "gpt2"), [tokens()])
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = converted("standard", rope_parameters=dynamic)
    with pytest.raises(
        ValueError, match=r"LlamaAttention cannot be .*because its frequencies change"
    ):
        calibrate(model, [tokens()])
    with pytest.raises(ValueError, match="model must be a converted decoder"):
        calibrate(tiny(), [tokens()])
    with pytest.raises(ValueError, match="sequences must hold at least one token"):
        calibrate(converted("standard"), [])


def test_the_policy_needs_its_calibration(tmp_path):
    with pytest.raises(ValueError, match="calibration must be that of the model, got None"):
        TriAttention(20)
    model, calibration = calibrated()
    with pytest.raises(ValueError, match="heads must be one of 'max', 'mean', got 'sum'"):
        TriAttention(20, calibration=calibration, heads="sum")
    with pytest.raises(ValueError, match=r"budgets.json names heedful's own policies"):
        write_budgets(tmp_path / "b.json", TriAttention(20, calibration=calibration), model, {})
    assert not list(tmp_path.iterdir())
    assert repr(TriAttention(20, calibration=calibration)).startswith("TriAttention(tokens=20")
    convolved = converted("mta-pre")
    with pytest.raises(ValueError, match="does not support MultiToken"):
        heedful.new_cache(convolved, TriAttention(20, calibration=calibrate(convolved, [tokens()])))


def test_heads_that_stay_near_their_centre_prefer_what_the_centre_likes():
    """With queries that never vary the score is the expected logit alone: it finds the key."""
    bands = Bands.of(torch.arange(4), torch.zeros(4, dtype=torch.float64))
    centre = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    layer = QueryStatistics(centre, bands.lengths(centre), bands)
    keys = torch.eye(4)[None, None]
    cached = CachedTokens(torch.arange(4)[None], 4, keys=keys, layer=0, next=torch.tensor([4]))
    score = TriAttention(5, 0, 0, calibration=Calibration((layer,), {})).score(cached)
    assert score.argmax() == 0 and torch.equal(score[0, 1:], score[0, 1:2].expand(3))
