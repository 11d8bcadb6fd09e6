"""Selectors beside a model's own attention: what they leave alone, and what they make leave."""

import copy
import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf import conversion_of
from heedful.hf.after_eviction import AfterEviction, LowRankLinear
from heedful.hf.budgets import write_budgets
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.convert import replace_attention
from heedful.hf.evicting.layer import EvictingLayer
from heedful.hf.versions import implementation_of
from heedful.nn import Selective
from heedful.testing import peak_memory_mib
from helpers.cached import greedy, in_steps
from helpers.families import logits, ragged_mask, stir, tiny, tokens
from helpers.unconverted import RANKED, beside, give_selectors

BUDGET = MostHidden(tokens=(15, 20, None), sinks=2, recent=3)


@pytest.fixture(params=["selectors", "with-matrices"])
def folder(tmp_path, request):
    """An adapter of selectors that rank, with matrices that act after an eviction or without."""
    base = tiny(dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    model = give_selectors(copy.deepcopy(base))
    budgets = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT: the base has no name
        if request.param == "with-matrices":
            model = heedful.get_peft_model(model, lora())
            stir(model, 0.3, "lora_B")
            conversion_of(model.get_base_model()).after_eviction = AfterEviction(
                model.get_base_model()
            )
        heedful.save_adapter(model, tmp_path / "a", base=str(tmp_path / "base"))
    if request.param == "selectors":
        write_budgets(tmp_path / "a" / "budgets.json", BUDGET, budgets, {})
    return tmp_path / "a"


def lora():
    return peft.LoraConfig(target_modules="all-linear", exclude_modules=r".*\.heedful(\..*)?", r=2)


def base_of(folder):
    return heedful.hf.stock.stock_model(str(folder.parent / "base")).eval()


def test_the_model_is_its_base_to_the_last_bit_until_the_first_eviction(folder):
    model, base, ids = heedful.load(folder), base_of(folder), tokens(2, 40)
    assert implementation_of(model.config) == implementation_of(base.config)
    assert torch.equal(logits(model, ids), logits(base, ids))
    sizes = [10, 1, 1, 1, 1, *[1] * 26]
    whole = in_steps(base, ids, sizes, heedful.new_cache(base, None))
    actual = in_steps(model, ids, sizes, heedful.new_cache(model, BUDGET))
    assert torch.equal(actual[:, :15], whole[:, :15])
    assert (actual[:, 15:] - whole[:, 15:]).abs().amax(2).min() > 1e-6
    assert torch.equal(in_steps(model, ids, sizes, heedful.new_cache(model, False)), whole)


def test_it_agrees_with_the_converted_one(folder):
    """Which `convert=True` opens, and where whole rows stand for steps."""
    ids = tokens(2, 60)
    own, other = heedful.load(folder), heedful.load(folder, convert=True)
    caches = [heedful.new_cache(x, BUDGET) for x in (own, other)]
    sizes = [24, *[1] * 36]
    actual, expected = (
        in_steps(x, ids, sizes, c) for x, c in zip((own, other), caches, strict=True)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)
    for a, b in zip(*(c.positions() for c in caches), strict=True):
        assert torch.equal(a, b)
    assert isinstance(caches[0].layers[0], EvictingLayer)
    assert not isinstance(caches[1].layers[0], EvictingLayer)
    with evicting(other, BUDGET, whole=24), torch.no_grad():
        rows = other(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(rows, actual, rtol=0, atol=2e-5)


@pytest.mark.parametrize("folder", ["selectors"], indirect=True)
def test_generate_evicts_by_the_budgets_beside_the_adapter(folder):
    model, ids = heedful.load(folder), tokens(1, 30)
    output = model.generate(ids, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    cache = heedful.new_cache(model)
    assert torch.equal(output.sequences, greedy(model, ids, 20, cache=cache))
    assert cache.tokens == [14, 19, 49]
    whole = heedful.load(folder, budgets=False)
    assert torch.equal(greedy(whole, ids, 20), greedy(base_of(folder), ids, 20))


class _Inputs:
    """A forward pre-hook that notes what attention modules are called with."""

    def __init__(self, model) -> None:
        self.noted = []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs) -> None:
        self.noted.append(kwargs["hidden_states"])


@pytest.mark.parametrize("slack", [0, 1, 6, 40])
def test_f_is_the_sum_over_all_queries_whenever_it_is_folded(slack):
    """The definition by loops over tokens, with evictions in blocks and in between."""
    model, ids, sizes = beside(tiny(max_position_embeddings=256)), tokens(1, 90), [20, 7, *[1] * 63]
    policy = MostHidden(tokens=20, sinks=2, recent=3)
    cache, inputs, total = heedful.new_cache(model, policy, slack=slack), _Inputs(model), 0
    own = [layer.self_attn.heedful for layer in model.model.layers]
    f, keys, cached = [{} for _ in range(3)], [{} for _ in range(3)], [[] for _ in range(3)]
    for size in sizes:
        inputs.noted = []
        in_steps(model, ids[:, total : total + size], [size], cache)
        with torch.no_grad():
            rows = [(x.query(y)[0], x.key(y)[0]) for x, y in zip(own, inputs.noted, strict=True)]
        for i, (queries, new) in enumerate(rows):
            for t, (q, k) in enumerate(zip(queries, new, strict=True)):
                for j in cached[i]:
                    f[i][j] += max(0.0, float(q @ keys[i][j]) * 8**-0.5)
                cached[i].append(total + t)
                keys[i][total + t], f[i][total + t] = k, 0.0
        total += size
        for i in range(3):
            if len(cached[i]) > 19 + slack:
                free = [j for j in cached[i] if 2 <= j < total - 3]
                free.sort(key=lambda j, f=f[i]: (1e-5 * j - f[j], j))
                gone = set(free[: len(cached[i]) - 19])
                cached[i] = [j for j in cached[i] if j not in gone]
        assert [x[0].tolist() for x in cache.positions()] == cached, total


def test_selectors_that_come_after_the_hooks_are_used(folder):
    """A base that has had a cache before has hooks without selectors."""
    base, ids = base_of(folder), tokens(2, 30)
    in_steps(base, ids, [30], heedful.new_cache(base, StreamingLLM(tokens=15)))
    late, expected = heedful.load(base, adapter=folder), heedful.load(folder)
    caches = [heedful.new_cache(x, BUDGET) for x in (late, expected)]
    mask = ragged_mask(2, 30)
    results = [
        in_steps(x, ids, [20, *[1] * 10], cache, attention_mask=mask)
        for x, cache in zip((late, expected), caches, strict=True)
    ]
    assert torch.equal(*results)


def test_selectors_and_matrices_that_are_replaced_are_used(folder):
    """`load_state_dict(assign=True)` puts other parameters in place of those that were there."""
    model, ids, sizes = heedful.load(folder), tokens(2, 40), [20, *[1] * 20]
    in_steps(model, ids, sizes, heedful.new_cache(model, BUDGET))
    other = {name: -x if ".query." in name else 3 * x if "lora_B" in name else x
             for name, x in model.state_dict().items()}  # fmt: skip
    copied = copy.deepcopy(model)
    model.load_state_dict(other, assign=True)
    with torch.no_grad():
        for name, p in copied.named_parameters():
            p.copy_(other[name])
    caches = [heedful.new_cache(x, BUDGET) for x in (model, copied)]
    actual, expected = (
        in_steps(x, ids, sizes, c) for x, c in zip((model, copied), caches, strict=True)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert all(map(torch.equal, *(c.positions() for c in caches)))


@pytest.mark.slow
def test_a_prompt_in_one_call_takes_linear_memory():
    """Law 12: F of a long prompt is added up without a map of its tokens."""
    code = """
import torch, sys
sys.path.insert(0, {tests!r})
import heedful
from heedful.eviction import MostHidden
from heedful.hf.versions import cache_argument
from helpers.families import tiny
from helpers.unconverted import beside
model = beside(tiny(dtype=torch.float32, max_position_embeddings=40000))
cache = heedful.new_cache(model, MostHidden(tokens=64))
ids = torch.ones(1, {tokens}, dtype=torch.long)
@torch.no_grad()
def run():
    model(ids, logits_to_keep=1, **cache_argument(model, cache))
"""
    tests = str(Path(__file__).parents[2])
    peaks = [peak_memory_mib(code.format(tests=tests, tokens=n)) for n in (4096, 16384)]
    assert peaks[1] < 5 * peaks[0], peaks


def test_what_the_selectors_cost_in_bytes():
    model = beside(tiny(dtype=torch.bfloat16, max_position_embeddings=256))
    cache = heedful.new_cache(model, MostHidden(tokens=20), slack=4)
    in_steps(model, tokens(1, 90), [16] * 5 + [1] * 10, cache)
    slots, streams = 24, 6 * 2 + 4 + 8  # selector keys, F, position
    pending = 5 * 6 * 2
    assert cache.nbytes <= 3 * (slots * (2 * 2 * 8 * 2 + streams) + pending)
    assert cache.bf16_nbytes == 3 * 90 * 2 * 2 * 8 * 2


def test_saved_and_loaded_and_reverted(tmp_path):
    model, ids = beside(tiny(dtype=torch.float32)), tokens(1, 40)
    base = tiny(dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    again = heedful.load(tmp_path / "whole")
    sizes = [20, *[1] * 20]
    expected = in_steps(model, ids, sizes, heedful.new_cache(model, BUDGET))
    actual = in_steps(again, ids, sizes, heedful.new_cache(again, BUDGET))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)  # weights lie elsewhere
    assert not conversion_of(again).model.model.layers[0].self_attn.heedful.host.attends
    model.set_attn_implementation("eager")
    actual = in_steps(model, ids, sizes, heedful.new_cache(model, BUDGET))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
    model.set_attn_implementation("sdpa")
    heedful.revert(model)
    assert type(model) is type(base) and model.state_dict().keys() == base.state_dict().keys()
    assert not any(x._forward_pre_hooks for x in model.modules())


def test_folders_written_before_open_beside_the_model(folder):
    """Their selectors were trained to rank, and what they said of masks was nothing."""
    about = json.loads((folder / "adapter.json").read_text())
    for part in about["mechanisms"]:
        assert part["mechanism"].pop("masks") is False
    (folder / "adapter.json").write_text(json.dumps(about))
    (folder / "budgets.json").unlink(missing_ok=True)
    if about["format"] == 1:
        attends = heedful.load(folder).model.layers[0].self_attn.heedful
        assert attends.host.attends and attends.config.masks  # nothing says that it ranks
        (folder / "training.json").write_text(json.dumps({"recipe": {"targets": "maps"}}))
    layer = heedful.load(folder).model.layers[0].self_attn.heedful
    assert not layer.host.attends and not layer.config.masks


@pytest.mark.parametrize("folder", ["with-matrices"], indirect=True)
def test_matrices_cost_nothing_before_an_eviction_and_are_peft_s_after(folder):
    model, ids = heedful.load(folder), tokens(2, 40)
    layers = [x for x in model.modules() if isinstance(x, LowRankLinear)]
    with torch.profiler.profile() as whole:
        logits(model, ids)
    with torch.profiler.profile() as plain:
        logits(base_of(folder), ids)
    linear = [sum(e.name == "aten::linear" for e in x.events()) for x in (whole, plain)]
    assert linear[0] == linear[1]
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(layers) == sum("lora_A" in name for name in tensors)
    save_file(
        {k: x * (0 if "lora_B" in k else 1) for k, x in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    idle, sizes = heedful.load(folder), [24, *[1] * 16]
    without, acting = (in_steps(x, ids, sizes, heedful.new_cache(x, BUDGET)) for x in (idle, model))
    bare = beside(base_of(folder))
    expected = in_steps(bare, ids, sizes, heedful.new_cache(bare, BUDGET))
    torch.testing.assert_close(without, expected, rtol=0, atol=1e-6)
    assert (acting - without)[:, 24:].abs().amax(2).min() > 1e-4


def test_what_such_a_model_cannot_do_is_said(tmp_path):
    model = beside(tiny())
    with pytest.raises(ValueError, match=r"keeps its own attention.*convert=True\) to train it"):
        heedful.look(model, tokens(1, 8))
    with pytest.raises(ValueError, match="masks=False needs a selector of its own"):
        Selective(masks=False)
    with pytest.raises(ValueError, match="masks must be True or False, got 'no'"):
        Selective("extra", masks="no")
    cache = heedful.new_cache(model, MostHidden(tokens=16))
    with pytest.raises(ValueError, match="was called without the hook that hands its input"):
        in_steps(tiny(), tokens(1, 8), [8], cache)
    mixed = tiny()
    replace_attention(mixed, {RANKED: [0, 2]}, attends=False)
    with pytest.raises(ValueError, match="MostHidden needs a mechanism that masks tokens"):
        heedful.new_cache(mixed, MostHidden(tokens=16))
    heedful.new_cache(mixed, MostHidden(tokens=(16, None, 16)))
    heedful.new_cache(mixed, StreamingLLM(tokens=16))
