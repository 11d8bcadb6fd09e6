"""The wide form of the convolution before the softmax equals its definition, in fp64."""

import pytest
import torch
from torch import Tensor

from heedful.ops import Visibility, multi_token_attention
from heedful.ops.common.tiles import Sight
from heedful.ops.mta.reference import correlate
from heedful.ops.mta.wide import (
    band_logits,
    band_of,
    flash_attention,
    low_rank,
    wide_keys,
    wide_queries,
)
from helpers.mechanisms import ragged
from helpers.oracle import draw

EXACT = {"rtol": 1e-12, "atol": 1e-12}
KERNELS = [(3, 5), (6, 11), (1, 1), (8, 15), (1, 5), (4, 1)]


def hole(keys: int) -> Visibility:
    """Padding in the middle of one document: the convolution reaches across it."""
    padding = torch.ones(2, keys, dtype=torch.bool)
    padding[0, keys // 3 : keys // 3 + 2] = False
    return Visibility(padding=padding)


VISIBILITIES = {
    "causal": lambda keys: Visibility(),
    "not causal": lambda keys: Visibility(causal=False),
    "window 1": lambda keys: Visibility(window=1),
    "window 4": lambda keys: Visibility(window=4),
    "window 12": lambda keys: Visibility(window=12),
    "window 40": lambda keys: Visibility(window=40),
    "ragged": lambda keys: ragged(keys)[0],
    "hole": hole,
    "one row of documents": lambda keys: Visibility(documents=ragged(keys)[1][:1], window=14),
    "documents, not causal": lambda keys: Visibility(causal=False, documents=ragged(keys)[1]),
}


def sight_of(visibility: Visibility) -> Sight:
    documents = visibility.documents is not None
    return Sight(visibility.segments(), documents, visibility.causal, visibility.window)


def wide_form(q: Tensor, k: Tensor, conv: Tensor, left: Tensor, right: Tensor, sight: Sight):
    """The convolved logits, dense: the wide product, with the band written over it."""
    queries, keys = q.shape[2], k.shape[2]
    logits = torch.einsum(
        "bhrid,bhrjd->bhij", wide_queries(q, left, sight), wide_keys(k, right, sight)
    )
    logits = logits * 0.3
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    band = band_logits(q, k, conv, sight, 0.3)
    for n, d in enumerate(band_of(*conv.shape[1:], sight).logits):
        logits = torch.where(distance == d, band[..., n, None], logits)
    return logits


def definition(q: Tensor, k: Tensor, conv: Tensor, visibility: Visibility) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    visible = visibility.dense(queries, keys, q.device)[:, None]
    documents = visibility.documents
    documents = None if documents is None else documents[:, keys - queries :]
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * 0.3
    return correlate(scores.masked_fill(~visible, 0), conv, documents)


def by_rows(conv: Tensor) -> tuple[Tensor, Tensor]:
    """One part per kernel row: queries shifted, keys filtered."""
    heads, rows, _ = conv.shape
    return torch.eye(rows, dtype=conv.dtype).expand(heads, -1, -1), conv.flip(1)


def by_rank(conv: Tensor) -> tuple[Tensor, Tensor]:
    u, s, v = torch.linalg.svd(conv.flip(1), full_matrices=False)
    return (u * s[:, None]).mT, v


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("visible", VISIBILITIES)
def test_wide_form_is_the_convolution(kernel, visible):
    for queries, keys in ((70, 70), (33, 70), (1, 70), (70, 71), (1, 1), (3, 3), (2, 40)):
        visibility = VISIBILITIES[visible](keys)
        q, k, conv = draw(2, 4, queries, 3), draw(2, 2, keys, 3), draw(4, *kernel)
        mask = visibility.dense(queries, keys, q.device)[:, None]
        expected = definition(q, k, conv, visibility).masked_fill(~mask, 0)
        for factors in (by_rows, by_rank):
            result = wide_form(q, k, conv, *factors(conv), sight_of(visibility))
            torch.testing.assert_close(result.masked_fill(~mask, 0), expected, **EXACT)


@pytest.mark.parametrize("visible", VISIBILITIES)
def test_its_gradients_are_those_of_the_convolution(visible):
    visibility = VISIBILITIES[visible](40)
    leaves = [draw(2, 4, 37, 3), draw(2, 2, 40, 3), draw(4, 3, 5)]
    leaves = [x.requires_grad_() for x in leaves]
    weight = draw(2, 4, 37, 40) * visibility.dense(37, 40, leaves[0].device)[:, None]
    q, k, conv = leaves
    expected = torch.autograd.grad((definition(q, k, conv, visibility) * weight).sum(), leaves)
    result = wide_form(q, k, conv, *by_rows(conv), sight_of(visibility))
    actual = torch.autograd.grad((result * weight).sum(), leaves)
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, **EXACT)


