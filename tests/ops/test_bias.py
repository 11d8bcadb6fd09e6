"""An additive bias on the logits that enter the softmax: the laws of every mechanism with it."""

from collections.abc import Callable

import pytest
import torch
from mechanisms import MECHANISMS, TWO_SIDED, VISIBILITIES, Mechanism, Shape, ragged
from oracle import against_oracle, cast, with_grads
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Visibility, selective_attention
from heedful.testing import assert_matches_oracle, peak_memory_mib

every = pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled"))
ENCODING = [*TWO_SIDED, *(m for m in MECHANISMS if "selective" not in m.name)]
SIZES = pytest.mark.parametrize("spread", ["one for all", "per head", "per row", "each its own"])


def biased(mechanism: Mechanism, shape: Shape, spread: str = "per head") -> dict[str, Tensor]:
    """The mechanism's tensors and a bias."""
    tensors = mechanism.draw(shape)
    rows = shape.batch if spread in ("per row", "each its own") else 1
    heads = tensors["q"].shape[1] if spread in ("per head", "each its own") else 1
    bias = 2 * torch.randn(rows, heads, shape.queries, shape.keys, dtype=torch.float64)
    return tensors | {"bias": bias}


def run_by(mechanism: Mechanism, impl: str, visibility: Visibility | None = None) -> Callable:
    return lambda x: mechanism.run(x, impl, visibility)


@every
@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(mechanism, spread, dtype):
    """Forward and every gradient, that of the bias with them."""
    functions = (run_by(mechanism, impl) for impl in ("tiled", "reference"))
    against_oracle(*functions, biased(mechanism, Shape().long(111), spread), dtype)


@pytest.mark.crossed
@every
@pytest.mark.parametrize("queries", [150, 70])
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" not in name])
def test_visibilities_and_cross_lengths(mechanism, visible, queries):
    functions = (
        run_by(mechanism, impl, VISIBILITIES[visible](150)) for impl in ("tiled", "reference")
    )
    tensors = biased(mechanism, Shape(queries=queries, keys=150))
    found = against_oracle(*functions, tensors, torch.float32)
    hidden = ~VISIBILITIES[visible](150).dense(queries, 150, torch.device("cpu"))
    assert not bool((found["grad bias"] * hidden.all(0)).any()), "what nobody sees has no gradient"


@pytest.mark.parametrize("mechanism", ENCODING, ids=str)
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "both" in name])
def test_non_causal(mechanism, visible):
    functions = (
        run_by(mechanism, impl, VISIBILITIES[visible](130)) for impl in ("tiled", "reference")
    )
    against_oracle(*functions, biased(mechanism, Shape().long(130)), torch.float32)


@every
@each_impl
def test_gradients_by_finite_differences(mechanism, impl):
    tensors = biased(mechanism, Shape(batch=2, heads=2, key_heads=1, queries=9, keys=12, dim=3))
    names = list(tensors)

    def function(*values):
        return mechanism.run(dict(zip(names, values, strict=True)), impl, ragged(12)[0])

    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@every
@each_impl
def test_a_bias_of_zeros_is_none(mechanism, impl):
    """With all gradients; that of the bias is not zero for it."""
    tensors = biased(mechanism, Shape().long(100))
    tensors["bias"].zero_()
    found = with_grads(run_by(mechanism, impl), tensors)
    del tensors["bias"]
    without = with_grads(run_by(mechanism, impl), tensors)
    for name, x in without.items():
        torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)
    assert bool(found["grad bias"].any())


