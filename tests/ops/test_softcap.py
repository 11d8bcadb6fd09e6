"""Soft-capped logits, as in Gemma 2: the laws of every mechanism with them."""

from collections.abc import Callable

import pytest
import torch
from mechanisms import MECHANISMS, TWO_SIDED, VISIBILITIES, Mechanism, Shape, ragged
from oracle import Tensors, against_oracle, cast, with_grads
from torch import Tensor

from heedful.ops import Visibility, multi_token_attention, selective_attention
from heedful.testing import assert_matches_oracle, peak_memory_mib

every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled"))
CAP = 1.5  # logits here are about one, and larger after a convolution


def run_by(
    mechanism: Mechanism, impl: str, visibility: Visibility | None = None, cap: float | None = CAP
) -> Callable[[Tensors], tuple]:
    return lambda x: mechanism.run(x | {"softcap": cap}, impl, visibility)


def with_bias(mechanism: Mechanism, shape: Shape) -> Tensors:
    tensors = mechanism.draw(shape)
    size = (1, tensors["q"].shape[1], shape.queries, shape.keys)
    return tensors | {"bias": torch.randn(size, dtype=torch.float64)}


@pytest.mark.parametrize("mechanism", [*MECHANISMS, *TWO_SIDED], ids=str)
@pytest.mark.parametrize("cap", [0.4, 1.5, 50.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(mechanism, cap, dtype):
    """Forward and every gradient."""
    functions = (run_by(mechanism, impl, cap=cap) for impl in ("tiled", "reference"))
    against_oracle(*functions, with_bias(mechanism, Shape().long(111)), dtype)


@pytest.mark.crossed
@every
@pytest.mark.parametrize("queries", [150, 70])
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" not in name])
def test_visibilities_and_cross_lengths(mechanism, visible, queries):
    functions = (
        run_by(mechanism, impl, VISIBILITIES[visible](150)) for impl in ("tiled", "reference")
    )
    against_oracle(*functions, mechanism.draw(Shape(queries=queries, keys=150)), torch.float32)


@every
@each_impl
def test_gradients_by_finite_differences(mechanism, impl):
    shape = Shape(batch=2, heads=2, key_heads=1, queries=9, keys=12, dim=3)
    tensors = with_bias(mechanism, shape)
    names = list(tensors)

    def function(*values):
        return run_by(mechanism, impl, ragged(12)[0])(dict(zip(names, values, strict=True)))

    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool) -> Tensor:
    """As Gemma 2 computes it: scaled, capped, masked."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = CAP * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / CAP) + bias
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1).bool(), float("-inf"))
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.identity], ids=str)
@each_impl
@pytest.mark.parametrize("causal", [True, False])
def test_identity_parameters_are_the_capped_attention_of_a_family(mechanism, impl, causal):
    if not causal and "selective" in mechanism.name:
        return
    tensors = mechanism.identity(with_bias(mechanism, Shape().long(130)))
    expected = plain(*(tensors[name] for name in ("q", "k", "v", "bias")), causal)
    found = run_by(mechanism, impl, Visibility(causal=causal))(tensors)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    uncapped = run_by(mechanism, impl, Visibility(causal=causal), cap=None)(tensors)[0]
    assert (found - uncapped).abs().max() > 1e-2


@every
@each_impl
def test_none_is_nothing_and_a_large_cap_nearly(mechanism, impl):
    tensors = mechanism.draw(Shape().long(100))
    without = with_grads(lambda x: mechanism.run(x, impl), tensors)
    none = with_grads(run_by(mechanism, impl, cap=None), tensors)
    large = with_grads(run_by(mechanism, impl, cap=1e6), tensors)
    for name, x in without.items():
        assert torch.equal(none[name], x)
        torch.testing.assert_close(large[name], x, rtol=1e-9, atol=1e-9)


@each_impl
def test_no_two_logits_are_further_apart_than_twice_the_cap(impl):
    """However large they are: the weights of two keys have a ratio of at most e^2c."""
    q, k = (30 * torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(2))
    v = torch.eye(70, dtype=torch.float64).expand(1, 2, 70, 70)
    found = multi_token_attention(q, k, v, softcap=CAP, impl=impl)
    seen = found.tril().where(torch.ones(70, 70).tril().bool(), torch.nan)
    ratio = (seen.nan_to_num(0).amax(-1) / seen.nan_to_num(9).amin(-1)).log()
    assert ratio.max() <= 2 * CAP + 1e-9 and ratio.max() > 1.9 * CAP


@every
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_err_no_more_than_their_definition(mechanism, queries, dtype):
    given = cast(with_bias(mechanism, Shape(queries=queries, keys=61)), dtype)
    with torch.no_grad():
        found, plain = (run_by(mechanism, impl)(given) for impl in ("tiled", "reference"))
        exact = run_by(mechanism, "reference")({n: x.double() for n, x in given.items()})
    for i, (x, y, z) in enumerate(zip(found, plain, exact, strict=True)):
        assert_matches_oracle(f"output {i}", x, y, z, 61)


@every
@each_impl
def test_no_later_token_reaches_an_earlier_output(mechanism, impl):
    tensors = {n: x.float() for n, x in mechanism.draw(Shape().long(70)).items()}
    before = run_by(mechanism, impl)(tensors)[0]
    for t in (1, 33, 64, 69):
        changed = {n: x.clone() for n, x in tensors.items()}
        for name in mechanism.per_token:
            changed[name][:, :, t] += 1
        after = run_by(mechanism, impl)(changed)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert not torch.equal(after[:, :, t], before[:, :, t])


@each_impl
def test_what_selects_is_not_capped_and_hides_without_limit(impl):
    mechanism = next(m for m in MECHANISMS if m.name == "selective")
    tensors = mechanism.draw(Shape().long(40))
    capped = selective_attention(**tensors, softcap=CAP, impl=impl)
    assert torch.equal(capped.state, selective_attention(**tensors, impl=impl).state)
    # F beyond the cap takes a key away altogether.
    state = torch.zeros(2, 1, 40, dtype=torch.float64)
    state[:, :, 3] = 100.0
    tensors["v"][:, :, 3] += 1e6
    out = selective_attention(**tensors, softcap=CAP, state=state, impl=impl).output
    assert out[:, :, 3:].abs().max() < 100


@every
def test_fused_is_refused_and_auto_takes_tiled(mechanism, interpreted):
    tensors = {n: x.float() for n, x in mechanism.draw(Shape(dim=16)).items()}
    with pytest.raises(ValueError, match=r"impl='fused' cannot .* do not cap the logits"):
        run_by(mechanism, "fused")(tensors)
    found = (run_by(mechanism, impl)(tensors) for impl in ("auto", "tiled"))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


WRONG = {
    "softcap must be positive, got 0; None caps nothing": 0,
    "softcap must be positive, got -50": -50.0,
    "softcap must be a finite number, got inf": float("inf"),
    "softcap must be a finite number, got 'fifty'": "fifty",
    "softcap must be a plain number, got a tensor, .* use its .item": torch.tensor(50.0),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if m.name in ("mta-full", "selective", "differential")],
    ids=str,
)
def test_what_is_no_cap(mechanism, message):
    with pytest.raises(ValueError, match=message):
        run_by(mechanism, "auto", cap=WRONG[message])(mechanism.draw(Shape()))


PROGRAM = """
import torch
from heedful.ops import *
T = 2048
q, k, v = (torch.randn(1, 8, T, 32, requires_grad=True) for _ in range(3))
def run(n=T):
    x, y, z = (t[:, :, :n] for t in (q, k, v))
    selective_attention(x, y, z, softcap={cap}).output.sum().backward()
run(70)
for t in (q, k, v):
    t.grad = None
"""


@pytest.mark.slow
def test_memory_is_one_tile_more():
    """A map of all heads would take 128 MiB, a tile takes 4."""
    less, more = (peak_memory_mib(PROGRAM.format(cap=cap)) for cap in (None, 5.0))
    assert more - less < 4 * 4, (less, more)
