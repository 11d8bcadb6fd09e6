"""An order of eviction that is learned from attention maps: the loss, its scale, the command."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

import heedful
from heedful.hf.intercept import intercept, interceptors
from heedful.nn import Selective
from heedful.ops.selective.reference import selection
from heedful.ops.selective.soft_eviction import cached_shares
from heedful.training.eviction_order import LEVEL, EvictionOrderLoss
from heedful.training.trainer import LayerTrainer
from heedful_lab.commands.policies import policy_named
from heedful_lab.commands.train.options import Training
from heedful_lab.commands.train.run import train_text
from heedful_lab.rivals.models import load
from heedful_lab.rivals.retention import LowestGate, RetentionGate
from helpers.families import tiny, tokens, varied
from helpers.small_models import save_base_of_bytes

LENGTH = 70


def masking(family: str = "llama", selector: str = "extra", strength: float = 0.5):
    torch.manual_seed(0)
    mechanism = Selective(selector, dim=None if selector == "head" else 3)
    return varied(tiny(family), mechanism, strength)


def layers_of(model) -> list[heedful.nn.Layer]:
    return [x for x in model.modules() if isinstance(x, heedful.nn.Layer)]


def trainer_of(model, folder: Path, steps: int = 4, rate: float = 0.0, **options) -> LayerTrainer:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, report_to="none",
        use_cpu=True, disable_tqdm=True, save_strategy="no", learning_rate=rate,
    )  # fmt: skip
    rows = [{"input_ids": x, "labels": x} for x in tokens(8, LENGTH)]
    return LayerTrainer(model, arguments, train_dataset=rows, eval_dataset=rows, **options)


def loss_of(model, ids, labels, cache: int) -> torch.Tensor:
    with EvictionOrderLoss(model).observing() as order:
        order.draw(labels, 0)
        model.train()(input_ids=ids, use_cache=False)
        return order(cache)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_the_loss_is_its_formula(family, monkeypatch):
    """Query by query, of the base's own attention maps; softcap, windows and sinks included."""
    monkeypatch.setattr("heedful.training.eviction_order.CHUNK", 8)
    monkeypatch.setattr("heedful.training.eviction_order.QUERIES", 9)
    model = masking(family).double()
    ids, cache = tokens(2, LENGTH), 20
    heads = {}

    def collect(layer, call, compute):
        heads[layer] = call
        return compute(call)

    order = EvictionOrderLoss(model)
    with order.observing(), intercept(model, collect):
        order.draw(ids, 5)
        model.train()(input_ids=ids, use_cache=False)
        loss = order(cache)
    queries, total = order._queries, 0.0
    for layer, (q, k, v, visibility, scale, inputs) in heads.items():
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        standard = heedful.Standard().build(layer.shape)
        maps = standard.maps(q, k, visibility=visibility, scale=scale, inputs=inputs).weights
        masking_map = selection(*layer.selectors(q, k, inputs), True, visibility, scale)
        ends = [min(8 * (c + 1), LENGTH) for c in range(math.ceil(LENGTH / 8))]
        f = torch.stack([masking_map[:, :, :end].sum(2).amin(1) for end in ends], 1)
        visible = visibility.dense(LENGTH, LENGTH, q.device).expand(2, -1, -1)
        shares = cached_shares(f, visible[:, [end - 1 for end in ends]], cache)
        size = [0.0, 0.0]
        of_queries = [[], []]
        for row in range(2):
            for i in queries[row].tolist():
                chunk = i // 8
                share = shares[row, chunk - 1].clone() if chunk else torch.ones(LENGTH).double()
                share[chunk * 8 :] = 1
                log_share = error = 0.0
                for h in range(q.shape[1]):
                    weights = maps[row, h, i]
                    values = v[row, h // (q.shape[1] // k.shape[1])]
                    remaining = (weights * share).sum()
                    log_share += remaining.log() / q.shape[1]
                    difference = (weights * share / remaining - weights) @ values
                    error += difference.square().sum()
                    size[row] += (weights @ values).square().sum() / 9
                of_queries[row].append((log_share, error))
            for log_share, error in of_queries[row]:
                total += (error / size[row] - log_share) / (2 * 9 * len(heads))
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-8)


def test_a_cache_for_all_tokens_costs_nothing():
    model, ids = masking(), tokens(2, LENGTH)
    assert loss_of(model, ids, ids, LENGTH).item() == pytest.approx(0, abs=1e-6)
    assert loss_of(model, ids, ids, 20).item() > 0.05


