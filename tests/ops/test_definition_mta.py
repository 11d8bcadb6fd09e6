"""Multi-token attention against its definition by explicit loops (arXiv 2504.00927, eq. 5-7)."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, scaled_dot_product_attention

from heedful.ops import Visibility, multi_token_attention
from heedful.testing import assert_causal
from helpers.loops import capped, cases, dot, grid, sight, softmax, weighted
from helpers.oracle import EXACT, draw

each_impl = pytest.mark.parametrize("impl", ["reference", "tiled", "composed"])


def by_loops(
    q, k, v, *, conv, post_conv, mix, post_mix, visibility, bias=None, softcap=None, sinks=None
) -> Tensor:
    """Every entry of every step by itself."""
    batch, heads, queries, dim = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    sees = sight(visibility, queries, keys)
    documents = None if visibility is None else visibility.documents

    def same_document(b: int, i: int, other: int) -> bool:
        if documents is None:
            return True
        own = documents[b % len(documents), keys - queries :]
        return bool(own[i] == own[other])

    def convolved(x: list, kernel: Tensor | None) -> list:
        if kernel is None:
            return x
        weights, (rows, columns) = kernel.tolist(), kernel.shape[1:]
        y = grid(batch, heads, queries, keys)
        for b, h, i, j in places:
            for r in range(rows):
                for c in range(columns):
                    i2, j2 = i - (rows - 1) + r, j - (columns - 1) // 2 + c
                    if i2 < 0 or not 0 <= j2 < keys or not same_document(b, i, i2):
                        continue
                    y[b][h][i][j] += weights[h][r][c] * x[b][h][i2][j2]
        return y

    def mixed(x: list, weights: Tensor | None) -> list:
        if weights is None:
            return x
        w, size = weights.tolist(), weights.shape[1]
        y = grid(batch, heads, queries, keys)
        for b, h, i, j in places:
            first = h // size * size
            for m in range(size):
                y[b][h][i][j] += w[h // size][h - first][m] * x[b][first + m][i][j]
        return y

    def zero_where_unseen(x: list) -> list:
        for b, h, i, j in places:
            if not sees(b, i, j):
                x[b][h][i][j] = 0.0
        return x

    places = [
        (b, h, i, j)
        for b in range(batch)
        for h in range(heads)
        for i in range(queries)
        for j in range(keys)
    ]
    ql, kl = q.tolist(), k.tolist()
    x = grid(batch, heads, queries, keys)
    for b, h, i, j in places:
        x[b][h][i][j] = dot(ql[b][h][i], kl[b][h // group][j]) / dim**0.5
    x = mixed(convolved(zero_where_unseen(x), conv), mix)
    for b, h, i, j in places:
        x[b][h][i][j] = capped(x[b][h][i][j], softcap)
    if bias is not None:
        more = bias.expand(batch, heads, queries, keys).tolist()
        for b, h, i, j in places:
            x[b][h][i][j] += more[b][h][i][j]
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                logits = [x[b][h][i][j] if sees(b, i, j) else None for j in range(keys)]
                x[b][h][i] = softmax(logits, None if sinks is None else sinks[h].item())
    x = mixed(zero_where_unseen(convolved(x, post_conv)), post_mix)
    return weighted(x, v.tolist(), group)


def check(
    queries: int, keys: int, visibility: Visibility | None, sizes: dict, **terms: object
) -> None:
    """`terms`: what else is added to the logits."""
    q, k, v = draw(2, 4, queries, 3), draw(2, 2, keys, 3), draw(2, 2, keys, 5)
    parameters = {name: None if size is None else draw(*size) for name, size in sizes.items()}
    parameters |= terms
    expected = by_loops(q, k, v, **parameters, visibility=visibility)
    for impl in ("reference", "tiled"):
        actual = multi_token_attention(q, k, v, **parameters, visibility=visibility, impl=impl)
        torch.testing.assert_close(actual, expected, **EXACT)


NOTHING = {"conv": None, "post_conv": None, "mix": None, "post_mix": None}
ALL = {"conv": (4, 3, 5), "post_conv": (4, 2, 3), "mix": (1, 4, 4), "post_mix": (2, 2, 2)}


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_a_bias_is_added_right_before_the_softmax(rows, heads):
    visibility = cases(9)["both in a window"]
    check(9, 9, visibility, ALL, bias=draw(rows, heads, 9, 9))


@pytest.mark.parametrize("queries", [9, 4, 1])
def test_logits_are_capped_before_the_bias_and_sinks_are_not(queries):
    visibility = cases(9)["both in a window"]
    terms = {"bias": draw(1, 4, queries, 9), "softcap": 0.7, "sinks": draw(4)}
    check(queries, 9, visibility, ALL, **terms)


@pytest.mark.parametrize("tokens", [1, 2, 5, 13])
def test_the_published_kernel_at_every_length(tokens):
    sizes = ALL | {"conv": (4, 6, 11), "post_conv": (4, 6, 11)}
    check(tokens, tokens, None, sizes)


@pytest.mark.parametrize("step", ALL)
def test_each_step_alone(step):
    check(7, 7, None, NOTHING | {step: ALL[step]})


@pytest.mark.parametrize("kind", cases(11))
@pytest.mark.parametrize("queries", [11, 6, 1])
def test_visibility_and_cross_lengths(kind, queries):
    check(queries, 11, cases(11)[kind], ALL)


def test_without_causal_order():
    check(6, 6, Visibility(causal=False), ALL)


def attention_map(impl: str, q: Tensor, k: Tensor, **steps) -> Tensor:
    """The map itself: values that are unit vectors."""
    unit = torch.eye(k.shape[2], dtype=q.dtype).expand(*k.shape[:2], -1, -1)
    return multi_token_attention(q, k, unit, impl=impl, **steps)


@each_impl
def test_a_neighbour_is_masked_in_its_own_row_not_in_the_current_one(impl):
    tokens, rows, half = 24, 3, 2
    q, k = draw(1, 1, tokens, 4), draw(1, 1, tokens, 4)
    kernel = draw(1, rows, 2 * half + 1)
    scores = (q @ k.mT)[0, 0] / 2

    def convolved(i: int, j: int, own_row: bool) -> float:
        total = 0.0
        for r in range(rows):
            for c in range(2 * half + 1):
                i2, j2 = i - rows + 1 + r, j - half + c
                if i2 >= 0 and 0 <= j2 <= (i2 if own_row else i):
                    total += kernel[0, r, c].item() * scores[i2, j2].item()
        return total

    weights = attention_map(impl, q, k, conv=kernel)[0, 0]
    band = rows - 1 + half  # from this distance on nothing is masked
    for i in range(band + 1, tokens):
        # Logits are known up to a constant of the row: take them relative to the first key.
        actual = (weights[i, : i + 1] / weights[i, 0]).log()
        masked = torch.tensor([convolved(i, j, True) for j in range(i + 1)], dtype=torch.float64)
        unmasked = torch.tensor([convolved(i, j, False) for j in range(i + 1)], dtype=torch.float64)
        torch.testing.assert_close(actual, masked - masked[0], **EXACT)
        near = torch.arange(i + 1) > i - band
        assert bool(((masked - unmasked).abs()[near] > 1e-4).all()), "the equations must differ"
        torch.testing.assert_close(masked[~near], unmasked[~near], **EXACT)


@each_impl
def test_a_single_one_in_the_kernel_shifts_the_map(impl):
    tokens, rows, columns = 9, 3, 5
    q, k = draw(1, 1, tokens, 4), draw(1, 1, tokens, 4)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = (q @ k.mT)[0, 0] / 2
    plain = scores.masked_fill(~visible, float("-inf")).softmax(-1)

    def shifted(x: Tensor, r: int, c: int) -> Tensor:
        y = torch.zeros_like(x)
        for i in range(tokens):
            for j in range(tokens):
                i2, j2 = i - (rows - 1) + r, j - (columns - 1) // 2 + c
                if i2 >= 0 and 0 <= j2 <= i2:
                    y[i, j] = x[i2, j2]
        return y

    for r in range(rows):
        for c in range(columns):
            kernel = torch.zeros(1, rows, columns, dtype=torch.float64)
            kernel[0, r, c] = 1
            logits = shifted(scores, r, c).masked_fill(~visible, float("-inf"))
            pre = attention_map(impl, q, k, conv=kernel)[0, 0]
            torch.testing.assert_close(pre, logits.softmax(-1), **EXACT)
            post = attention_map(impl, q, k, post_conv=kernel)[0, 0]
            torch.testing.assert_close(post, shifted(plain, r, c) * visible, **EXACT)


@each_impl
def test_mixing_is_indexed_group_out_in(impl):
    q, k = draw(1, 4, 8, 3), draw(1, 4, 8, 3)
    plain = attention_map(impl, q, k)[0]
    uniform = attention_map(impl, torch.zeros_like(q), k)[0, 0]
    weights = torch.zeros(2, 2, 2, dtype=torch.float64)
    weights[0, 0, 1] = 1  # head 0 takes from head 1
    weights[1, 1, 0] = 3  # head 3 takes three times head 2

    post = attention_map(impl, q, k, post_mix=weights)[0]
    expected = torch.stack([plain[1], 0 * plain[0], 0 * plain[0], 3 * plain[2]])
    torch.testing.assert_close(post, expected, **EXACT)

    pre = attention_map(impl, q, k, mix=weights)[0]
    sharper = attention_map(impl, 3 * q, k)[0, 2]
    expected = torch.stack([plain[1], uniform, uniform, sharper])
    torch.testing.assert_close(pre, expected, **EXACT)


@each_impl
@pytest.mark.parametrize("factor", [2.0, -1.0])
def test_rows_are_not_renormalised_after_the_softmax(impl, factor):
    q, k, v = draw(2, 3, 9, 4), draw(2, 3, 9, 4), draw(2, 3, 9, 4)
    kernel = torch.zeros(3, 2, 3, dtype=torch.float64)
    kernel[:, -1, 1] = factor
    actual = multi_token_attention(q, k, v, post_conv=kernel, impl=impl)
    standard = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(actual, factor * standard, **EXACT)


def test_half_precision_rounds_the_scores_and_the_probabilities_but_not_the_softmax():
    q, k, v = (draw(1, 2, 40, 16).bfloat16() for _ in range(3))
    visible = torch.ones(40, 40, dtype=torch.bool).tril()
    scores = (q @ k.mT * 0.25).float().masked_fill(~visible, float("-inf"))
    expected = scores.softmax(-1).bfloat16() @ v
    assert torch.equal(multi_token_attention(q, k, v, impl="reference"), expected)


@each_impl
def test_sums_over_many_tokens_do_not_stall_in_half_precision(impl):
    """A running total in bfloat16 would stop at 256 and give values of 8 instead of 1."""
    tokens = 2000
    q = torch.zeros(1, 1, 4, 16, dtype=torch.bfloat16)
    k, v = (torch.ones(1, 1, tokens, 16, dtype=torch.bfloat16) for _ in range(2))
    kernel = torch.zeros(1, 2, 3)
    kernel[:, -1, 1] = 1
    out = multi_token_attention(q, k, v, conv=kernel, post_conv=kernel, impl=impl)
    ulp = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=ulp)


def test_symmetric_query_padding_would_be_caught_as_a_leak():
    """The mistake of a 3x3 convolution with padding 1 on both axes, which reads later queries."""
    kernel = draw(1, 1, 3, 3)
    visible = torch.ones(8, 8, dtype=torch.bool).tril()

    def symmetric(x: Tensor) -> Tensor:
        p = (x @ x.mT).masked_fill(~visible, float("-inf")).softmax(-1)
        return conv2d(p, kernel, padding=1).masked_fill(~visible, 0) @ x

    def ours(x: Tensor) -> Tensor:
        return multi_token_attention(x, x, x, post_conv=kernel[0], impl="reference")

    x = draw(1, 1, 8, 4)
    assert_causal(ours, x, dim=2)
    with pytest.raises(AssertionError, match="changed the output of token 0: a leak"):
        assert_causal(symmetric, x, dim=2)
