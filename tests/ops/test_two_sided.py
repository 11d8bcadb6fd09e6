"""Multi-token attention in an encoder: kernels centred over queries as over keys."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Visibility, multi_token_attention
from helpers.mechanisms import TWO_SIDED, Shape, ragged
from helpers.oracle import EXACT, draw

every = pytest.mark.parametrize("mechanism", TWO_SIDED, ids=str)
each_impl = pytest.mark.parametrize("impl", ("reference", "tiled"))


def test_the_definition_entry_by_entry():
    """One head, no scale: y[i, j] sums rows i - 1 to i + 2 - 1 and columns j - 2 to j + 2."""
    q, k, v = draw(1, 1, 7, 2), draw(1, 1, 7, 2), draw(1, 1, 7, 3)
    conv, post = draw(1, 3, 5), draw(1, 5, 1)
    z = q @ k.mT
    logits = torch.zeros(7, 7, dtype=torch.float64)
    for i in range(7):
        for j in range(7):
            for r in (-1, 0, 1):
                for c in (-2, -1, 0, 1, 2):
                    if 0 <= i + r < 7 and 0 <= j + c < 7:
                        logits[i, j] += conv[0, r + 1, c + 2] * z[0, 0, i + r, j + c]
    p, a = logits.softmax(-1), torch.zeros(7, 7, dtype=torch.float64)
    for i in range(7):
        for r in (-2, -1, 0, 1, 2):
            if 0 <= i + r < 7:
                a[i] += post[0, r + 2, 0] * p[i + r]
    for impl in ("reference", "tiled"):
        actual = multi_token_attention(
            q, k, v, conv=conv, post_conv=post, two_sided=True, scale=1.0, impl=impl,
            visibility=Visibility(causal=False),
        )  # fmt: skip
        torch.testing.assert_close(actual[0, 0], a @ v[0, 0], **EXACT)


@every
@each_impl
def test_gradients_by_finite_differences(mechanism, impl):
    tensors = mechanism.draw(Shape(batch=2, heads=2, key_heads=1, queries=12, keys=12, dim=3))
    names, (_, documents, padding) = list(tensors), ragged(12)
    visibility = Visibility(causal=False, documents=documents, padding=padding)

    def function(*values):
        return mechanism.run(dict(zip(names, values, strict=True)), impl, visibility)

    leaves = [x.requires_grad_() for x in tensors.values()]
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@every
@each_impl
def test_identity_parameters_are_standard_attention(mechanism, impl):
    """To the last bit in the tiled form, which calls torch's kernel."""
    x = mechanism.identity(mechanism.draw(Shape().long(130)))
    expected = scaled_dot_product_attention(x["q"], x["k"], x["v"], enable_gqa=True)
    exactly = {} if impl == "reference" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(mechanism.run(x, impl)[0], expected, **(exactly or EXACT))


@every
@each_impl
def test_a_row_read_backwards_gives_the_output_backwards(mechanism, impl):
    """With kernels turned round, too: nothing tells one side from the other."""
    x = mechanism.draw(Shape().long(130))
    turned = {n: t.flip(2) if n in mechanism.per_token else t for n, t in x.items()}
    turned |= {n: x[n].flip(1, 2) for n in ("conv", "post_conv") if n in x}
    expected = mechanism.run(x, impl)[0].flip(2)
    torch.testing.assert_close(mechanism.run(turned, impl)[0], expected, rtol=0, atol=1e-11)


@every
@each_impl
def test_documents_and_padded_rows_are_rows_alone(mechanism, impl):
    x = mechanism.draw(Shape().long(100))
    (_, documents, padding), per_token = ragged(100), mechanism.per_token
    visibility = Visibility(causal=False, documents=documents, padding=padding)
    actual = mechanism.run(x, impl, visibility)[0]
    for row in range(2):
        assert not bool(actual[row][:, ~padding[row]].any())
        for number in (0, 1):
            own = padding[row] & (documents[row] == number)
            alone = {n: t[row : row + 1, :, own] if n in per_token else t for n, t in x.items()}
            expected = mechanism.run(alone, impl)[0][0]
            torch.testing.assert_close(actual[row][:, own], expected, rtol=0, atol=1e-12)


def test_what_two_sided_refuses():
    q, kernel = torch.randn(1, 2, 9, 16), torch.randn(2, 3, 3)
    both = {"two_sided": True, "visibility": Visibility(causal=False)}
    with pytest.raises(ValueError, match=r"two_sided reads later queries, .* causal order forbids"):
        multi_token_attention(q, q, q, conv=kernel, two_sided=True)
    with pytest.raises(ValueError, match=r"post_conv must have an odd c_q .* got 2; add a row"):
        multi_token_attention(q, q, q, post_conv=kernel[:, 1:], **both)
    with pytest.raises(ValueError, match="two_sided must be True or False, got 1"):
        multi_token_attention(q, q, q, conv=kernel, two_sided=1)
