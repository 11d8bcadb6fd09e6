"""Retention gates that act beyond a window: the formula, its gradients, and the memory loss."""

import math

import pytest
import torch
from torch import Tensor

import heedful
from heedful.hf.family.modules import attention_modules
from heedful.nn import LayerInputs, Standard
from heedful.ops import Queries, Visibility
from heedful_lab.rivals.retention import RetentionGate
from helpers.families import tiny, tokens, varied
from helpers.layers import SHAPE, qkvx, stirred
from helpers.oracle import EXACT, draw

WINDOW = 5
PACKED = torch.tensor([[0] * 20 + [1] * 21, [0] * 33 + [1] * 8])
PADDED = torch.tensor([[False] * 7 + [True] * 34, [True] * 30 + [False] * 11])
VIEWS = {
    "causal": Visibility(),
    "packed": Visibility(documents=PACKED),
    "padded": Visibility(padding=PADDED),
    "a wider window": Visibility(window=12),
    "a narrower window": Visibility(window=4),
    "places": Visibility(positions=torch.arange(41)[None] * 2),
}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Several blocks of rows in short sequences, the last one odd."""
    monkeypatch.setattr("heedful_lab.rivals.retention._ROWS", 16)


def gated(window: int = WINDOW):
    """In fp64, with gates on both sides of one half."""
    layer = stirred(RetentionGate(window), 1.0)
    layer.retention.bias.data.fill_(0.5)
    return layer


def gates(layer, x: Tensor) -> Tensor:
    return (x @ layer.retention.weight[0].double() + layer.retention.bias.double())[:, None]


def log_shares(layer, x: Tensor) -> Tensor:
    return torch.log(torch.sigmoid(gates(layer, x)) * (1 + math.exp(-5)))


def weights_of(layer, q: Tensor, k: Tensor, x: Tensor, view: Visibility, inputs) -> Tensor:
    """The definition, dense; of the last rows of `q`."""
    tokens, rows = k.shape[2], q.shape[2]
    place = torch.arange(tokens) if view.positions is None else view.positions[0]
    back = place[tokens - rows :, None] - place
    log_share = log_shares(layer, x)
    scores = q @ k.repeat_interleave(2, 1).mT / 6**0.5
    if inputs.softcap is not None:
        scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
    scores = scores + (0 if inputs.bias is None else inputs.bias)
    scores = scores + torch.where(back >= layer.config.window, log_share[:, :, None], 0.0)
    visible = view.dense(rows, tokens, q.device)[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    if inputs.sinks is None:
        return scores.softmax(-1).nan_to_num(0)
    column = inputs.sinks[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def test_it_is_the_formula_by_loops():
    layer, (q, k, v, x) = gated(2), qkvx(5)
    out = layer(q, k, v, inputs=LayerInputs(input=x))
    w, b = layer.retention.weight[0].tolist(), layer.retention.bias.item()
    for row, h, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        weights = []
        for j in range(i + 1):
            dot = (q[row, h, i] * k[row, h // 2, j]).sum().item()
            gate = sum(y * z for y, z in zip(x[row, j].tolist(), w, strict=True)) + b
            share = (1 + math.exp(-5)) / (1 + math.exp(-gate)) if i - j >= 2 else 1.0
            weights.append(share * math.exp(dot / 6**0.5))
        mean = sum(y * v[row, h // 2, j] for j, y in enumerate(weights)) / sum(weights)
        torch.testing.assert_close(out.output[row, h, i], mean, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", VIEWS)
def test_outputs_and_gradients_are_those_of_the_definition(name):
    layer, leaves, view = gated(), [y.requires_grad_() for y in qkvx(41)], VIEWS[name]
    q, k, v, x = leaves
    inputs = LayerInputs(input=x)
    actual = layer(q, k, v, visibility=view, inputs=inputs).output
    weights = weights_of(layer, q, k, x, view, inputs)
    expected = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(actual, expected, **EXACT)
    maps = layer.maps(q, k, visibility=view, inputs=inputs).weights
    torch.testing.assert_close(maps, weights, **EXACT)
    factor, own = draw(*q.shape), list(layer.parameters())
    slopes = (
        torch.autograd.grad((y * factor).sum(), [*leaves, *own], materialize_grads=True)
        for y in (actual, expected)
    )
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 if a.dtype == torch.float32 else 1e-11)
    acts = name != "a narrower window"
    plain = Standard().build(SHAPE)(q, k, v, visibility=view).output
    assert acts == (not torch.allclose(actual, plain, atol=1e-6))


def test_cap_bias_and_sinks_of_a_family():
    layer, (q, k, v, x) = gated(), qkvx(41)
    bias, sinks = draw(1, 4, 41, 41).requires_grad_(), draw(4).requires_grad_()
    inputs = LayerInputs(input=x, bias=bias, sinks=sinks, softcap=3.0)
    actual = layer(q, k, v, inputs=inputs).output
    weights = weights_of(layer, q, k, x, Visibility(), inputs)
    expected = weights @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(actual, expected, **EXACT)
    slopes = (torch.autograd.grad(y.square().sum(), [bias, sinks]) for y in (actual, expected))
    for a, b in zip(*slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


WAYS = {
    "whole sequences": {},
    "packed": {"position_ids": torch.cat([torch.arange(17), torch.arange(13)]).expand(2, -1)},
    "left padding": {"attention_mask": torch.tensor([[1] * 30, [0] * 9 + [1] * 21])},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "mistral"])  # whose window is 4
@pytest.mark.parametrize("tau", [1.0, 0.5])
def test_the_memory_loss_counts_what_gates_leave(way, family, tau):
    """By loops over every query: its near keys, and of the others what their gates leave."""
    window, ids = 2, tokens(2, 30)
    model = varied(tiny(family), RetentionGate(window), 0.3).train()
    modules, states = attention_modules(model), []
    for module in modules:
        module.heedful.retention.bias.data.fill_(0.5)
        module.heedful.register_forward_hook(lambda _, args, out: states.append(out.state))
    memory = heedful.MemoryLoss(model, tau=tau)
    model(input_ids=ids, use_cache=False, **WAYS[way])
    reach = 4 if family == "mistral" else 30
    documents = [[range(17), range(17, 30)]] * 2 if way == "packed" else [[range(30)]] * 2
    if way == "left padding":
        documents = [[range(30)], [range(9, 30)]]
    total = 0.0
    for state in states:
        for row, parts in enumerate(documents):
            for part in parts:
                needed = []
                for i in part:
                    seen = [j for j in part if 0 < i - j < reach]
                    near = sum(i - j < window for j in seen)
                    left = [torch.sigmoid(state[row, 0, j]).item() for j in seen if i - j >= window]
                    needed.append(near + sum(left))
                total += max(needed)
    count = sum(len(part) for parts in documents for part in parts)
    assert len(states) == len(modules)
    assert memory().item() == pytest.approx(total / count / len(modules), rel=1e-6)


def test_refused():
    for window in (0, -1, 2.5, True, "8"):
        with pytest.raises(ValueError, match="window must be a whole number of tokens of at least"):
            RetentionGate(window)
    layer, (q, k, v, x) = gated(), qkvx(5)
    with pytest.raises(
        ValueError, match=r"inputs\.dropout must be left out for SelfPrunedAttention"
    ):
        layer(q, k, v, inputs=LayerInputs(input=x, dropout=0.5))
    with pytest.raises(ValueError, match="q must not be empty"):
        layer(q[:, :, :0], k, v, inputs=LayerInputs(input=x))
    places = Queries(positions=torch.arange(5)[None])
    for name, view in {
        "causal must be its default, got False": Visibility(causal=False),
        "mutual must be its default": Visibility(mutual=torch.zeros(1, 5).long()),
        "queries must be its default": Visibility(queries=places),
    }.items():
        with pytest.raises(ValueError, match=f"visibility.{name}"):
            layer(q, k, v, visibility=view, inputs=LayerInputs(input=x))