def test_while_it_is_observed_a_model_in_training_is_the_base():
    """And in eval mode, or afterwards, what it was."""
    base, ids = tiny("llama"), tokens(2, LENGTH)
    model = masking()
    model.load_state_dict(base.state_dict(), strict=False)
    plain = model.eval()(input_ids=ids, use_cache=False).logits
    order = EvictionOrderLoss(model)
    with order.observing():
        order.draw(ids, 0)
        in_training = model.train()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(in_training, base(input_ids=ids, use_cache=False).logits)
        assert torch.equal(model.eval()(input_ids=ids, use_cache=False).logits, plain)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, plain)
    assert not torch.allclose(plain, in_training, atol=1e-3)


def test_answers_are_read_where_only_answers_are_learned():
    """Half of the queries are the answers' then, with twice the weight."""
    model, ids = masking(), tokens(1, 300)
    labels = torch.full_like(ids, -100)
    labels[0, 250:260] = ids[0, 250:260]
    order = EvictionOrderLoss(model)
    order.draw(labels, 0)
    rows = order._queries[order._weights == 2]
    assert sorted(rows.tolist()) == list(range(249, 259))
    order.draw(ids, 0)
    assert (order._weights == 1).all() and order._queries.max() < 299


def losses_around_training(model, folder: Path) -> tuple[torch.Tensor, float, float]:
    """The sequences, and what a cache of a third loses of them before and after training.

    The base's weights stay as they were, and so do its layers.
    """
    before = {n: p.clone() for n, p in model.named_parameters() if ".heedful." not in n}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".heedful." in name)
    trainer = trainer_of(model, folder, 60, 2e-2, soft_budgets=(20, 30))
    ids = torch.stack([x["input_ids"] for x in trainer.eval_dataset])
    first = loss_of(model, ids, ids, 24).item()
    trainer.train()
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters() if n in before)
    last = loss_of(model, ids, ids, 24).item()
    assert not interceptors()
    return ids, first, last


def test_training_lowers_what_a_cache_loses_and_gives_f_a_scale(tmp_path):
    model = masking(strength=0.05)
    ids, first, last = losses_around_training(model, tmp_path)
    assert last < 0.9 * first
    order = EvictionOrderLoss(model)
    with order.observing():
        levels = order.levels(model, {"input_ids": ids, "labels": ids})
    torch.testing.assert_close(levels, torch.full_like(levels, LEVEL))


def gated(strength: float = 0.5):
    torch.manual_seed(0)
    return varied(tiny("llama"), RetentionGate(), strength)


def test_the_loss_of_gates_is_that_of_what_they_evict(monkeypatch):
    """Chunk by chunk, with shares of one or none where the gates are far apart."""
    monkeypatch.setattr("heedful.training.eviction_order.CHUNK", 8)
    model, ids = gated(), tokens(2, LENGTH)
    order, reports = EvictionOrderLoss(model), []
    with order.observing():
        order.draw(ids, 0)
        model.train()(input_ids=ids, use_cache=False)
        reports += order._reports
        assert order(20).item() > 0.01 and len(reports) == 3
        assert order.levels(model, {"input_ids": ids, "labels": ids}).shape == (0,)
        order.rescale(torch.empty(0))
    inputs = model.get_input_embeddings()(ids)
    first = model.model.layers[0]
    gates = first.self_attn.heedful.retention(first.input_layernorm(inputs))[..., 0]
    for chunk in range(9):
        torch.testing.assert_close(reports[0].f[:, chunk], -gates)
        assert reports[0].visible[:, chunk].sum(-1).tolist() == [min(LENGTH, 8 * chunk + 8)] * 2


def test_evaluation_in_the_course_of_training_has_that_scale(tmp_path):
    """The loss of a model whose F is a thousand times as large is the same to the last digits."""
    losses = []
    for factor in (1, 1000):
        model = masking()
        for layer in layers_of(model):
            layer.query.weight.data *= factor
        trainer = trainer_of(model, tmp_path, soft_budgets=(20, 30))
        with trainer._order.observing():
            losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_each_step_draws_a_cache_the_same_for_the_same_seed(tmp_path, monkeypatch):
    budgets = []
    monkeypatch.setattr(
        EvictionOrderLoss, "__call__",
        lambda self, n: budgets.append(n) or sum(x.f.sum() for x in self._reports) * 0,
    )  # fmt: skip
    for _ in range(2):
        trainer_of(masking(), tmp_path, steps=40, soft_budgets=(2, 9)).train()
    assert budgets[:40] == budgets[40:] and min(budgets) == 2 and max(budgets) == 9


