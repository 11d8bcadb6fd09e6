"""The memory loss: the paper's formula by explicit loops, and every way of training with it."""

import copy
import itertools
import pickle

import pytest
import torch
from transformers import Trainer, TrainingArguments

import heedful
from heedful.nn import Selective
from helpers.crosses import usually
from helpers.families import checkpoint_layers, tiny, tokens, varied

PACKED = torch.tensor([[*range(4), *range(7)], [*range(8), *range(3)]])


def selective(family: str = "llama", selector: str = "head", **changes):
    """A converted model in training mode whose selectors hide in part."""
    model = varied(tiny(family, **changes), Selective(selector), 0.3)
    return model.train()


def padding(left: bool) -> torch.Tensor:
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, :4] = 0
    return mask if left else mask.flip(1)


WAYS = {
    "whole sequences": {},
    "left padding": {"attention_mask": padding(left=True)},
    "right padding": {"attention_mask": padding(left=False)},
    "packed": {"position_ids": PACKED},
    "packed and padded": {
        "position_ids": torch.tensor([[0, 0, *range(4), *range(5)], [*range(7), *range(2), 0, 0]]),
        "attention_mask": torch.tensor([[0, 0] + 9 * [1], 9 * [1] + [0, 0]]),
    },
}


def documents(way: dict) -> list[list[list[int]]]:
    """For each sequence the places of each document's tokens."""
    places = way.get("position_ids", torch.arange(11).expand(2, -1)).tolist()
    mask = way.get("attention_mask", torch.ones(2, 11)).tolist()
    parts_by_row = []
    for row in range(2):
        parts, before = [], None
        for t in (t for t in range(11) if mask[row][t]):
            if before is None or ("position_ids" in way and places[row][t] <= before):
                parts.append([])
            parts[-1].append(t)
            before = places[row][t]
        parts_by_row.append(parts)
    return parts_by_row


class Recorded(list):
    """Queries, keys and scale of every layer's newest call."""

    def __init__(self, model):
        self.layers = [m for m in model.modules() if isinstance(m, heedful.nn.Layer)]
        for index, layer in enumerate(self.layers):
            self.append(None)
            layer.register_forward_pre_hook(
                lambda layer, args, kwargs, index=index: self.__setitem__(
                    index, (args[0], args[1], kwargs)
                ),
                with_kwargs=True,
            )


def by_loops(recorded: Recorded, way: dict, tau: float, window: int | None = None) -> float:
    """The paper's term as it is written, from each layer's queries and keys."""
    total, count = 0.0, 0
    for layer, (q, k, kwargs) in zip(recorded.layers, recorded, strict=True):
        selectors = layer.selectors(q, k, kwargs["inputs"])
        logits = (selectors[0] @ selectors[1].mT * kwargs["scale"]).tolist()
        for row, parts in enumerate(documents(way)):
            for part in parts:
                memories = []
                for i in range(len(part)):
                    reach = i + 1 if window is None else min(i + 1, window)
                    hidden = 0.0
                    for k_at in range(i + 1 - reach, i):
                        for selector in logits[row]:
                            f = 0.0
                            for p in range(k_at + 1, i):
                                sees = window is None or p - k_at < window
                                if sees and k_at > 0:
                                    f += max(selector[part[p]][part[k_at]], 0.0)
                            hidden += min(f, tau) / len(logits[row])
                    memories.append(reach - 1 - hidden / tau)
                total += max(memories)
                count += len(part)
    return total / count  # tokens count in every layer


SELECTORS = ("head", "mean", "per-head", "bilinear", "extra")


