"""LoRA that acts once a cache has evicted: where it acts, and what stays as it was."""

import copy
import json
import os
import pickle
import warnings
from dataclasses import replace
from itertools import product

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file

import heedful
from heedful.eviction import TOVA, MostHidden, StreamingLLM
from heedful.hf import after_eviction, conversion_of
from heedful.hf.after_eviction import AfterEviction, Calls
from heedful.hf.budgets import read_budgets, write_budgets
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.versions import cache_argument
from heedful.training.under_eviction import EvictionInTraining
from helpers.families import logits, stir, tiny, tokens

CHUNK = 8
POLICY = MostHidden(tokens=(15, 20, None), sinks=2, recent=3)
EXTRA = heedful.Selective(selector="extra")


def selective(family: str = "llama", mechanism=EXTRA):
    torch.manual_seed(0)
    model = tiny(family)
    heedful.convert(model, mechanism)
    stir(model, 0.5, ".heedful.")
    return model


def with_matrices(model, rank: int = 2):
    """PEFT's wrapper of a converted model, whose matrices act after an eviction."""
    config = LoraConfig(
        target_modules="all-linear", exclude_modules=r".*\.heedful(\..*)?", r=rank, lora_alpha=2
    )
    wrapped = heedful.get_peft_model(model, config)
    stir(wrapped, 0.3, "lora_")
    conversion_of(model).after_eviction = AfterEviction(model)
    return wrapped


def in_steps(model, policy, ids, step: int = CHUNK) -> torch.Tensor:
    cache = heedful.new_cache(model, policy)
    with torch.no_grad():
        calls = [
            model(input_ids=part, **cache_argument(model, cache)).logits
            for part in ids.split(step, 1)
        ]
    return torch.cat(calls, 1)


@pytest.fixture
def adapter(tmp_path):
    """The folders of a base and of an adapter for it, and the model that was saved."""
    base = tiny(dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    model = copy.deepcopy(base)
    heedful.convert(model, EXTRA)
    stir(model, 0.5, ".heedful.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PEFT: the base has no name
        wrapped = with_matrices(model)
        heedful.save_adapter(wrapped, tmp_path / "a", base=str(tmp_path / "base"))
    return tmp_path / "a", model.eval()


@pytest.mark.parametrize("merged", [False, True])
def test_budgets_of_other_matrices_are_refused(tmp_path, merged):
    base = tiny(dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")

    def save(name, seed):
        model = copy.deepcopy(base)
        torch.manual_seed(0)
        heedful.convert(model, EXTRA)
        stir(model, 0.5, ".heedful.")
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PEFT: the base has no name
            wrapped = with_matrices(model)
            stir(wrapped, 1e-4 * seed, "lora_")  # merged weights hardly differ
            if merged:
                conversion_of(model).after_eviction = None
            heedful.save_adapter(wrapped, tmp_path / name, base=str(tmp_path / "base"))
        return heedful.load(tmp_path / name)

    first, other = save("first", 1), save("other", 2)
    path = tmp_path / "first" / "budgets.json"
    write_budgets(path, POLICY, first, {})
    assert heedful.load(tmp_path / "first")._heedful.eviction == POLICY
    (tmp_path / "other" / "budgets.json").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="were searched with other LoRA: search"):
        heedful.load(tmp_path / "other")
    selectors = copy.deepcopy(base)
    torch.manual_seed(0)
    heedful.convert(selectors, EXTRA)
    stir(selectors, 0.5, ".heedful.")
    with pytest.raises(ValueError, match="LoRA that this model lacks: search"):
        read_budgets(path, selectors)
    write_budgets(path, POLICY, selectors, {})
    with pytest.raises(ValueError, match="were searched without the LoRA: search"):
        read_budgets(path, other)
    write_budgets(path, POLICY, first, {})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(ValueError, match="must be a file of heedful budget in format 2"):
        heedful.load(tmp_path / "first")


# Budgets of 15 and 20 are full after two and three chunks; the first is idle in Gemma 2's windows.
@pytest.mark.parametrize(("family", "first"), [("llama", 16), ("qwen3", 16), ("gemma2", 24)])
def test_until_something_is_evicted_the_model_is_what_it_was(family, first):
    model, ids = selective(family), tokens(2, 51)
    expected, stepped = logits(model, ids), in_steps(model, POLICY, ids)
    with_matrices(model)
    assert torch.equal(logits(model.eval(), ids), expected)
    whole = in_steps(model, False, ids)
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-9)
    changed = (in_steps(model, POLICY, ids) - stepped).abs().amax((0, 2))
    assert not changed[:first].any() and changed[first:].min() > 1e-6
    assert torch.equal(logits(model, ids), expected)  # another call does not remember


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "policy", [POLICY, TOVA(tokens=(15, 20, None), sinks=2, recent=3), StreamingLLM(tokens=15)]
)
@pytest.mark.parametrize(("first", "step"), [(CHUNK, CHUNK), (30, 1), (1, 5)])
def test_whole_sequences_are_what_steps_through_a_cache_are(family, policy, first, step):
    model, ids = selective(family), tokens(2, 51)
    with_matrices(model)
    model.eval()
    cache = heedful.new_cache(model, policy)
    parts = (ids[:, :first], *ids[:, first:].split(step, 1))
    with torch.no_grad():
        calls = [model(input_ids=x, **cache_argument(model, cache)).logits for x in parts]
    with evicting(model, policy, first, step):
        actual = logits(model, ids)
    torch.testing.assert_close(actual, torch.cat(calls, 1), rtol=0, atol=1e-9)


