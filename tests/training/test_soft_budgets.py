"""Soft budgets: the map that a layer trains with, and which cache a step imitates."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import heedful
from heedful.commands.train.options import Training
from heedful.commands.train.run import train_text
from heedful.nn import Selective
from heedful.ops.selective.soft_eviction import soft_eviction
from heedful.training.trainer import LayerTrainer
from helpers.families import tiny, tokens, varied
from helpers.small_models import save_base_of_bytes


def hiding(selector: str = "extra"):
    return varied(tiny("llama"), Selective(selector), 0.5)


def trainer_of(model, folder: Path, steps: int = 4, **options) -> LayerTrainer:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=0.0,
    )  # fmt: skip
    rows = [{"input_ids": x, "labels": x} for x in tokens(8)]
    return LayerTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, **options)


@pytest.mark.parametrize("selector", ["head", "mean", "per-head", "extra"])
def test_a_layer_in_training_adds_it_to_the_logits(selector):
    """The first layer's output is that of the definition with soft eviction as its bias."""
    model = hiding(selector)
    layer = next(x for x in model.modules() if isinstance(x, heedful.nn.Layer))
    calls = []
    layer.register_forward_hook(
        lambda layer, args, kwargs, out: calls.append((args, kwargs, out.output)), with_kwargs=True
    )
    layer.soft_budget = 15
    ids = tokens(2, 40)
    model.eval()(input_ids=ids, use_cache=False)
    model.train()(input_ids=ids, use_cache=False)
    (_, _, plain), ((q, k, v), kwargs, output) = calls
    assert not torch.equal(plain, output)
    visible = torch.ones(1, 1, *[ids.shape[1]] * 2, dtype=torch.bool).tril()
    f = layer.maps(q, k, **kwargs).hiding
    f = f.cumsum(2) - f
    selectors = layer.selectors(q, k, kwargs["inputs"])
    evicted = soft_eviction(f.amin(1, keepdim=True), visible, 15)
    exact = heedful.selective_attention(
        q, k, v, selector_q=selectors[0], selector_k=selectors[1], bias=evicted,
        scale=kwargs["scale"], impl="reference",
    )  # fmt: skip
    torch.testing.assert_close(output, exact.output)


def test_each_step_draws_a_cache_and_evaluation_has_none(tmp_path):
    """The same draws for the same seed, all within bounds; at the end no layer imitates any."""
    model, calls = hiding(), []
    layers = [x for x in model.modules() if isinstance(x, heedful.nn.Layer)]
    for layer in layers:
        layer.register_forward_hook(
            lambda layer, *_: calls.append(layer.soft_budget if layer.training else None)
        )
    trainer = trainer_of(model, tmp_path, steps=40, soft_budgets=(2, 9))
    trainer.train()
    steps = [calls[i : i + len(layers)] for i in range(0, len(calls), len(layers))]
    assert len(steps) == 40 and all(len(set(step)) == 1 for step in steps)
    budgets = [step[0] for step in steps]
    assert min(budgets) == 2 and max(budgets) == 9
    assert {layer.soft_budget for layer in layers} == {None}
    calls.clear()
    trainer.evaluate()
    assert set(calls) == {None}
    calls.clear()
    trainer_of(model, tmp_path, steps=40, soft_budgets=(2, 9)).train()
    assert calls[:: len(layers)] == budgets


def test_a_step_learns_from_what_is_evicted(tmp_path):
    """The gradient of the selectors differs from that without eviction, and stays finite."""
    gradients = []
    for budget in (None, 15):
        model = copy.deepcopy(hiding()).train()
        for layer in model.modules():
            if isinstance(layer, heedful.nn.Layer):
                layer.soft_budget = budget
        ids = tokens(2, 40)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append([p.grad for n, p in model.named_parameters() if ".heedful." in n])
    for plain, evicted in zip(*gradients, strict=True):
        assert evicted.isfinite().all() and evicted.any() and not torch.equal(plain, evicted)


def test_a_model_that_hides_nothing_is_refused(tmp_path):
    model = tiny("llama")
    heedful.convert(model, "mta")
    with pytest.raises(ValueError, match="no layer of this HeedfulLlamaForCausalLM masks"):
        trainer_of(model, tmp_path, soft_budgets=(2, 9))


def test_those_of_a_recipe_grow_with_the_length():
    for length, budgets in ((1024, (64, 384)), (2048, (128, 768)), (32, (2, 12)), (8, (1, 3))):
        options = Training("base", recipe="hide", length=length)
        assert options.filled(has_weights=True).soft_budgets == budgets
    given = Training("base", recipe="hide", length=32, soft_budgets=(5, 40))
    assert given.filled(has_weights=True).soft_budgets == (5, 40)
    with pytest.raises(ValueError, match="must begin below the length of 32 tokens, got 32"):
        replace(given, soft_budgets=(32, 40)).filled(has_weights=True)


def test_a_mechanism_that_masks_nothing_is_refused_before_the_text_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_base_of_bytes(Path("base"), 512)
    options = Training(
        "base", ("absent.txt",), "run", recipe="adapt", mechanism=("mta",), steps=2, length=32,
        soft_budgets=(4, 12), device="cpu",
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"no layer of this .* masks; call heedful\.convert"):
        train_text(options, show=False)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "budgets, message",
    [((0, 4), "soft_budgets"), ((9, 4), "smaller first, got 9 4"), ((2.5, 4), "soft_budgets")],
)
def test_wrong_ones_are_refused(budgets, message):
    with pytest.raises(ValueError, match=message):
        Training("base", soft_budgets=budgets)


def test_the_command_trains_with_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_base_of_bytes(Path("base"), 512)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    options = Training(
        "base", ("text.txt",), "run", recipe="hide", steps=3, batch=2, length=32, evaluations=1,
        device="cpu", soft_budgets=(4, 12),
    )  # fmt: skip
    train_text(options, show=False)
    assert json.loads(Path("run/training.json").read_text())["recipe"]["soft_budgets"] == [4, 12]
    train_text(replace(options, out="other", soft_budgets=(4, 4)), show=False)
    first, other = (
        [json.loads(x).get("loss") for x in Path(run, "log.jsonl").read_text().splitlines()]
        for run in ("run", "other")
    )
    assert first != other