@pytest.mark.parametrize(
    ("way", "selector"),
    usually(itertools.product(WAYS, SELECTORS), ("packed and padded",), ("head",)),
)
def test_it_is_the_papers_formula(way, selector):
    model = selective(selector=selector)
    memory, recorded = heedful.MemoryLoss(model), Recorded(model)
    model(input_ids=tokens(), **WAYS[way])
    expected = by_loops(recorded, WAYS[way], 1.0)
    torch.testing.assert_close(memory().item(), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("tau", [0.3, 4.0])
def test_tau_is_the_cap(tau):
    model = selective()
    memory, recorded = heedful.MemoryLoss(model, tau=tau), Recorded(model)
    model(input_ids=tokens())
    term = memory().item()
    torch.testing.assert_close(term, by_loops(recorded, {}, tau), rtol=1e-10, atol=0)
    assert abs(term - by_loops(recorded, {}, 1.0)) > 1e-3


@pytest.mark.parametrize("way", ["whole sequences", "packed", "left padding"])
def test_a_key_out_of_the_window_is_not_needed(way):
    model = selective("mistral")  # its window is 4
    memory, recorded = heedful.MemoryLoss(model), Recorded(model)
    model(input_ids=tokens(), **WAYS[way])
    term = memory().item()
    expected = by_loops(recorded, WAYS[way], 1.0, window=4)
    torch.testing.assert_close(term, expected, rtol=1e-10, atol=0)
    assert term < by_loops(recorded, WAYS[way], 1.0)


def test_the_wrong_factors_of_others_are_distinguished():
    """Nearly everything is needed, so the term is near 1: not L times it, nor a tenth of it."""
    model = selective()
    memory, recorded = heedful.MemoryLoss(model), Recorded(model)
    model(input_ids=tokens())
    term, layers = memory().item(), len(recorded)
    expected = by_loops(recorded, {}, 1.0)
    assert layers == 3 and 0.1 < term < 1
    assert term == pytest.approx(expected, rel=1e-10)
    assert term != pytest.approx(expected * layers, rel=0.1)  # without the division by L
    assert term != pytest.approx(expected * 2, rel=0.1)  # sequences added up instead of their mean


def test_packed_rows_are_the_mean_of_documents_by_tokens():
    """What a packed sequence gives is what its documents give apart, each counted by its tokens."""
    model = selective()
    ids = tokens(1)
    memory = heedful.MemoryLoss(model)
    model(input_ids=ids, position_ids=PACKED[:1])
    packed = memory()
    apart = []
    for part in ids.split([4, 7], dim=1):
        model(input_ids=part)
        apart.append(memory() * part.shape[1])
    torch.testing.assert_close(packed, sum(apart) / 11, rtol=1e-10, atol=0)


def test_a_row_of_padding_counts_nothing():
    model = selective()
    ids, mask = tokens(), torch.ones(2, 11, dtype=torch.long)
    memory = heedful.MemoryLoss(model)
    mask[1] = 0
    model(input_ids=ids, attention_mask=mask)
    term = memory()
    model(input_ids=ids[:1])
    torch.testing.assert_close(term, memory(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("way", ["packed", "packed and padded"])
def test_gradients_are_finite_differences(way):
    model = selective("gpt2").eval()  # others compute their norms and rotations in fp32
    ids, memory = tokens(), heedful.MemoryLoss(model)
    weight = model.transformer.h[0].attn.c_attn.weight

    def term() -> torch.Tensor:
        model(input_ids=ids, **WAYS[way])
        return memory()

    term().backward()
    direction = torch.randn_like(weight)
    with torch.no_grad():
        weight += 1e-6 * direction
        above = term()
        weight -= 2e-6 * direction
        below = term()
    expected = (above - below) / 2e-6
    assert expected.abs() > 1e-4
    torch.testing.assert_close((weight.grad * direction).sum(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_one_position_of_each_document_has_the_gradient(tied, monkeypatch):
    model = selective()
    memory = heedful.MemoryLoss(model)
    memories = []

    def note(layer, args, kwargs, output):
        if tied:  # two places equal and largest: the first of them counts
            changed = torch.arange(11.0, dtype=torch.float64).expand(2, -1) + 0 * output.memory
            output = output._replace(memory=changed)
        output.memory.retain_grad()
        memories.append(output.memory)
        return output

    for layer in memory._layers:
        layer._forward_hooks.clear()
        layer.register_forward_hook(note, with_kwargs=True)
        layer.register_forward_hook(memory._collect, with_kwargs=True)
    model(input_ids=tokens(), position_ids=PACKED)
    memory().backward()
    assert len(memories) == 3
    for noted in memories:
        assert (noted.grad != 0).sum() == 4  # two sequences of two documents
        for row, length in enumerate((4, 8)):
            for part in (noted.grad[row, :length], noted.grad[row, length:]):
                assert (part != 0).sum() == 1
                assert part.sum().item() == pytest.approx(-1 / 22 / 3)
        if tied:
            assert noted.grad.nonzero().tolist() == [[0, 0], [0, 4], [1, 0], [1, 8]]


def test_checkpointed_layers_report_once():
    plain = selective()
    other = copy.deepcopy(plain)
    checkpoint_layers(other)
    ids, grads = tokens(), []
    for model in (plain, other):
        memory = heedful.MemoryLoss(model)
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            (loss + 0.1 * memory()).backward()
            with pytest.raises(ValueError, match="no layer has reported memory since the last"):
                memory()
        grads.append([p.grad for p in model.parameters()])
    for first, second in zip(*grads, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


def test_reentrant_checkpointing_is_refused():
    model = selective()
    checkpoint_layers(model, {"use_reentrant": True})
    model.enable_input_require_grads()
    heedful.MemoryLoss(model)
    with pytest.raises(ValueError, match=r"no gradient: .*'use_reentrant': False"):
        model(input_ids=tokens())


def test_it_trains_and_forgets_nothing_between_passes():
    """Gradients of two passes add up; a pass that nobody queried is forgotten."""
    model = selective()
    first, second = tokens(), tokens()
    memory = heedful.MemoryLoss(model)
    sums = []
    for batch in (first, second):
        model.zero_grad()
        model(input_ids=batch)
        memory().backward()
        sums.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
    model.zero_grad()
    for batch in (first, second):
        with torch.no_grad():
            model(input_ids=tokens(3))  # a look at other sequences
        model(input_ids=batch)
        memory().backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    torch.testing.assert_close(gradient, sum(sums), rtol=1e-12, atol=1e-14)


def test_less_is_needed_after_some_steps():
    model = selective(dtype=torch.float32)
    ids, values = tokens(4), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    with heedful.MemoryLoss(model) as memory:
        for _ in range(20):
            model(input_ids=ids)
            term = memory()
            values.append(term.item())
            term.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert values[-1] < values[0] - 0.05


def test_bf16_sums_in_fp32():
    model = selective(dtype=torch.bfloat16)
    memory = heedful.MemoryLoss(model)
    ids = tokens(2, 60)
    loss = model(input_ids=ids, labels=ids).loss
    term = memory()
    assert term.dtype == torch.float32
    (loss + 0.1 * term).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    exact = model.double()
    exact(input_ids=ids)
    assert term.item() == pytest.approx(memory().item(), rel=0.05)


def test_removed_it_leaves_no_trace():
    model = selective()
    ids, hooks = tokens(), sum(len(m._forward_hooks) for m in model.modules())
    before = model(input_ids=ids).logits
    with heedful.MemoryLoss(model) as memory:
        with pytest.raises(ValueError, match="model has a memory loss already"):
            heedful.MemoryLoss(model)
        assert torch.equal(model(input_ids=ids).logits, before)
        assert all(layer.tau == 1.0 for layer in memory._layers)
    memory.remove()
    assert sum(len(m._forward_hooks) for m in model.modules()) == hooks
    assert all(m.tau is None for m in model.modules() if isinstance(m, heedful.nn.Layer))
    model(input_ids=ids)
    with pytest.raises(ValueError, match="was removed; make a new one"):
        memory()
    with heedful.MemoryLoss(model, tau=0.5) as memory:
        model(input_ids=ids)
        assert memory() > 0


def test_models_with_it_can_be_copied_and_saved(tmp_path):
    model = selective()
    ids = tokens()
    memory = heedful.MemoryLoss(model)
    model(input_ids=ids)  # a pass that nobody queried
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=ids).logits, model(input_ids=ids).logits)
    assert memory() > 0
    model.save_pretrained(tmp_path)
    loaded = heedful.load(tmp_path)
    assert all(m.tau is None for m in loaded.modules() if isinstance(m, heedful.nn.Layer))


def test_hybrids_count_the_layers_that_report():
    model = tiny()
    heedful.convert(model, {"selective": [0, 2], "mta": [1]})
    model.train()
    memory = heedful.MemoryLoss(model)
    assert len(memory._layers) == 2
    model(input_ids=tokens())
    assert 0.1 < memory() < 1


def test_a_pass_from_a_cache_is_refused():
    """Sequences of which a cache holds the beginning are not whole."""
    model = selective()
    memory = heedful.MemoryLoss(model)
    layer = memory._layers[0]
    q, k = torch.randn(1, 4, 2, 8).double(), torch.randn(1, 2, 7, 8).double()
    memory._begin(model, ())
    layer(q, k, k)
    with pytest.raises(
        ValueError, match=r"needs whole sequences, .* from a cache \(2 new of 7 tokens"
    ):
        memory()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tiny(), r"this LlamaForCausalLM has none \(its heedful layers: none\)"),
        (lambda: heedful.convert(tiny(), "mta").model, "heedful layers: MultiTokenAttention"),
        (lambda: "a model", "model must be a converted model, got str"),
    ],
)
def test_models_without_such_layers_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        heedful.MemoryLoss(make())


@pytest.mark.parametrize("tau", [0, -1.0, float("nan"), None, "1"])
def test_a_wrong_tau_is_refused(tau):
    model = selective()
    with pytest.raises(ValueError, match="tau must be"):
        heedful.MemoryLoss(model, tau=tau)
    assert all(m.tau is None for m in model.modules() if isinstance(m, heedful.nn.Layer))


def test_replicas_of_data_parallel_are_refused():
    model = selective()
    heedful.MemoryLoss(model)
    model._is_replica = True
    with pytest.raises(ValueError, match="use DistributedDataParallel"):
        model(input_ids=tokens())


def test_it_works_on_an_adapted_model():
    from peft import LoraConfig, get_peft_model

    model = tiny()
    heedful.convert(model, Selective("extra"))
    config = LoraConfig(target_modules="all-linear", modules_to_save=["heedful"])
    adapted = get_peft_model(model, config)
    memory = heedful.MemoryLoss(adapted)
    adapted(input_ids=tokens())
    memory().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if "default.query" in n)
    memory.remove()
    memory = heedful.MemoryLoss(model)
    model(input_ids=tokens())
    assert memory().item() == pytest.approx(10 / 11)  # nothing is hidden yet: the selector is zero


class WithMemoryLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **options):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **options)
        loss = loss + 0.1 * self.memory()
        return (loss, outputs) if return_outputs else loss


def test_accumulated_batches_of_the_trainer_are_one(tmp_path):
    """Four at once, or two and two: the same parameters after a step; evaluation works."""
    rows, ends = [{"input_ids": x, "labels": x} for x in tokens(4)], []
    start = selective()
    for size in (4, 2):
        model = copy.deepcopy(start)
        trainer = WithMemoryLoss(
            model,
            TrainingArguments(
                str(tmp_path / str(size)), max_steps=1, per_device_train_batch_size=size,
                gradient_accumulation_steps=4 // size, optim="sgd", learning_rate=0.1,
                report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
                max_grad_norm=0.0,
            ),
            train_dataset=rows, eval_dataset=rows,
        )  # fmt: skip
        trainer.model_accepts_loss_kwargs = False
        trainer.memory = heedful.MemoryLoss(model)
        trainer.train()
        ends.append([p.detach().clone() for p in model.parameters()])
        assert trainer.evaluate()["eval_loss"] > 0
    moved = False
    for first, second, before in zip(*ends, start.parameters(), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-12)
        moved |= not torch.equal(first, before)
    assert moved
