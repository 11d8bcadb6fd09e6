"""Attention dropout: one mask per seed in every implementation, and what it does on average."""

import pytest
import torch

from heedful.ops import multi_token_attention
from heedful.ops.common import tiles
from heedful.ops.common.dropout import dropout_of
from helpers.mechanisms import MECHANISMS, Shape, run_by
from helpers.oracle import with_grads

every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled"))
with_composed = pytest.mark.parametrize("impl", ("reference", "tiled", "composed"))
DROPPED = {"dropout_p": 0.3, "seed": 7}


def test_numbers_are_uniform_and_independent():
    """Shares, neighbours in every direction, other seeds: each within five deviations."""
    q, n = torch.zeros(2, 4, 1, 1), 1000
    first, other, high = (
        (dropout_of(0.3, seed, q).factor(2, range(n), range(n), torch.float64) == 0).double() - 0.3
        for seed in (7, 8, 7 + 2**40)
    )
    deviation = 0.21**0.5
    assert first.mean((2, 3)).abs().max() < 5 * deviation / n
    for dim in (2, 3):  # whole rows and columns: the largest of 8000 means
        assert first.mean(dim).abs().max() < 5 * deviation / n**0.5
    pairs = {f"next along {dim}": first * first.roll(1, dim) for dim in range(4)}
    pairs |= {"two rows on": first * first.roll(2, 2), "transposed": first * first.mT}
    pairs |= {"seed": first * other, "high bits of the seed": first * high}
    for name, product in pairs.items():
        assert product.mean().abs() < 5 * 0.21 / product.numel() ** 0.5, name


def test_a_tile_is_a_part_of_the_map():
    q = torch.zeros(2, 4, 300, 16)
    dropout = dropout_of(0.5, torch.tensor(3), q)
    whole = dropout.factor(2, range(300), range(300), torch.float32)
    part = dropout.factor(2, range(70, 130), range(5, 250), torch.float32)
    assert torch.equal(part, whole[:, :, 70:130, 5:250])
    assert set(whole.unique().tolist()) == {0.0, 2.0}


@every
def test_the_mask_does_not_depend_on_the_row_blocks(mechanism, monkeypatch):
    tensors = mechanism.draw(Shape().long(100))
    usual = with_grads(run_by(mechanism, "tiled", **DROPPED), tensors)
    monkeypatch.setattr(tiles.row_blocks, "__defaults__", (17,))
    monkeypatch.setattr(tiles.Scope, "rows_per_block", lambda *_: 17)
    for name, x in with_grads(run_by(mechanism, "tiled", **DROPPED), tensors).items():
        torch.testing.assert_close(x, usual[name], rtol=1e-12, atol=1e-12)


@every
@each_impl
def test_on_average_nothing_is_dropped(mechanism, impl):
    """Over seeds and copies in a batch; each output within five of its own standard errors, nearly
    all within three."""
    tensors = mechanism.draw(Shape().long(12))
    exact = mechanism.run(tensors, impl)[0]
    copies = tensors | {name: tensors[name].repeat(50, 1, 1, 1) for name in mechanism.per_token}
    runs = [run_by(mechanism, impl, dropout_p=0.2, seed=n)(copies)[0] for n in range(8)]
    runs = torch.cat([x.unflatten(0, (50, 2)) for x in runs])
    off = (runs.mean(0) - exact).abs() / (runs.std(0) / 20 + 1e-12)
    assert off.max() < 5.5 and (off > 3).double().mean() < 0.02


@every
@with_composed
def test_none_is_nothing_and_a_seed_is_all(mechanism, impl):
    tensors = mechanism.draw(Shape().long(40))
    without = with_grads(lambda x: mechanism.run(x, impl), tensors)
    none = with_grads(run_by(mechanism, impl, dropout_p=0.0, seed=5), tensors)
    assert all(torch.equal(none[name], x) for name, x in without.items())
    run = run_by(mechanism, impl, **DROPPED)
    assert torch.equal(run(tensors)[0], run(tensors)[0])
    same = run_by(mechanism, impl, dropout_p=0.3, seed=torch.tensor(7))
    assert torch.equal(same(tensors)[0], run(tensors)[0])
    assert not torch.equal(
        run_by(mechanism, impl, dropout_p=0.3, seed=8)(tensors)[0], run(tensors)[0]
    )
    without_seed = run_by(mechanism, impl, dropout_p=0.3)
    torch.manual_seed(1)
    first, second = without_seed(tensors)[0], without_seed(tensors)[0]
    torch.manual_seed(1)
    assert torch.equal(without_seed(tensors)[0], first) and not torch.equal(second, first)


@each_impl
def test_it_is_standard_dropout_of_the_map_that_multiplies_the_values(impl):
    """With both convolutions and mixings: of A in O = A V, by its factor."""
    tensors = next(m for m in MECHANISMS if m.name == "mta-full").draw(Shape(key_heads=4).long(30))
    tensors["v"] = torch.eye(30, dtype=torch.float64).expand(2, 4, 30, 30)
    call = {name: tensors.pop(name) for name in ("q", "k", "v")}
    whole = multi_token_attention(**call, **tensors, impl=impl)
    actual = multi_token_attention(**call, **tensors, **DROPPED, impl=impl)
    factor = dropout_of(0.3, 7, call["q"]).factor(2, range(30), range(30), torch.float64)
    torch.testing.assert_close(actual, whole * factor, rtol=0, atol=1e-12)
