"""Differential attention, second version, against loops and a model with twice the query heads."""

import math

import pytest
import torch

from heedful.nn import LayerInputs
from heedful_lab.rivals.differential_v2 import DifferentialV2
from helpers.families import logits, tiny, tokens, varied
from helpers.layers import SHAPE, attended, stirred
from helpers.oracle import EXACT, draw


def test_differential_v2():
    """Pairs of queries over one key and value, and a lambda per token and head."""
    module = stirred(DifferentialV2())
    inputs, q = draw(2, 5, 20), draw(2, 5, 4, 6)
    k, v = draw(2, 5, 2, 6), draw(2, 5, 2, 6)
    second = torch.zeros_like(q)
    for b, t, h, c in torch.cartesian_prod(*map(torch.arange, q.shape)).tolist():
        row = module.query.weight.detach()[h * 6 + c]
        second[b, t, h, c] = sum(float(inputs[b, t, e] * row[e]) for e in range(20))
    expected = attended(q, k, v)
    less = attended(second, k, v)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        logit = sum(float(inputs[b, t, e] * module.lam.weight.detach()[h, e]) for e in range(20))
        expected[b, t, h] -= less[b, t, h] / (1 + math.exp(-logit))
    out = module(*(x.transpose(1, 2) for x in (q, k, v)), inputs=LayerInputs(input=inputs)).output
    torch.testing.assert_close(out.transpose(1, 2), expected, **EXACT)


def test_both_queries_of_differential_v2_get_the_familys_bias_and_sink():
    module, inputs = stirred(DifferentialV2()), draw(2, 5, 20)
    q, k, v = draw(2, 4, 5, 6), draw(2, 2, 5, 6), draw(2, 2, 5, 6)
    bias, sinks = draw(1, 4, 5, 5), draw(4)
    second = (inputs @ module.query.weight.mT).unflatten(2, (4, 6)).transpose(1, 2)
    pairs = torch.stack([q, second], dim=2).flatten(1, 2)
    logits = pairs @ k.repeat_interleave(4, 1).mT / 6**0.5 + bias.repeat_interleave(2, 1)
    logits = logits.masked_fill(~torch.ones(5, 5).bool().tril(), -math.inf)
    column = sinks.repeat_interleave(2)[:, None, None].expand(2, 8, 5, 1)
    both = torch.cat([logits, column], -1).softmax(-1)[..., :5] @ v.repeat_interleave(4, 1)
    beside = LayerInputs(input=inputs, bias=bias, sinks=sinks)
    expected = both[:, 0::2] - module.lambdas(beside, 5) * both[:, 1::2]
    torch.testing.assert_close(module(q, k, v, inputs=beside).output, expected, **EXACT)


def test_lambdas_of_differential_v2_start_at_one_half():
    module, inputs = DifferentialV2().build(SHAPE).double(), draw(2, 5, 20)
    assert bool((module.lambdas(LayerInputs(input=inputs), 3) == 0.5).all())
    assert module.query.weight.std().item() == pytest.approx(20**-0.5, rel=0.1)
    # One more query projection, and a lambda per head: what the published count has beyond ours.
    assert sum(p.numel() for p in module.parameters()) == 4 * 6 * 20 + 4 * 20


def test_a_model_with_twice_the_query_heads_rotates_as_the_layer_does():
    """Lambdas of one half: out = (first - half of the second) of each pair of the wide model."""
    model = tiny(num_hidden_layers=1)
    ids = tokens()
    varied(model, DifferentialV2())
    own = model.model.layers[0].self_attn
    own.heedful.lam.weight.data.zero_()
    wide = tiny(num_hidden_layers=1, num_attention_heads=8, head_dim=8)
    state = {x: p for x, p in model.state_dict().items() if ".heedful." not in x}
    heads = [x.unflatten(0, (4, 8)) for x in (own.q_proj.weight, own.heedful.query.weight)]
    name = "model.layers.0.self_attn"
    state[f"{name}.q_proj.weight"] = torch.stack(heads, dim=1).flatten(0, 2).detach()
    columns = own.o_proj.weight.detach().unflatten(1, (4, 8))
    both = torch.stack([columns, -columns / 2], dim=2).flatten(1)
    state[f"{name}.o_proj.weight"] = both
    wide.load_state_dict(state)
    torch.testing.assert_close(logits(model, ids), logits(wide, ids), rtol=0, atol=1e-11)