def test_the_identity_is_as_narrow_as_standard_attention():
    sight = Sight(None, False, True, None)
    conv = torch.zeros(2, 6, 11, dtype=torch.float64)
    conv[:, -1, 5] = 1
    left, right = (x[:, :1] for x in by_rows(conv))
    q, k = draw(1, 2, 50, 3), draw(1, 1, 50, 3)
    expected = definition(q, k, conv, Visibility()).tril()
    result = wide_form(q, k, conv, left, right, sight)
    torch.testing.assert_close(result.tril(), expected, **EXACT)
    assert band_of(1, 1, sight).width == 0


@pytest.mark.parametrize("kernel", [*KERNELS, (3, 129)], ids=str)
def test_rank_one_by_the_flash_kernel_is_the_definition(kernel):
    for tokens in (64, 70, 96):
        q, k, v = draw(2, 4, tokens, 3), draw(2, 4, tokens, 3), draw(2, 4, tokens, 3)
        conv = draw(4, kernel[0], 1) @ draw(4, 1, kernel[1])
        sight = sight_of(Visibility())
        result = flash_attention(low_rank(q, k, conv, sight, 0.3), v, sight)
        if band_of(*kernel, sight).width >= tokens:
            assert result is None
            continue
        expected = multi_token_attention(q, k, v, conv=conv, scale=0.3, impl="reference")
        torch.testing.assert_close(result, expected, **EXACT)


@pytest.mark.parametrize("two_sided", [False, True])
def test_rank_one_without_causal_order_by_the_flash_kernel(two_sided):
    """Also with fewer queries than keys, and with later queries in the kernel's reach."""
    sight = sight_of(Visibility(causal=False))
    for queries in (70, 66):
        q, k, v = draw(2, 4, queries, 3), draw(2, 4, 70, 3), draw(2, 4, 70, 3)
        conv = draw(4, 5, 1) @ draw(4, 1, 3)
        result = flash_attention(low_rank(q, k, conv, sight, 0.3, two_sided), v, sight)
        options = {"visibility": Visibility(causal=False), "two_sided": two_sided}
        expected = multi_token_attention(q, k, v, conv=conv, scale=0.3, impl="reference", **options)
        torch.testing.assert_close(result, expected, **EXACT)


def test_flash_is_left_where_torch_has_no_such_kernel():
    q, k, v, conv = draw(1, 2, 70, 4), draw(1, 2, 70, 4), draw(1, 2, 70, 4), draw(2, 1, 1)
    plain = sight_of(Visibility())
    cases = {
        "a wider value": (q, v.repeat(1, 1, 1, 2), plain),
        "fewer queries": (q[:, :, 3:], v, plain),
        "a window": (q, v, plain._replace(window=9)),
        "documents": (q, v, sight_of(Visibility(documents=ragged(70)[1][:1]))),
    }
    assert flash_attention(low_rank(q, k, conv, plain, 1.0), v, plain) is not None
    for name, (some, values, sight) in cases.items():
        assert flash_attention(low_rank(some, k, conv, sight, 1.0), values, sight) is None, name


def test_nothing_of_the_future_is_in_the_band():
    """Bit for bit, also where the future is not a number."""
    sight = Sight(None, False, True, None)
    q, k, conv = draw(1, 2, 50, 3), draw(1, 1, 50, 3), draw(2, 6, 11)
    before = band_logits(q, k, conv, sight, 1.0)
    changed = k.clone()
    changed[:, :, 30:] += 100
    after = band_logits(q, changed, conv, sight, 1.0)
    assert torch.equal(after[:, :, :30], before[:, :, :30])
    assert not torch.equal(after[:, :, 30:], before[:, :, 30:])