def test_in_training_matrices_act_where_they_will(monkeypatch):
    for name in ("eviction_order", "under_eviction"):
        monkeypatch.setattr(f"heedful.training.{name}.CHUNK", CHUNK)
    policy, model, ids = POLICY, selective(mechanism=EXTRA), tokens(2, 51)
    wrapped = with_matrices(model)
    owner = EvictionInTraining(wrapped, policy)
    for factor in (1.0, 1.5):
        scaled = replace(policy, tokens=(round(15 * factor), round(20 * factor), None))
        expected = in_steps(model.eval(), scaled, ids)
        with owner.evicting():
            owner.scale(factor)
            trained = wrapped.train()(input_ids=ids, use_cache=False).logits
            evaluated = logits(wrapped.eval(), ids)
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-9)
        torch.testing.assert_close(evaluated, expected, rtol=0, atol=1e-9)
    trained[:, :24].sum().backward()  # the first eviction is after the third chunk here
    matrices = [p for name, p in wrapped.named_parameters() if "lora_" in name]
    assert matrices and not any(p.grad.any() for p in matrices)


def test_how_far_matrices_act():
    """Against a count, document by document and call by call, of what each layer still has."""
    budgets, real = (10, None, 14), torch.ones(2, 50, dtype=torch.bool)
    real[1, :7] = False
    documents = torch.tensor([[0] * 20 + [1] * 30])
    for first, later, packed in ((4, 4, True), (7, 1, False), (12, 5, False), (30, 3, True)):
        strength = Calls(budgets, first, later).strengths(real, documents if packed else None)
        for row, token in product(range(2), range(50)):
            call = 0 if token < first else token - (token - first) % later
            begin = 20 if packed and token >= 20 else 0
            count = int(real[row, begin : max(begin, call)].sum())
            gone = [0 if x is None or count < x else (count - x + 1) / count for x in budgets]
            expected = min(1, 2 * sum(gone) / 3)
            assert strength[row, token].item() == pytest.approx(expected, abs=1e-6)
    assert strength.count_nonzero() and not strength[:, :30].any()
    shares = Calls((10, 10), 1, 1).strengths(torch.ones(1, 40, dtype=torch.bool), None)[0]
    assert shares[:10].count_nonzero() == 0 and shares[10] == pytest.approx(0.2)
    assert shares[18:].eq(1).all() and 0.9 < shares[17] < 1  # 9 of 18 tokens are left


def test_what_matrices_add_is_multiplied_by_their_strength(adapter, monkeypatch):
    """A call after so many tokens is that of a model whose matrices are as much smaller."""
    folder, _ = adapter
    model, ids = heedful.load(folder, dtype=torch.float64), tokens(1, 40)
    cache = heedful.new_cache(model, POLICY)
    with torch.no_grad():
        model(input_ids=ids[:, :32], **cache_argument(model, cache))
        other = copy.deepcopy(cache)
        expected = model(input_ids=ids[:, 32:], **cache_argument(model, cache)).logits
        strength = 2 * ((32 - 14) / 32 + (32 - 19) / 32) / len(cache.layers)
        assert len(cache.layers) == 3 and strength < 1
        monkeypatch.setattr(after_eviction, "strength_after", lambda *_: torch.ones(1, 1))
        third = copy.deepcopy(other)
        in_full = model(input_ids=ids[:, 32:], **cache_argument(model, third)).logits
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p *= strength
        actual = model(input_ids=ids[:, 32:], **cache_argument(model, other)).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert (in_full - expected).abs().amax(2).min() > 1e-3


