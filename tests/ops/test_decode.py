"""A few queries against many keys, as cached decoding asks: the same laws, and nothing copied."""

import pytest
import torch

from heedful.ops import Visibility, multi_token_attention
from heedful.ops.common.few import FEW
from heedful.ops.common.terms import Terms
from heedful.ops.mta.convolution import Parameters
from heedful.ops.mta.decode import multi_token_attention_few
from heedful.testing import assert_matches_oracle
from helpers.mechanisms import MECHANISMS, Shape
from helpers.oracle import cast

KEYS = 61
PADDING = torch.ones(2, KEYS, dtype=torch.bool)
PADDING[1, :7] = False
VISIBILITIES = {
    "causal": None,
    "all": Visibility(causal=False),
    "window": Visibility(window=9),
    "padding": Visibility(padding=PADDING),
    "last documents": Visibility(documents=(torch.arange(KEYS) > KEYS - 4).long()[None]),
    "kept keys": Visibility(positions=2 * torch.arange(KEYS)[None], padding=PADDING),
    "a row that sees nothing": Visibility(padding=(torch.arange(KEYS) < KEYS - 1)[None]),
}


def defined(mechanism, kind: str) -> bool:
    """Selective attention is causal, and neighbours of kept keys are nobody's."""
    convolves = any(name.endswith("conv") for name in mechanism.draw(Shape()))
    return not (mechanism.name.startswith("selective") and kind == "all") and not (
        convolves and kind == "kept keys"
    )


CASES = [(m, kind) for m in MECHANISMS for kind in VISIBILITIES if defined(m, kind)]


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("queries", [1, 5, FEW])
@pytest.mark.parametrize(("mechanism", "kind"), CASES, ids=lambda x: str(x))
def test_few_rows_err_no_more_than_their_definition(mechanism, kind, queries, key_heads, dtype):
    tensors = mechanism.draw(Shape(key_heads=key_heads, queries=queries, keys=KEYS))
    inputs = cast(tensors, dtype)
    with torch.no_grad():
        actual = mechanism.run(inputs, "tiled", VISIBILITIES[kind])
        plain = mechanism.run(inputs, "reference", VISIBILITIES[kind])
        exact = mechanism.run(
            {n: x.double() for n, x in inputs.items()}, "reference", VISIBILITIES[kind]
        )
    for i, (x, y, z) in enumerate(zip(actual, plain, exact, strict=True)):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert_matches_oracle(f"output {i}", x, y, z, KEYS)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_gradients_take_the_form_that_has_them(mechanism):
    """And give the same outputs."""
    tensors = mechanism.draw(Shape(queries=3, keys=KEYS))
    with torch.no_grad():
        few = mechanism.run(tensors, "tiled")
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    actual = mechanism.run(leaves, "tiled")
    for x, y in zip(actual, few, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(actual[0].sum(), list(leaves.values()), allow_unused=True)
    expected = mechanism.run(
        again := {name: x.clone().requires_grad_() for name, x in tensors.items()}, "reference"
    )
    exact = torch.autograd.grad(expected[0].sum(), list(again.values()), allow_unused=True)
    for x, y in zip(grads, exact, strict=True):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_keys_in_a_larger_tensor_give_the_same_bits(mechanism):
    """As a cache hands them over, with room behind them; and none of it is read."""
    tensors = mechanism.draw(Shape(queries=2, keys=KEYS))
    roomy = {}
    for name, x in tensors.items():
        roomy[name] = x
        if name in ("k", "v"):
            larger = torch.full((*x.shape[:2], 2 * KEYS, x.shape[3]), float("nan")).double()
            larger[:, :, 5 : 5 + KEYS] = x
            roomy[name] = larger[:, :, 5 : 5 + KEYS]
    with torch.no_grad():
        for x, y in zip(
            mechanism.run(roomy, "tiled"), mechanism.run(tensors, "tiled"), strict=True
        ):
            assert torch.equal(x, y)


@pytest.mark.crossed
@pytest.mark.parametrize("queries", [1, 4, 7, 11, 15])
@pytest.mark.parametrize("kind", ["causal", "window", "padding", "last documents"])
@pytest.mark.parametrize("kernels", [(6, 6), (6, None), (None, 4), (None, None)], ids=str)
def test_rows_that_only_convolutions_read(kernels, kind, queries):
    """The newest rows' outputs are those of the definition, with and without all rows above."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k, v = draw(2, 4, queries, 8), draw(2, 2, KEYS, 8), draw(2, 2, KEYS, 8)
    conv, post_conv = (None if rows is None else draw(4, rows, 5) for rows in kernels)
    mix = draw(1, 4, 4), draw(2, 2, 2)
    visibility = VISIBILITIES[kind] or Visibility()
    whole = multi_token_attention(
        q, k, v, conv=conv, post_conv=post_conv, mix=mix[0], post_mix=mix[1],
        visibility=visibility, impl="reference",
    )  # fmt: skip
    for new in {1, min(3, queries)}:
        terms = Terms(visibility, q.shape[-1] ** -0.5)
        few = multi_token_attention_few(q, k, v, Parameters(conv, post_conv, *mix), terms, new=new)
        torch.testing.assert_close(few, whole[:, :, -new:], rtol=0, atol=1e-12)