@every
@each_impl
def test_one_number_for_all_keys_of_a_query_changes_nothing(mechanism, impl):
    tensors = biased(mechanism, Shape().long(70))
    without = mechanism.run({n: x for n, x in tensors.items() if n != "bias"}, impl)[0]
    tensors["bias"] = torch.randn(1, 1, 70, 1, dtype=torch.float64).expand(1, 1, 70, 70)
    torch.testing.assert_close(mechanism.run(tensors, impl)[0], without, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mechanism", [m for m in MECHANISMS if m.identity], ids=str)
@each_impl
@pytest.mark.parametrize("causal", [True, False])
def test_identity_parameters_are_standard_attention_with_a_mask(mechanism, impl, causal):
    """To the last bit in the tiled form, which calls torch's kernel, unless memory is asked for."""
    if not causal and "selective" in mechanism.name:
        return
    tensors = mechanism.identity(biased(mechanism, Shape().long(130)))
    visibility = Visibility(causal=causal)
    mask = tensors["bias"].masked_fill(~visibility.dense(130, 130, "cpu"), float("-inf"))
    q, k, v = (tensors[name] for name in "qkv")
    expected = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    found = mechanism.run(tensors, impl, visibility)[0]
    exactly = impl == "tiled" and mechanism.name != "selective-own"
    torch.testing.assert_close(found, expected, rtol=0, atol=0 if exactly else 1e-12)


@every
@each_impl
def test_a_bias_reaches_its_query_and_later_ones_only(mechanism, impl):
    """Rows of the bias are queries: one that changes moves no earlier output by a bit."""
    tensors = {n: x.float() for n, x in biased(mechanism, Shape().long(70)).items()}
    before = mechanism.run(tensors, impl)[0]
    for t in (0, 1, 33, 63, 64, 69):
        changed = tensors | {"bias": tensors["bias"].clone()}
        changed["bias"][:, :, t, : t // 2 + 1] += 1
        after = mechanism.run(changed, impl)[0]
        assert torch.equal(after[:, :, :t], before[:, :, :t])
        assert t == 0 or not torch.equal(after[:, :, t], before[:, :, t])
        changed["bias"] = tensors["bias"].clone()
        changed["bias"][:, :, t, t + 1 :] += 1
        assert torch.equal(mechanism.run(changed, impl)[0], before), "a key that nobody sees yet"


@every
@SIZES
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_rows_err_no_more_than_their_definition(mechanism, spread, queries, dtype):
    given = cast(biased(mechanism, Shape(queries=queries, keys=61), spread), dtype)
    with torch.no_grad():
        found, plain = (mechanism.run(given, impl) for impl in ("tiled", "reference"))
        exact = mechanism.run({n: x.double() for n, x in given.items()}, "reference")
    for i, (x, y, z) in enumerate(zip(found, plain, exact, strict=True)):
        assert_matches_oracle(f"output {i}", x, y, z, 61)


def test_what_selects_does_not_see_the_bias():
    mechanism = next(m for m in MECHANISMS if m.name == "selective")
    tensors = biased(mechanism, Shape().long(40))
    with_bias = selective_attention(**tensors).state
    del tensors["bias"]
    assert torch.equal(with_bias, selective_attention(**tensors).state)


@every
def test_fused_is_refused_and_auto_takes_tiled(mechanism, interpreted):
    tensors = {n: x.float() for n, x in biased(mechanism, Shape(dim=16)).items()}
    with pytest.raises(ValueError, match=r"impl='fused' cannot .* kernels add no bias"):
        mechanism.run(tensors, "fused")
    for x, y in zip(*(mechanism.run(tensors, impl) for impl in ("auto", "tiled")), strict=True):
        assert torch.equal(x, y)


WRONG = {
    "Tq": (lambda x: x[:, :, 1:], r"bias must be \[1 or 2, 1 or \d, 17, 17\] .*\(1, 4, 16, 17\)"),
    "dims": (lambda x: x[0], r"bias must be \[1 or 2, .* got \(4, 17, 17\)"),
    "mask": (lambda x: x > 0, r"bias must be a floating-point tensor .* belongs in visibility"),
    "inf": (lambda x: x - torch.inf, "bias must be finite, .* hide tokens with visibility"),
    "no tensor": (lambda x: 0.5, r"bias must be a tensor \[1 or B, 1 or H, Tq, Tk\], got 0.5"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "mechanism", [m for m in MECHANISMS if m.name in ("mta-full", "selective")], ids=str
)
def test_what_is_no_bias(mechanism, wrong):
    change, message = WRONG[wrong]
    tensors = biased(mechanism, Shape())
    with pytest.raises(ValueError, match=message):
        mechanism.run(tensors | {"bias": change(tensors["bias"])}, "auto")


PROGRAM = """
import torch
from heedful.ops import *
T = 2048
q, k, v = (torch.randn(1, 8, T, 32, requires_grad=True) for _ in range(3))
c = torch.randn(8, 6, 11)
b = torch.randn(1, 1, T, T, requires_grad=True)
def run(n=T):
    x, y, z = (t[:, :, :n] for t in (q, k, v))
    given = {{"bias": b[:, :, :n, :n]}} if {bias} else {{}}
    out = {call}
    out.sum().backward()
run(70)
for t in (q, k, v, b):
    t.grad = None
"""
CALLS = {
    "mta": "multi_token_attention(x, y, z, conv=c, **given)",
    "selective": "selective_attention(x, y, z, **given).output",
    "differential": "differential_attention(x, y, torch.cat([z[:, ::2], z[:, 1::2]], -1), "
    "lam=torch.tensor(0.5), **given)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_memory_beside_that_of_the_bias_and_its_gradient(name):
    """A map of all heads would take 128 MiB, the bias takes 16; autograd holds two at a time."""
    plain, more = (peak_memory_mib(PROGRAM.format(call=CALLS[name], bias=b)) for b in (False, True))
    assert more - plain < 3 * 16 + 8, (plain, more)
