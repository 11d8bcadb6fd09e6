"""Retention gates: their formula, what a cache keeps of them, and that they evict by it."""

import pytest
import torch
from torch import Tensor

import heedful
from heedful.eviction import CachedTokens, MostHidden
from heedful.hf.budgets import write_budgets
from heedful.hf.family.modules import attention_modules
from heedful.nn import LayerInputs, Standard
from heedful_lab.rivals.models import convert, load
from heedful_lab.rivals.retention import LowestGate, RetentionGate
from helpers.cached import in_steps
from helpers.families import logits, stir, tiny, tokens
from helpers.layers import SHAPE, stirred
from helpers.oracle import draw


def converted(**options):
    model = tiny(**options)
    convert(model, "retention-gate")
    stir(model, 0.2, only=".heedful.")
    return model


def plain_of(name: str):
    model = tiny()
    heedful.convert(model, name)
    return model


def test_the_gate_is_its_formula_and_in_no_output():
    layer, x = stirred(RetentionGate(), 1.0), draw(2, 9, 20)
    q, k, v = draw(2, 4, 9, 6), draw(2, 2, 9, 6), draw(2, 2, 9, 6)
    out = layer(q, k, v, inputs=LayerInputs(input=x))
    assert torch.equal(out.output, Standard().build(SHAPE)(q, k, v).output)
    w = layer.retention.weight[0].double()
    expected = [[float((x[row, j] * w).sum().detach()) for j in range(9)] for row in range(2)]
    torch.testing.assert_close(out.state[:, 0].tolist(), expected)
    assert not RetentionGate().build(SHAPE).retention.weight.any()


def test_the_state_goes_on_token_by_token():
    layer, x = stirred(RetentionGate(), 1.0), draw(2, 9, 20)
    q, k, v = draw(2, 4, 9, 6), draw(2, 2, 9, 6), draw(2, 2, 9, 6)
    whole, state = layer(q, k, v, inputs=LayerInputs(input=x)).state, None
    for t in range(9):
        inputs = LayerInputs(input=x[:, t : t + 1], state=state)
        state = layer(q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1], inputs=inputs).state
    torch.testing.assert_close(state, whole)
    with pytest.raises(
        ValueError, match=r"inputs\.input must hold all 9 tokens since inputs\.state"
    ):
        layer(q, k, v, inputs=LayerInputs(input=x[:, 3:]))


def test_gates_of_half_precision_are_of_fp32():
    layer, x = stirred(RetentionGate(), 1.0).float(), draw(1, 9, 20).bfloat16()
    assert layer.gates(9, LayerInputs(input=x)).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        gates = layer.gates(9, LayerInputs(input=x.float()))
    assert torch.equal(gates, layer.gates(9, LayerInputs(input=x)))


def test_the_cache_evicts_the_lowest_gate():
    """Layer 0, whose input is the embedding, token by token; sinks and recent ones stay."""
    model, ids = converted(), tokens(1, 40)
    module = attention_modules(model)[0]
    inputs: list[Tensor] = []
    handle = module.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append((args or (kwargs["hidden_states"],))[0]),
        with_kwargs=True,
    )
    logits(model, ids)
    handle.remove()
    gate = (inputs[0][0] @ module.heedful.retention.weight[0].double()).tolist()
    cache, cached = heedful.new_cache(model, LowestGate(12, sinks=2, recent=3)), []
    for t in range(40):
        in_steps(model, ids[:, t : t + 1], [1], cache)
        cached.append(t)
        if len(cached) >= 12:
            cached.remove(min((j for j in cached if 2 <= j <= t - 3), key=gate.__getitem__))
        assert cache.positions()[0][0].tolist() == cached
    assert cached != [0, 1, *range(31, 40)]


def test_what_is_saved_evicts_the_same(tmp_path):
    """A folder and an adapter; `budgets.json` names the library's own policies."""
    base, ids = tiny(dtype=torch.float32), tokens(2, 30)
    base.save_pretrained(tmp_path / "base")
    model = base
    convert(model, "retention-gate")
    for module in attention_modules(model):
        module.heedful.retention.weight.data.normal_()
    policy = LowestGate((15, None, 20))
    expected = in_steps(model, ids, [1] * 30, heedful.new_cache(model, policy))
    model.save_pretrained(tmp_path / "whole")
    heedful.save_adapter(model, tmp_path / "adapter", base=str(tmp_path / "base"))
    for opened, folder in (
        (load(tmp_path / "whole"), "whole"),
        (load(tmp_path / "base", adapter=tmp_path / "adapter"), "adapter"),
    ):
        with pytest.raises(ValueError, match="LowestGate is not one of them"):
            write_budgets(tmp_path / folder / "budgets.json", policy, opened, {})
        again = in_steps(opened.eval(), ids, [1] * 30, heedful.new_cache(opened, policy))
        assert torch.equal(again, expected)


def test_gates_and_masks_are_not_each_other():
    gated, plain = converted(), plain_of("standard")
    with pytest.raises(ValueError, match=r"needs a mechanism that masks tokens .* Retention"):
        heedful.new_cache(gated, MostHidden(20))
    for model in (plain, plain_of("selective"), plain_of("forgetting")):
        with pytest.raises(ValueError, match=r"LowestGate needs 'gate', which .* does not keep"):
            heedful.new_cache(model, LowestGate(20))
    cached = CachedTokens(torch.arange(3)[None], 3, number=torch.tensor([[2.0, -1.0, 0.5]]))
    assert LowestGate(20).score(cached).tolist() == [[2.0, -1.0, 0.5]]