def test_models_that_cannot_learn_it_are_refused(tmp_path):
    model = tiny("llama")
    heedful.convert(model, "mta")
    with pytest.raises(ValueError, match="no layer of this HeedfulLlamaForCausalLM learns any"):
        trainer_of(model, tmp_path, soft_budgets=(2, 9))
    heedful.revert(model)
    heedful.convert(model, "mta-selective")
    with pytest.raises(ValueError, match="own attention, which SelectiveLowRankAttention changes"):
        trainer_of(model, tmp_path, soft_budgets=(2, 9))
    with pytest.raises(ValueError, match="selectors of their own"):
        trainer_of(masking(selector="head"), tmp_path, soft_budgets=(2, 9))
    with pytest.raises(ValueError, match="leave out memory_loss"):
        trainer_of(masking(), tmp_path, soft_budgets=(2, 9), memory_loss=0.1)


def test_those_of_a_recipe_grow_with_the_length():
    for length, budgets in ((1024, (64, 256)), (2048, (128, 512)), (32, (2, 8)), (8, (1, 2))):
        options = Training("base", recipe="hide", length=length)
        assert options.filled().soft_budgets == budgets
    options = Training("base", recipe="hide", length=32, soft_budgets=(5, 40))
    assert options.filled().soft_budgets == (5, 40)
    with pytest.raises(ValueError, match="must begin below the length of 32 tokens, got 32"):
        replace(options, soft_budgets=(32, 40)).filled()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"targets": "text"}, "go together"),
        ({"recipe": "adapt", "soft_budgets": (4, 12)}, "go together"),
        ({"train": "lora"}, "trains the mechanism alone"),
        ({"memory_loss": 0.1}, "without a memory loss"),
    ],
)
def test_what_does_not_go_with_maps_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Training("base", **({"recipe": "hide"} | options)).filled()


@pytest.fixture
def options(tmp_path, monkeypatch) -> Training:
    """Of a base and a text in this folder."""
    monkeypatch.chdir(tmp_path)
    save_base_of_bytes(Path("base"), 512)
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    return Training(
        "base", ("text.txt",), "run", recipe="hide", steps=3, batch=2, length=96, evaluations=1,
        device="cpu", soft_budgets=(20, 30),
    )  # fmt: skip


def test_a_mechanism_that_masks_nothing_is_refused_before_the_text_is_read(options):
    options = replace(options, data=("absent.txt",), mechanism=("mta",), soft_budgets=None)
    with pytest.raises(ValueError, match=r"no layer of this .* learns any; take --mech"):
        train_text(options, show=False)
    assert not Path("run").exists()


@pytest.mark.parametrize("length, budgets, first", [(32, (4, 12), 32), (64, (32, 40), 64)])
def test_sequences_in_which_nothing_is_evicted_are_refused(options, length, budgets, first):
    options = replace(options, data=("absent.txt",), length=length, soft_budgets=budgets)
    with pytest.raises(ValueError, match=f"length must be above {first} with soft_budgets"):
        train_text(options, show=False)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "budgets, message",
    [((0, 4), "soft_budgets"), ((9, 4), "smaller first, got 9 4"), ((2.5, 4), "soft_budgets")],
)
def test_wrong_ones_are_refused(budgets, message):
    with pytest.raises(ValueError, match=message):
        Training("base", soft_budgets=budgets)


def test_the_command_trains_with_them(options):
    """Other budgets, other selectors; the adapter's F has its scale."""
    train_text(options, show=False)
    assert json.loads(Path("run/training.json").read_text())["recipe"]["soft_budgets"] == [20, 30]
    train_text(replace(options, out="other", soft_budgets=(20, 20)), show=False)
    first, other = (
        torch.cat([x.key.weight for x in layers_of(heedful.load("base", adapter=run))])
        for run in ("run", "other")
    )
    assert first.any() and not torch.equal(first, other)


def test_the_command_trains_gates_and_nothing_else_does(options):
    """The adapter evicts by them, as `auto` has it; text alone would not train them."""
    options = replace(options, mechanism=("retention-gate",))
    train_text(options, show=False)
    model = load("base", adapter="run")
    assert all(bool(x.retention.weight.any()) for x in layers_of(model))
    assert isinstance(policy_named("auto", model, 20), LowestGate)
    ids = torch.tensor([list(b"the quick brown fox" * 3)])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
        base = load("base", adapter="run")
        heedful.revert(base)
        torch.testing.assert_close(logits, base(ids, use_cache=False).logits)
    for changed in ({"recipe": "adapt"}, {"recipe": "adapt", "train": "lora"}):
        text = replace(options, out="other", soft_budgets=None, **changed)
        with pytest.raises(ValueError, match="gates without a window change no pr"):
            train_text(text, show=False)
        assert not Path("other").exists()