@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_a_padded_row_is_what_it_is_alone(left):
    """Padding is evicted first, and what has been evicted of it has no matrices act."""
    model, long, short = selective(), tokens(1, 51), tokens(1, 30)
    with_matrices(model)
    model.eval()
    expected = in_steps(model, POLICY, short, 1)[0], in_steps(model, POLICY, long, 1)[0]
    assert (expected[0] - in_steps(model, False, short, 1)[0]).abs().amax(1)[15:].min() > 1e-6
    filler = torch.zeros_like(short[:, :21])
    ids = torch.cat([long, torch.cat([filler, short] if left else [short, filler], 1)])
    mask = torch.ones_like(ids)
    mask[1, :21] = not left
    mask[1, 30:] = left
    places = (mask.cumsum(1) - 1).clamp(min=0)
    own = slice(21, None) if left else slice(0, 30)
    with evicting(model, POLICY):
        whole = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False)
    cache, calls = heedful.new_cache(model, POLICY), []
    with torch.no_grad():
        for end in range(1, 52):
            new = {"input_ids": ids[:, end - 1 : end], "position_ids": places[:, end - 1 : end]}
            options = new | {"attention_mask": mask[:, :end]} | cache_argument(model, cache)
            calls.append(model(**options).logits)
    for actual in (whole.logits, torch.cat(calls, 1)):
        torch.testing.assert_close(actual[1, own], expected[0], rtol=0, atol=1e-9)
        torch.testing.assert_close(actual[0], expected[1], rtol=0, atol=1e-9)


def test_an_adapter_opens_as_it_was_trained(adapter):
    folder, model = adapter
    ids = tokens(2, 51)
    opened = heedful.load(folder)
    expected = in_steps(model, POLICY, ids)  # of PEFT's layers, which round elsewhere
    torch.testing.assert_close(in_steps(opened, POLICY, ids), expected, rtol=0, atol=1e-5)
    copied, pickled = copy.deepcopy(opened), pickle.loads(pickle.dumps(opened))
    for again in (copied, pickled):
        conversion_of(again).after_eviction.remove(again)  # of the copy alone
        assert not any("lora" in name for name, _ in again.named_parameters())
    torch.testing.assert_close(in_steps(opened, POLICY, ids), expected, rtol=0, atol=1e-5)
    base = heedful.revert(opened)
    stock = heedful.hf.stock.stock_model(str(folder.parent / "base"))
    assert torch.equal(logits(base, ids), logits(stock, ids))
    assert base.state_dict().keys() == stock.state_dict().keys()


def test_generate_goes_on_with_the_matrices_after_an_eviction(adapter):
    folder, _ = adapter
    opened, ids = heedful.load(folder), tokens(1, 12)
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    replies = []
    for each in (opened, heedful.load(folder)):
        cache = heedful.new_cache(each, POLICY)
        replies.append(each.generate(ids, **cache_argument(each, cache), **options)[0, 12:])
    whole = opened.generate(ids, **options)[0, 12:]
    assert torch.equal(*replies)
    assert torch.equal(replies[0][:4], whole[:4])  # 15 tokens: nothing is evicted before
    assert not torch.equal(replies[0], whole)


def test_budgets_are_those_of_the_selectors(adapter):
    """Matrices change neither F nor what is evicted first, so budgets searched before are good."""
    folder, _ = adapter
    bare = heedful.load(folder)
    conversion_of(bare).after_eviction.remove(bare)
    write_budgets(folder / "budgets.json", POLICY, bare, {})
    assert heedful.load(folder)._heedful.eviction == POLICY


@pytest.mark.slow
def test_compiled_it_is_the_same(adapter, no_shape_checks):
    folder, _ = adapter
    model, ids = heedful.load(folder), tokens(2, 51)
    expected = logits(model, ids)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-5)


def test_a_mask_that_is_too_short_is_refused_as_without_matrices():
    model, ids = selective(), tokens(2, 51)
    with_matrices(model)
    cache = heedful.new_cache(model.eval(), POLICY)
    with torch.no_grad():
        model(input_ids=ids[:, :40], **cache_argument(model, cache))
        mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
        with pytest.raises(ValueError, match=r"one entry per token seen so far.*\(43\), got 3"):
            model(input_ids=ids[:, 40:43], attention_mask=mask, **cache_argument(model, cache))


def test_what_cannot_hold_them_refuses(adapter, tmp_path):
    folder, _ = adapter
    model = heedful.load(folder)
    with pytest.raises(ValueError, match="a checkpoint has no place: keep the adapter's folder"):
        model.save_pretrained(tmp_path / "whole")
    with pytest.raises(ValueError, match="copy the adapter's folder"):
        heedful.save_adapter(model, tmp_path / "b", base="base")
    assert not {"whole", "b"} & set(os.listdir(tmp_path))
    with (
        pytest.raises(ValueError, match="StreamingLLM evicts not by the number of tokens alone"),
        evicting(model, StreamingLLM(tokens=15, keep_prompt=True)),
    ):
        pass


def test_a_cut_short_adapter_is_refused_and_the_base_is_as_it_was(adapter):
    folder, _ = adapter
    base = heedful.hf.stock.stock_model(str(folder.parent / "base"))
    ids = tokens(2, 20)
    expected = logits(base, ids)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: x[:1] if "lora_A" in k else x for k, x in tensors.items()}, path)
    with pytest.raises(ValueError, match="cannot be read by PEFT"):
        heedful.load(base, adapter=folder)
    assert not any("lora" in name or "heedful" in name for name, _ in base.named_parameters())
    assert torch.equal(logits(base, ids), expected)
