"""Sinks, as in GPT-OSS: the laws of every mechanism with a logit per head that gets no value."""

from collections.abc import Callable

import pytest
import torch
from mechanisms import MECHANISMS, TWO_SIDED, VISIBILITIES, Mechanism, Shape, ragged
from oracle import Tensors, against_oracle, cast, with_grads

from heedful.ops import Visibility, selective_attention
from heedful.testing import assert_matches_oracle

every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled"))


def run_by(
    mechanism: Mechanism, impl: str, visibility: Visibility | None = None, **options
) -> Callable[[Tensors], tuple]:
    return lambda x: mechanism.run(x | options, impl, visibility)


def sunk(mechanism: Mechanism, shape: Shape, size: float = 1.0) -> Tensors:
    """The mechanism's tensors and sinks."""
    tensors = mechanism.draw(shape)
    return tensors | {"sinks": size * torch.randn(tensors["q"].shape[1], dtype=torch.float64)}


@pytest.mark.parametrize("mechanism", [*MECHANISMS, *TWO_SIDED], ids=str)
@pytest.mark.parametrize("size", [1.0, 9.0])  # the second takes nearly all of a row, or nothing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(mechanism, size, dtype):
    """Forward and every gradient, that of the sinks with them."""
    functions = (run_by(mechanism, impl) for impl in ("tiled", "reference"))
    against_oracle(*functions, sunk(mechanism, Shape().long(111), size), dtype)


@every
def test_with_a_bias_and_a_cap(mechanism):
    tensors = sunk(mechanism, Shape().long(80))
    size = (2, tensors["q"].shape[1], 80, 80)
    tensors["bias"] = torch.randn(size, dtype=torch.float64)
    functions = (run_by(mechanism, impl, softcap=1.5) for impl in ("tiled", "reference"))
    against_oracle(*functions, tensors, torch.float32)


@pytest.mark.crossed
@every
@pytest.mark.parametrize("queries", [150, 70])
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" not in name])
def test_visibilities_and_cross_lengths(mechanism, visible, queries):
    functions = (
        run_by(mechanism, impl, VISIBILITIES[visible](150)) for impl in ("tiled", "reference")
    )
    found = against_oracle(
        *functions, sunk(mechanism, Shape(queries=queries, keys=150)), torch.float32
    )
    if visible == "all padding":
        assert not any(x.any() for name, x in found.items() if "memory" not in name)


@every
@each_impl
def test_gradients_by_finite_differences(mechanism, impl):
    shape = Shape(batch=2, heads=2, key_heads=1, queries=9, keys=12, dim=3)
    tensors = sunk(mechanism, shape)
    names = list(tensors)

    def function(*values):
        return run_by(mechanism, impl, ragged(12)[0])(dict(zip(names, values, strict=True)))

    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.identity], ids=str)
@each_impl
@pytest.mark.parametrize("causal", [True, False])
def test_identity_parameters_are_the_attention_of_a_family(mechanism, impl, causal):
    """As GPT-OSS computes it: one more column, dropped after the softmax."""
    if not causal and "selective" in mechanism.name:
        return
    tensors = mechanism.identity(sunk(mechanism, Shape().long(130)))
    q, k, v, sinks = (tensors[name] for name in ("q", "k", "v", "sinks"))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    logits = q @ k.mT * 16**-0.5
    if causal:
        logits = logits.masked_fill(torch.ones(130, 130).triu(1).bool(), float("-inf"))
    column = sinks[None, :, None, None].expand(2, 4, 130, 1)
    expected = torch.cat([logits, column], -1).softmax(-1)[..., :-1] @ v
    found = run_by(mechanism, impl, Visibility(causal=causal))(tensors)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@every
@each_impl
def test_none_is_nothing_and_a_low_sink_nearly(mechanism, impl):
    tensors = mechanism.draw(Shape().long(100))
    without = with_grads(lambda x: mechanism.run(x, impl), tensors)
    none = with_grads(run_by(mechanism, impl, sinks=None), tensors)
    low = torch.full((tensors["q"].shape[1],), -60.0, dtype=torch.float64)
    nearly = with_grads(run_by(mechanism, impl, sinks=low), tensors)
    for name, x in without.items():
        assert torch.equal(none[name], x)
        torch.testing.assert_close(nearly[name], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if "selective" in m.name], ids=str)
@each_impl
def test_a_sink_scales_its_own_head_alone(mechanism, impl):
    """And no more: what is selected stays as it was."""
    tensors = sunk(mechanism, Shape().long(40))
    before = run_by(mechanism, impl)(tensors)
    tensors["sinks"][2] += 1
    after = run_by(mechanism, impl)(tensors)
    less = after[0][:, 2] / before[0][:, 2]
    assert bool(((less > 0) & (less < 1)).all())
    torch.testing.assert_close(less, less[..., :1].expand_as(less))  # one factor per row
    others = [0, 1, 3]
    assert torch.equal(after[0][:, others], before[0][:, others])
    assert all(torch.equal(x, y) for x, y in zip(after[1:], before[1:], strict=True))


@each_impl
def test_what_is_hidden_from_is_not_the_sink(impl):
    """F takes weight from tokens; the sink keeps its logit."""
    mechanism = next(m for m in MECHANISMS if m.name == "selective")
    tensors = sunk(mechanism, Shape().long(30))
    state = torch.full((2, 1, 30), 200.0, dtype=torch.float64)
    out = selective_attention(**tensors, state=state, impl=impl).output
    assert out.abs().max() < 1e-60


@every
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_err_no_more_than_their_definition(mechanism, queries, dtype):
    given = cast(sunk(mechanism, Shape(queries=queries, keys=61)), dtype)
    with torch.no_grad():
        found, plain = (run_by(mechanism, impl)(given) for impl in ("tiled", "reference"))
        exact = run_by(mechanism, "reference")({n: x.double() for n, x in given.items()})
    for i, (x, y, z) in enumerate(zip(found, plain, exact, strict=True)):
        assert_matches_oracle(f"output {i}", x, y, z, 61)


@every
def test_fused_is_refused_and_auto_takes_tiled(mechanism, interpreted):
    tensors = {n: x.float() for n, x in sunk(mechanism, Shape(dim=16)).items()}
    with pytest.raises(ValueError, match=r"impl='fused' cannot .* have no sinks"):
        run_by(mechanism, "fused")(tensors)
    found = (run_by(mechanism, impl)(tensors) for impl in ("auto", "tiled"))
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


WRONG = {
    r"sinks must be \[\d\], got \(\d, 1\)": lambda x: x[:, None],
    r"sinks must be \[\d\], got \(1,\)": lambda x: x[:1],
    "sinks must be finite, got NaN or infinity": lambda x: x - torch.inf,
    "sinks must be a floating-point tensor .* got torch.int32": lambda x: x.int(),
    r"sinks must be a tensor \[H\] \(one logit per query head\), got 0.5": lambda x: 0.5,
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize(
    "mechanism",
    [m for m in MECHANISMS if m.name in ("mta-full", "selective", "differential")],
    ids=str,
)
def test_what_are_no_sinks(mechanism, message):
    tensors = sunk(mechanism, Shape())
    with pytest.raises(ValueError, match=message):
        run_by(mechanism, "auto")(tensors | {"sinks": WRONG[message](tensors["sinks"])})
