"""The loss that holds learned groups at their size, and its alarm."""

import logging

import pytest
import torch

import heedful
from heedful import Grouped, GroupingLoss
from helpers.families import checkpoint_layers, tiny, tokens


def converted(grouping: str = "cif", **options):
    model = tiny("llama", max_position_embeddings=256).train()
    heedful.convert(model, Grouped(grouping, size=4, window=2, **options))
    return model


def test_it_is_the_mean_over_the_layers_that_make_groups():
    model, ids = converted(share=2), tokens(2, 40)
    collected = []
    layers = [m.heedful for m in model.modules() if isinstance(getattr(m, "heedful", None),
              torch.nn.Module)]  # fmt: skip
    for layer in layers:
        layer.register_forward_hook(lambda _, args, out: collected.append(out.grouping))
    with GroupingLoss(model) as grouping_loss:
        model(input_ids=ids, use_cache=False)
        loss = grouping_loss()
        reports = [report for report in collected if report is not None]
        assert len(reports) == 2 and len(collected) == 3, (
            "layers 0 and 2 make groups, 1 takes those of 0"
        )
        expected = torch.stack([report.loss for report in reports]).mean()
        assert torch.equal(loss, expected)
        assert grouping_loss.sizes == [report.size.item() for report in reports]
        loss.backward()
        for layer in (layers[0], layers[2]):
            grads = [p.grad for p in layer.grouping.parameters()]
            assert all(g is not None and bool(g.isfinite().all()) for g in grads)
            assert any(bool(g.any()) for g in grads)


def push(model, by: float) -> list[torch.nn.Module]:
    """Fill groups faster in every layer; returns what makes the groups."""
    groupings = [m.heedful.grouping for m in model.modules() if hasattr(m, "heedful")]
    with torch.no_grad():
        for grouping in groupings:
            grouping.outer.bias.add_(by)
    return groupings


def test_a_collapsed_grouping_is_reported_once_until_it_is_back(caplog):
    model, ids = converted("cif"), tokens(4, 120)

    def warnings() -> int:
        caplog.clear()
        model(input_ids=ids, use_cache=False)
        grouping()
        return sum("has collapsed, or is about to" in x.getMessage() for x in caplog.records)

    with caplog.at_level(logging.WARNING, logger="heedful"), GroupingLoss(model) as grouping:
        assert warnings() == 0
        push(model, 6.0)  # nearly every token fills a group
        assert (warnings(), warnings()) == (3, 0) and max(grouping.sizes) < 1.3
        push(model, -6.0)
        assert warnings() == 0 and min(grouping.sizes) >= 2
        push(model, -9.0)  # none does before the longest
        assert (warnings(), warnings()) == (3, 0) and min(grouping.sizes) > 12


def test_training_brings_the_size_back():
    torch.manual_seed(0)
    model, ids = converted("cif"), tokens(2, 40)
    own = [p for grouping in push(model, 6.0) for p in grouping.parameters()]
    optimizer, losses = torch.optim.Adam(own, lr=0.1), []
    with GroupingLoss(model) as grouping:
        for _ in range(100):
            model(input_ids=ids, use_cache=False)
            losses.append(grouping())
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[0] > 8 and losses[-1] < 0.1
        assert all(2 <= size <= 8 for size in grouping.sizes)


def test_gradient_checkpointing_gives_the_same_gradients():
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model = converted("cif", share=2)
        if checkpointing:
            checkpoint_layers(model, {"use_reentrant": False})
        with GroupingLoss(model) as grouping:
            ids = torch.arange(80).view(2, 40) % 30 + 2
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            (loss + grouping()).backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("grouping", ["fixed", "sliding"])
def test_groups_that_keep_their_size_have_none(grouping):
    with pytest.raises(ValueError, match=r"must have layers that report groups, and .* has none"):
        GroupingLoss(converted(grouping))


def test_a_forward_pass_with_the_default_cache_is_heard_too():
    results = []
    for cached in (True, False):
        torch.manual_seed(1)
        model = converted("cif", share=2)
        with GroupingLoss(model) as grouping:
            out = model(input_ids=torch.arange(40)[None] % 30 + 2, use_cache=cached)
            results.append((out.logits, grouping()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_a_call_without_a_forward_pass_says_so():
    model = converted()
    grouping = GroupingLoss(model)
    with pytest.raises(ValueError, match="no layer has reported groups since the last call"):
        grouping()
    model.eval()(input_ids=tokens(1, 9))
    with pytest.raises(ValueError, match="in eval mode with use_cache=False"):
        grouping()
    grouping.remove()
    with pytest.raises(ValueError, match=r"this GroupingLoss was removed; make a new one"):
        grouping()
