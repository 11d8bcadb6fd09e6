"""Training under budgets: what layers attend to is what their caches would have."""

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

import heedful
from heedful.eviction import MostHidden, StreamingLLM
from heedful.hf.budgets import write_budgets
from heedful.hf.cache.rows_under_budget import evicting
from heedful.hf.intercept import LayerCall, run_layer
from heedful.nn import Selective
from heedful.training.run import RunTrainer, Stopped
from heedful.training.trainer import LayerTrainer
from heedful.training.under_eviction import EvictionInTraining
from heedful_lab.commands.train.options import Training
from heedful_lab.commands.train.run import train_text
from helpers.families import logits, tiny, tokens, varied
from helpers.small_models import save_base_of_bytes

CHUNK = 8
POLICY = MostHidden(tokens=(15, 20, None), sinks=2, recent=3)


@pytest.fixture
def short_chunks(monkeypatch):
    for name in ("eviction_order", "under_eviction"):
        monkeypatch.setattr(f"heedful.training.{name}.CHUNK", CHUNK)


def masking(selector: str = "extra", family: str = "llama"):
    torch.manual_seed(0)
    return varied(tiny(family), Selective(selector, dim=None if selector == "head" else 3), 0.1)


def in_training(model, policy, ids) -> torch.Tensor:
    with EvictionInTraining(model, policy).evicting():
        return model.train()(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("selector", ["extra", "head"])
def test_in_training_a_model_reads_what_its_caches_have(short_chunks, selector, family):
    """To the last digits: what steps of a chunk with real caches compute in evaluation mode."""
    model, ids = masking(selector, family), tokens(2, 51)
    with evicting(model.eval(), POLICY, CHUNK, CHUNK):
        expected = logits(model, ids)
    torch.testing.assert_close(in_training(model, POLICY, ids), expected, rtol=0, atol=1e-9)
    if family == "llama":  # the others' windows leave little to evict
        whole = logits(model.eval(), ids)
        assert (expected - whole).abs()[:, 30:].max() > 1e-3


def test_factors_are_those_of_the_step_and_scale_the_budgets(short_chunks):
    model, ids = masking(), tokens(2, 51)
    owner = EvictionInTraining(model, POLICY)
    factors = []
    for step in (*range(400), 0):
        owner.draw(7, step)
        factors.append(owner.factor)
    assert factors[0] == factors[-1] and len(set(factors)) == 400
    assert 0.5 <= min(factors) < 0.51 and 1.48 < max(factors) <= 1.5
    owner.scale(1.5)
    with owner.evicting():
        actual = model.train()(input_ids=ids, use_cache=False).logits
    larger = replace(POLICY, tokens=(22, 30, None))
    with evicting(model.eval(), larger, CHUNK, CHUNK):
        torch.testing.assert_close(actual, logits(model, ids), rtol=0, atol=1e-9)


def test_weights_have_gradients_and_selectors_none(short_chunks):
    model = masking()
    in_training(model, POLICY, tokens(2, 51)).square().sum().backward()
    for name, p in model.named_parameters():
        evicted = ".heedful." in name and "layers.2." not in name
        assert (p.grad is None) == evicted, name


def test_what_is_evicted_matters_no_more(short_chunks):
    """Bit for bit: values of a token that both caches have evicted."""
    model = masking()
    layers = [x for x in model.modules() if isinstance(x, heedful.nn.Layer)]
    q, k, v = torch.randn(3, 1, 4, 51, 8, dtype=torch.float64)
    inputs = heedful.nn.LayerInputs(input=torch.randn(1, 51, 32, dtype=torch.float64))
    owner = EvictionInTraining(model, POLICY)
    with owner.evicting():
        layer = layers[0].train()
        bias = owner.bias(layer, LayerCall(q, k, k, heedful.Visibility(), 0.3, inputs))
        evicted = (bias[0, 0, -1] < -1e8).nonzero()[:, 0]
        assert len(evicted) == 51 - 51 % CHUNK - 14
        before = run_layer(layer, q, k, v, scale=0.3, inputs=inputs).output[:, :, -1]
        v[:, :, evicted] = 100.0
        after = run_layer(layer, q, k, v, scale=0.3, inputs=inputs).output[:, :, -1]
        assert torch.equal(after, before)


def test_evaluations_in_training_have_the_budgets_themselves(short_chunks, tmp_path):
    model, ids = masking(), tokens(2, 51)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is model.lm_head.weight)
    data = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, learning_rate=0.0, use_cpu=True, report_to=[],
        save_strategy="no", eval_strategy="steps", eval_steps=1, disable_tqdm=True,
        per_device_eval_batch_size=2, per_device_train_batch_size=2,
    )  # fmt: skip
    trainer = LayerTrainer(model, arguments, train_dataset=data, eval_dataset=data, eviction=POLICY)
    trainer.train()
    losses = [x["eval_loss"] for x in trainer.state.log_history if "eval_loss" in x]
    with evicting(model.eval(), POLICY, CHUNK, CHUNK):
        expected = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    whole = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert losses == [pytest.approx(expected, rel=1e-6)] * 2
    assert abs(expected / whole - 1) > 1e-4


