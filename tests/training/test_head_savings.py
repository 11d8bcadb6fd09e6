"""What key heads save with more tokens: a gradient, beside differences of real caches."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from heedful.eviction import LowestGate, MostHidden
from heedful.hf.cache.budget import Budget
from heedful.hf.cache.new import attention_modules, cache_for
from heedful.hf.intercept import intercept
from heedful.nn import LayerOutput, RetentionGate, Selective
from heedful.ops import Visibility
from heedful.training.head_savings import head_savings
from helpers.families import tiny, tokens, varied

CHUNK = 8
EPSILON = 1e-2  # the norms of a Llama are in fp32, so that smaller steps drown in rounding


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    for name in ("eviction_order", "under_eviction"):
        monkeypatch.setattr(f"heedful.training.{name}.CHUNK", CHUNK)


class Mixed:
    """Outputs of two real caches, chunk by chunk, and of one head a little of the second's."""

    def __init__(self, module, now, then, head: int | None, share: float) -> None:
        self.module, self.policies, self.head, self.share = module, (now, then), head, share

    def __call__(self, call) -> LayerOutput:
        q, k, v, _, scale, inputs = call
        now, then = (self.by_chunks(policy, q, k, v, scale, inputs) for policy in self.policies)
        if self.head is not None:
            size = q.shape[1] // k.shape[1]
            of = slice(self.head * size, (self.head + 1) * size)
            now[:, of] += self.share * (then[:, of] - now[:, of])
        return LayerOutput(now)

    def by_chunks(self, policy, q, k, v, scale, inputs):
        index = self.module.layer_idx
        cache = cache_for(self.module, None, Budget(policy, policy.tokens[index]))
        outputs, total = [], q.shape[2]
        for start in range(0, total, CHUNK):
            stop = min(total, start + CHUNK)
            at = slice(start, stop)
            outputs.append(
                cache.attend(
                    self.module.heedful, q[:, :, at], *cache.update(k[:, :, at], v[:, :, at]),
                    visibility=Visibility(), scale=scale,
                    inputs=inputs.before(total - stop, stop - start),
                )
            )  # fmt: skip
        return torch.cat(outputs, dim=2)


@torch.no_grad()
def loss(model, ids, labels, now, then, place: tuple[int, int], share: float) -> float:
    mixed = {}
    for i, module in enumerate(attention_modules(model)):
        head = place[1] if i == place[0] else None
        mixed[module.heedful] = Mixed(module, now, then, head, share)
    with intercept(model, lambda layer, call, compute: mixed[layer](call)):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).item()


@pytest.mark.parametrize("kind", [MostHidden, LowestGate])
def test_savings_are_the_slopes_of_the_loss(kind):
    torch.manual_seed(0)
    mechanism = Selective("extra", dim=3) if kind is MostHidden else RetentionGate()
    model = varied(tiny("llama", num_hidden_layers=2), mechanism, 0.5).eval()
    now = kind(tokens=((12, 9), (10, 16)), sinks=2, recent=3)
    then = replace(now, tokens=((24, 18), (20, 32)))
    ids, trained = tokens(2, 51), [p.requires_grad for p in model.parameters()]
    labels = ids.clone()
    labels[0, :20] = -100
    batches = [(ids[:1], labels[:1]), (ids[1:], labels[1:])]
    savings = head_savings(model, now, then, batches)
    assert [p.requires_grad for p in model.parameters()] == trained
    assert all(p.grad is None for p in model.parameters())
    # What heads of the first layer change of the second's F is left out, so gates alone tell these.
    for layer in (1,) if kind is MostHidden else (0, 1):
        for head in range(2):
            place = layer, head
            more, less = (
                loss(model, ids, labels, now, then, place, share) for share in (EPSILON, -EPSILON)
            )
            slope = (less - more) / (2 * EPSILON)
            assert savings[place].item() == pytest.approx(slope, rel=1e-2, abs=1e-6)
    assert savings[1].abs().max() > 1e-4
    assert torch.equal(head_savings(model, now, now, batches), torch.zeros(2, 2))


def test_a_layer_without_a_budget_saves_nothing():
    torch.manual_seed(0)
    model = varied(tiny("llama", num_hidden_layers=2), Selective("extra", dim=3), 0.5).eval()
    now = MostHidden(tokens=(None, (10, 16)), sinks=2, recent=3)
    ids = tokens(1, 51)
    savings = head_savings(model, now, replace(now, tokens=(None, (20, 32))), [(ids, ids)])
    assert savings[0].tolist() == [0, 0] and savings[1].abs().min() > 0
