"""Calls of grouped attention: shapes, few queries, cost, biases, and what cannot be."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Queries, Summaries, Visibility, grouped_attention, summarise
from heedful.ops.grouped import (
    cif_groups,
    fixed_groups,
    sentence_groups,
    sliding_groups,
)
from heedful.ops.grouped import tiled as tiled_form
from heedful.ops.grouped.groups import NEVER
from heedful.ops.grouped.neighbourhood import score_pairs
from heedful.testing import assert_matches_oracle
from helpers.grouped_cases import (
    LONGEST,
    TOKENS,
    VISIBILITIES,
    attend,
    each_case,
    tensors,
)
from helpers.oracle import EXACT, assert_equal_in_fp64, draw

# Shapes, cost, and what cannot be.


@pytest.mark.crossed
@each_case
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
@pytest.mark.parametrize("visible", ["causal", "window 40", "ragged documents", "both ways"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_few_queries_are_rows_of_the_whole(case, asking, visible, dtype):
    """The form for decoding: of one query, of two, of thirty."""
    visibility = VISIBILITIES[visible](150)
    groups = case.make(case.draw(2, 150), 150, visibility)
    x = tensors(150)
    sums = summarise(x["k"], x["v"], groups)
    sums = sums._replace(q=summarise(x["q"], x["q"], groups).k if asking else None)

    def run(count: int, impl: str, kind: torch.dtype) -> Tensor:
        q, k, v = (x[name].to(kind) for name in "qkv")
        own = Summaries(*(None if y is None else y.to(kind) for y in sums))
        return grouped_attention(
            q[:, :, -count:], k, v, groups=groups, summaries=own, window=9, impl=impl,
            visibility=visibility,
        )  # fmt: skip

    for count in (1, 2, 30):
        actual, plain = (run(count, impl, dtype) for impl in ("tiled", "reference"))
        exact = run(count, "reference", torch.float64)
        assert_matches_oracle(f"{case}", actual, plain, exact, 150)


@each_case
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 64, 129])
def test_odd_lengths(case, tokens):
    features, x = case.draw(2, tokens), tensors(tokens)
    actual = attend(x, case.make(features, tokens, None), "tiled", window=2)
    expected = attend(x, case.make(features, tokens, None), "reference", window=2)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)
    if tokens < 3:  # nothing is far yet
        standard = scaled_dot_product_attention(
            x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(actual, standard, **EXACT)


@each_case
def test_a_batch_is_its_rows_and_two_runs_are_one(case):
    features, x = case.draw(2, 150), tensors(150)
    both = attend(x, case.make(features, 150, None), "tiled", window=9)
    assert torch.equal(both, attend(x, case.make(features, 150, None), "tiled", window=9))
    for b in range(2):
        row = {name: y if name == "beta" else y[b : b + 1] for name, y in x.items()}
        own = None if features is None else features[b : b + 1]
        alone = attend(row, case.make(own, 150, None), "tiled", window=9)
        torch.testing.assert_close(alone, both[b : b + 1], **EXACT)


def test_local_false_leaves_the_own_token_and_the_summaries():
    x, groups = tensors(), fixed_groups(4, TOKENS)
    for impl in ("reference", "tiled"):
        actual = attend(x, groups, impl, window=1, local=False)
        sums = summarise(x["k"], x["v"], groups, logits=x["logits"])
        far = torch.arange(groups.count) < (torch.arange(TOKENS) // 4)[:, None]
        logits = x["q"] @ sums.k.repeat_interleave(2, 1).mT / 6**0.5
        logits = logits + x["beta"][:, None, None] * groups.mass.log()
        own = (x["q"] * x["k"].repeat_interleave(2, 1)).sum(-1, keepdim=True) / 6**0.5
        p = torch.cat([logits.masked_fill(~far, -torch.inf), own], -1).softmax(-1)
        expected = p[..., :-1] @ sums.v.repeat_interleave(2, 1)
        expected = expected + p[..., -1:] * x["v"].repeat_interleave(2, 1)
        torch.testing.assert_close(actual, expected, **EXACT)


def test_local_false_changes_no_cross_attention():
    """Of a source there are no near tokens anyway, however many ask."""
    x = tensors() | {"q": draw(2, 4, TOKENS + 9, 6)}
    crossing = Visibility(causal=False, queries=Queries())
    for impl in ("tiled", "reference"):
        some, same = (
            attend(x, fixed_groups(4, TOKENS), impl, visibility=crossing, local=local)
            for local in (False, True)
        )
        torch.testing.assert_close(some, same, **EXACT)


@pytest.mark.parametrize("window", [1, 6, 30])
def test_pairs_are_counted_as_the_definition_has_them(window):
    """Full groups of four: summaries that ended far enough back, and every token after them."""
    far = near = 0
    for t in range(100):
        summaries = sum(4 * j + 3 <= t - window for j in range(25))
        far, near = far + summaries, near + t + 1 - 4 * summaries
    groups = fixed_groups(4, 100)
    assert score_pairs(groups, window=window) == far + near
    pairs = score_pairs(groups, window=window, asking=True)
    units = {}
    for t in range(100):
        units[(t + 1) // 4, sum(4 * j + 3 <= t - window for j in range(25))] = t
    assert pairs == sum(summaries for _, summaries in units) + near


def test_pairs_of_a_source_and_of_rows_with_padding():
    """Every query of the target reaches every group; a row of five tokens fewer has fewer pairs."""
    groups = fixed_groups(4, 20)
    crossing = Visibility(causal=False, queries=Queries())
    assert score_pairs(groups, window=6, visibility=crossing, queries=9).tolist() == [9 * 5]
    padding = torch.arange(20) >= torch.tensor([[0], [5]])
    padded = fixed_groups(4, 20, visibility=Visibility(padding=padding))
    actual = score_pairs(padded, window=6, visibility=Visibility(padding=padding))
    alone = [score_pairs(fixed_groups(4, n), window=6).item() for n in (20, 15)]
    assert actual.tolist() == alone


def test_the_work_is_that_of_the_pairs():
    """What the blocks compute: at most twice the pairs, for rows much longer than a block."""
    tokens, window = 4096, 128
    groups = fixed_groups(16, tokens)
    x = {name: y[:1, :1].float() for name, y in tensors(tokens).items() if name in "qkv"}
    computed = 0
    blocks = tiled_form.blocks_of

    def counted(operands):
        nonlocal computed
        for block in blocks(operands):
            computed += len(block.rows) * (len(block.groups) + len(block.tokens))
            yield block

    tiled_form.blocks_of = counted
    try:
        attend(x, groups, "tiled", window=window)
    finally:
        tiled_form.blocks_of = blocks
    pairs = score_pairs(groups, window=window)
    assert pairs < computed < 2 * pairs < tokens**2 / 4


def test_all_that_closes_and_nothing_that_does():
    ids = torch.zeros(1, 20, dtype=torch.int64)
    every = sentence_groups(ids, (0,))
    assert every.count == 20 and bool(every.complete.all())
    none = sentence_groups(ids, (1,), longest=LONGEST)
    assert none.start[0].tolist() == [0, 7, 14] and none.complete[0].tolist() == [True, True, False]
    first = sentence_groups(ids, (0,), shortest=6, longest=LONGEST)
    assert first.start[0].tolist() == [0, 6, 12, 18]


def test_a_row_of_padding_has_no_groups():
    padding = torch.tensor([[False] * 6, [True] * 6])
    groups = fixed_groups(4, 6, visibility=Visibility(padding=padding))
    assert groups.there.tolist() == [[False, False], [True, True]]
    assert groups.start[0].tolist() == [NEVER, NEVER] and groups.mass[0].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": None}, r"groups must be Groups, got None; fixed_groups\(16, 37\) makes some"),
        ({"groups": fixed_groups(4, 30)}, r"groups must be of \[2 or 1, 37\] tokens, got those of"),
        ({"window": 0}, r"window must be a whole number of tokens of at least 1, got 0"),
        ({"local": 1}, r"local must be True or False"),
        ({"beta": float("nan")}, r"beta must be a finite number or a tensor"),
        ({"beta": torch.tensor([1, 2, torch.nan, 1])}, r"beta must be finite, got NaN"),
        ({"beta": "a"}, r"beta must be a finite number or a tensor \[4\]"),
        ({"beta": torch.ones(3)}, r"beta must be one number or \[4\] \(per head\), got \(3,\)"),
        ({"summaries": Summaries(torch.zeros(2, 2, 3, 6), torch.zeros(2, 2, 3, 6))},
         r"summaries.k must be \[2, 2, 10, 6\], got \(2, 2, 3, 6\)"),
        ({"visibility": Visibility(mutual=torch.zeros(1, TOKENS).long())}, r"visibility must be"),
        ({"visibility": Visibility(causal=True, queries=Queries(positions=torch.zeros(1, TOKENS)
          .long()))}, r"visibility with queries of their own must be Visibility\(causal=False"),
        ({"groups": replace(fixed_groups(4, TOKENS), longest=3)}, r"groups have one of 4 tokens"),
        ({"visibility": VISIBILITIES["ragged documents"](TOKENS)}, r"groups hold padding or cross"),
        ({"visibility": Visibility(padding=torch.arange(TOKENS)[None] < 30)}, r"groups hold padd"),
        ({"query_groups": fixed_groups(3, TOKENS)}, r"query_groups must be None except in cross"),
        ({"summaries": Summaries(draw(2, 2, 10, 6), draw(2, 2, 10, 6),
          draw(2, 4, 9, 6))}, r"summaries.q must have one query for each of the 10 groups"),
        ({"bias": torch.zeros(TOKENS, TOKENS)}, r"bias must be \[1 or 2, 1 or 4, 37, 37\]"),
        ({"impl": "fused"}, r"does not support this grouped_attention call: its kernels need"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be(change, message):
    x = tensors()
    options = {"groups": fixed_groups(4, TOKENS)} | change
    with pytest.raises(ValueError, match=message):
        grouped_attention(x["q"], x["k"], x["v"], **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fixed_groups(0, 9), r"size must be a whole number of tokens of at least 1"),
        (lambda: sliding_groups(4, 5, 9), r"stride must be at most the span 4"),
        (lambda: sentence_groups(torch.zeros(1, 9).long(), ()), r"closing must be a tuple of"),
        (lambda: sentence_groups(torch.zeros(9).long(), (1,)), r"token_ids must be \[B, T\]"),
        (lambda: sentence_groups(torch.zeros(1, 9).long(), (1,), shortest=9, longest=4),
         r"shortest must be at most longest \(4\), got 9"),
        (lambda: cif_groups(torch.full((1, 9), 0.01)), r"alpha must be from 0.01562 to 1"),
        (lambda: cif_groups(torch.full((1, 9), torch.nan)), r"alpha must be from .* got nan"),
        (lambda: cif_groups(torch.ones(9)), r"alpha must be a floating-point tensor \[B, T\]"),
        (lambda: fixed_groups(4, 9, visibility=Visibility(padding=torch.ones(1, 8).bool())),
         r"visibility must be of the same 9 tokens, got 8"),
        (lambda: fixed_groups(4, 9, visibility=Visibility(mutual=torch.zeros(1, 9).long())),
         r"visibility.mutual \(images\) is not defined beside groups"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("no_shape_checks")
def test_groups_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.crossed
@each_case
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (1, 1)])
@pytest.mark.parametrize("visible", ["causal", "ragged, both ways"])
def test_a_bias_and_its_gradient(case, shape, visible):
    """A summary's is the mean of its members', by their shares."""
    visibility, features = VISIBILITIES[visible](300), case.draw(2, 300)
    groups = case.make(features, 300, visibility)
    x = tensors(300) | {"bias": draw(*shape, 300, 300)}

    def run(impl):
        return lambda y: attend(y, groups, impl, window=20, visibility=visibility, bias=y["bias"])

    assert_equal_in_fp64(run("tiled"), run("reference"), x, 1e-12)


def test_a_bias_is_added_to_the_logits_of_tokens_and_to_the_means_of_summaries():
    x, groups, bias = tensors(), fixed_groups(4, TOKENS), draw(1, 4, TOKENS, TOKENS)
    actual = attend(x, groups, "tiled", window=1, bias=bias)
    sums = summarise(x["k"], x["v"], groups, logits=x["logits"])
    token = torch.arange(TOKENS)
    far = torch.arange(groups.count) < (token // 4)[:, None]
    near = (token[:, None] // 4 == token // 4) & (token <= token[:, None])
    mean = torch.stack([bias[..., token // 4 == j].mean(-1) for j in range(groups.count)], -1)
    size = groups.mass.log() * x["beta"][:, None, None]
    of_groups = x["q"] @ sums.k.repeat_interleave(2, 1).mT / 6**0.5 + size + mean
    of_tokens = x["q"] @ x["k"].repeat_interleave(2, 1).mT / 6**0.5 + bias
    logits = [of_groups.masked_fill(~far, -torch.inf), of_tokens.masked_fill(~near, -torch.inf)]
    values = torch.cat([sums.v, x["v"]], 2).repeat_interleave(2, 1)
    torch.testing.assert_close(actual, torch.cat(logits, -1).softmax(-1) @ values, **EXACT)