def test_other_policies_and_layers_are_refused():
    with pytest.raises(ValueError, match="eviction must be MostHidden"):
        EvictionInTraining(masking(), StreamingLLM(tokens=20))
    model = tiny("llama")
    heedful.convert(model, "standard")
    with pytest.raises(ValueError, match="gives StandardAttention 20 tokens: only layers"):
        EvictionInTraining(model, MostHidden(tokens=20))


@pytest.fixture
def options(tmp_path, monkeypatch) -> Training:
    """Of a base of bytes whose adapter has no budgets yet."""
    monkeypatch.chdir(tmp_path)
    save_base_of_bytes(Path("base"), 512)
    lines = (f"line {i}: a red bus and {i % 7} cars\n" for i in range(400))
    Path("text.txt").write_text("".join(lines))
    hide = Training(
        "base", ("text.txt",), "hide", recipe="hide", steps=2, batch=2, length=96, evaluations=1,
        device="cpu",
    )  # fmt: skip
    train_text(hide, show=False)
    return replace(hide, model="hide", out="evict", recipe="evict", steps=3, rank=2)


def test_an_adapter_learns_to_do_without_what_is_evicted(options):
    with pytest.raises(ValueError, match=r"recipe='evict' trains under the budgets of an adapter"):
        train_text(options, show=False)
    assert not Path("evict").exists()
    model = heedful.load("base", adapter="hide", convert=True)
    write_budgets(Path("hide/budgets.json"), MostHidden(tokens=24), model, {})
    with warnings.catch_warnings():
        # Selectors are frozen, and saved all the same.
        warnings.filterwarnings("error", "this adapter neither trains")
        train_text(options, show=False)
    trained = heedful.load("base", adapter="evict", convert=True)
    assert trained._heedful.eviction == MostHidden(tokens=24)
    own = heedful.hf.conversion_of(trained).parameters()
    for name, p in heedful.hf.conversion_of(model).parameters().items():
        torch.testing.assert_close(own[name], p)  # the order of eviction stays
    matrix = trained.get_parameter("model.layers.0.self_attn.q_proj.lora_B.default.weight")
    assert matrix.abs().max() > 1e-5
    log = map(json.loads, Path("evict/log.jsonl").read_text().splitlines())
    losses = [x["loss"] for x in log if "loss" in x]
    assert len(losses) == 3 and min(losses) > 1e-7  # the base with its whole context is the target
    with pytest.raises(ValueError, match="trains LoRA, got train='mechanism'"):
        train_text(replace(options, train="mechanism", out="other"), show=False)


def test_a_run_is_of_its_budgets_its_base_and_its_data(options):
    """Finished or not: digests are compared, and not names."""
    budgets, model = Path("hide/budgets.json"), heedful.load("base", adapter="hide", convert=True)
    write_budgets(budgets, MostHidden(tokens=24), model, {})
    train_text(options, show=False)
    answers = iter([False])
    with pytest.raises(Stopped):
        train_text(replace(options, out="half"), lambda: next(answers, True), show=False)
    half, ended = Path("half/unfinished/state/run.json"), Path("evict/adapter_model.safetensors")
    before = half.read_bytes(), ended.read_bytes()
    (weights,) = Path("base").glob("*.safetensors")
    kept = {path: path.read_bytes() for path in (budgets, Path("text.txt"), weights)}

    def refused(words):
        with pytest.raises(ValueError, match=rf"the folder of another run: inputs\.{words}"):
            train_text(options, show=False)
        with pytest.raises(ValueError, match=rf"the folder of another run: inputs\.{words}"):
            train_text(replace(options, out="half"), show=False)
        assert (half.read_bytes(), ended.read_bytes()) == before

    write_budgets(budgets, MostHidden(tokens=30), model, {})
    refused("budgets was")
    budgets.write_bytes(kept[budgets])
    Path("text.txt").write_bytes(kept[Path("text.txt")] + b"one more line\n")
    refused(r"data\.text\.txt was")
    Path("text.txt").write_bytes(kept[Path("text.txt")])
    weights.write_bytes(kept[weights][:-4] + bytes(4))
    refused("model was")
    weights.write_bytes(kept[weights])
    assert train_text(options, show=False).steps == 3
    assert train_text(replace(options, out="half"), show=False).steps == 3


def test_evaluation_is_under_the_budgets_themselves(options, monkeypatch):
    """Whatever was drawn for the step before it."""
    model = heedful.load("base", adapter="hide", convert=True)
    write_budgets(Path("hide/budgets.json"), MostHidden(tokens=24), model, {})
    evaluate, factors = RunTrainer.evaluate, []

    def noted(trainer, *args, **kwargs):
        scores = evaluate(trainer, *args, **kwargs)
        factors.append(trainer._under_eviction.factor)
        return scores

    monkeypatch.setattr(RunTrainer, "evaluate", noted)
    train_text(replace(options, evaluations=3), show=False)
    assert factors == [1.0] * 3


def test_a_stopped_run_draws_the_same_budgets(options):
    model = heedful.load("base", adapter="hide", convert=True)
    write_budgets(Path("hide/budgets.json"), MostHidden(tokens=24), model, {})
    train_text(options, show=False)
    answers = iter([False])
    with pytest.raises(Stopped):
        train_text(replace(options, out="two"), lambda: next(answers, True), show=False)
    train_text(replace(options, out="two"), show=False)
    one, two = (load_file(f"{x}/adapter_model.safetensors") for x in ("evict", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)
