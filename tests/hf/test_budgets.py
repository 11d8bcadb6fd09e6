"""Budgets beside a model: with its weights, and with no others."""

import json

import pytest
import torch

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.budgets import NAME, read_budgets, write_budgets
from heedful.hf.fingerprints import fingerprint, is_of
from heedful.hf.versions import cache_of
from heedful.nn import Differential
from helpers.cached import greedy
from helpers.families import stir, tiny, tokens

POLICY = MostHidden(tokens=(14, 16, 15), sinks=2)


@pytest.fixture
def folder(tmp_path):
    """A saved selective model with budgets."""
    model = tiny(dtype=torch.float32)
    heedful.convert(model, "selective")
    model.save_pretrained(tmp_path / "model")
    write_budgets(tmp_path / "model" / NAME, POLICY, model, {"found": "by hand"})
    return tmp_path / "model"


def test_a_loaded_model_has_its_budgets(folder):
    model, ids = heedful.load(folder), tokens(1, 30)
    assert model._heedful.eviction == POLICY
    cache = heedful.new_cache(model)
    assert [(layer.policy, layer.budget.tokens) for layer in cache.layers] == [
        (POLICY, n) for n in POLICY.tokens
    ]
    out = greedy(model, ids, 6, return_dict_in_generate=True)
    assert cache_of(out).tokens == [13, 15, 14]
    expected = greedy(model, ids, 6, cache=heedful.new_cache(model, POLICY))
    assert torch.equal(out.sequences, expected)
    whole = heedful.new_cache(model, eviction=False)
    greedy(model, ids, 6, cache=whole)
    assert whole.tokens == [35] * 3
    other = heedful.new_cache(model, StreamingLLM(tokens=20))
    assert other.layers[0].policy == StreamingLLM(tokens=20)


def test_budgets_can_be_left_unread(folder):
    model = heedful.load(folder, budgets=False)
    assert model._heedful.eviction is None
    assert heedful.new_cache(model).layers[0].policy is None


def test_a_save_takes_the_budgets_along(folder, tmp_path):
    model = heedful.load(folder)
    for place in ("copy", "again", "model"):
        model.save_pretrained(tmp_path / place)
        assert (tmp_path / place / NAME).read_text() == (folder / NAME).read_text()
        model = heedful.load(tmp_path / place)
        assert model._heedful.eviction == POLICY


def test_a_save_of_other_weights_leaves_no_stale_budgets(folder, tmp_path):
    for change in ("trained", "another", "given"):
        place = tmp_path / change
        model = heedful.load(folder)
        model.save_pretrained(place)
        assert (place / NAME).exists()
        options = {}
        if change == "trained":
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            ids = tokens(2, 12)
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
        elif change == "given":
            options["state_dict"] = {k: 1.1 * v for k, v in model.state_dict().items()}
        else:
            model = tiny()
            heedful.convert(model, "selective")
        model.save_pretrained(place, **options)
        assert not (place / NAME).exists()
        assert heedful.load(place)._heedful.eviction is None
    assert (folder / NAME).exists()


def test_a_save_over_budgets_of_the_same_weights_keeps_them(folder):
    before = (folder / NAME).read_text()
    heedful.load(folder, budgets=False).save_pretrained(folder)
    assert (folder / NAME).read_text() == before


def test_another_models_budgets_are_refused_with_the_way_out(folder):
    model = heedful.load(folder)
    with torch.no_grad():
        model.lm_head.weight[0].mul_(-1)
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(folder.parent / "other")
    (folder.parent / "other" / NAME).write_text((folder / NAME).read_text())
    message = (
        r"other/budgets.json belongs to another model, or to this one before it was trained on: "
        r"search budgets again with heedful budget, or delete the file \(heedful.load\(folder, "
        r"budgets=False\) leaves it unread\)"
    )
    with pytest.raises(ValueError, match=message):
        heedful.load(folder.parent / "other")
    heedful.load(folder.parent / "other", budgets=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_another_precision_is_the_same_model(folder, dtype):
    assert heedful.load(folder, dtype=dtype)._heedful.eviction == POLICY


def test_what_tells_models_apart():
    def model_of(seed=0, mechanism="selective", **changes):
        torch.manual_seed(seed)
        model = tiny(**changes)
        heedful.convert(model, mechanism)
        return model

    saved = json.loads(json.dumps(fingerprint(model_of())))
    assert is_of(saved, model_of())
    assert not is_of(saved, model_of(seed=1))
    assert not is_of(saved, model_of(mechanism="standard"))
    assert not is_of(saved, model_of(mechanism=Differential()))
    assert not is_of(saved, model_of(num_key_value_heads=4))
    model = model_of()
    for name, p in model.named_parameters():
        if p.ndim < 2:
            continue
        before = p.detach().clone()
        stir(model, 0.02, only=name)
        assert not is_of(saved, model), name
        p.data.copy_(before)
    for wrong in (
        None,
        "x",
        {},
        saved | {"weights": []},
        saved | {"weights": saved["weights"][1:]},
    ):
        assert not is_of(wrong, model_of())


def damaged(change):
    """A budgets file of the tiny model with one field changed."""

    def of(text: str) -> str:
        data = json.loads(text)
        change(data)
        return json.dumps(data)

    return of


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "[" * 3000 + "]" * 3000, "is not valid JSON"),
        (lambda text: "[" * 200_000, "is not valid JSON"),
        (damaged(lambda x: x["eviction"].update(kind=["MostHidden"])), "names no policy"),
        (damaged(lambda x: x["eviction"].update(kind={"a": 1})), "names no policy"),
        (damaged(lambda x: x.update(eviction="MostHidden")), "names no policy"),
        (damaged(lambda x: x.update(eviction=[["kind", "MostHidden"]])), "names no policy"),
        (damaged(lambda x: x.update(eviction=5)), "names no policy"),
        (
            damaged(lambda x: x["eviction"].update(tokens=[[14, 15], 16, 15])),
            "single key heads were",
        ),
        (damaged(lambda x: x["eviction"].update(tokens=[{}, 16, 15])), "tokens must"),
        (damaged(lambda x: x["eviction"].update(tokens={"a": 1})), "tokens must"),
        (damaged(lambda x: x["eviction"].update(tokens=float("inf"))), "tokens must"),
        (damaged(lambda x: x["eviction"].update(sinks=["x"])), "sinks must"),
        (damaged(lambda x: x["model"].update(weights=["x"] * 64)), "belongs to another model"),
        (damaged(lambda x: x["model"].update(weights=5)), "belongs to another model"),
    ],
)
def test_a_damaged_file_is_answered_by_its_name(folder, change, message):
    path = folder / NAME
    path.write_text(change(path.read_text()))
    with pytest.raises(ValueError, match=rf"budgets .*{NAME}.*{message}"):
        heedful.load(folder)
    heedful.load(folder, budgets=False)


def test_a_file_that_is_not_there(tmp_path):
    model = tiny()
    heedful.convert(model, "selective")
    with pytest.raises(ValueError, match=r"none.json cannot be read \(No such file or directory"):
        read_budgets(tmp_path / "none.json", model)
