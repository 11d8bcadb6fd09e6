"""Grouped attention by FlexAttention: held to the definition as it is written, without a GPU.

FlexAttention that is not compiled computes what its functions say, gradients included, but for a
check that refuses gradients on a CPU, which is lifted here. It reads no lists of blocks then, so
these are held to the map by themselves.
"""

import itertools
from dataclasses import replace

import pytest
import torch

from heedful.ops import Queries, Visibility, grouped_attention, summarise
from heedful.ops.grouped import fixed_groups, sliding_groups
from heedful.ops.grouped.fused import _blocks
from heedful.ops.grouped.neighbourhood import neighbourhood_of
from helpers.crosses import usually
from helpers.grouped_cases import CASES, TOKENS, VISIBILITIES, attend, each_case, tensors
from helpers.oracle import EXACT, against_oracle, assert_equal_in_fp64

KINDS = (
    "causal", "window 9", "ragged documents", "padding in between", "both ways",
    "ragged, both ways in a window",
)  # fmt: skip
each_asking = pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])


@pytest.fixture(autouse=True)
def as_written(interpreted, device, monkeypatch) -> None:
    if device == "cpu":
        monkeypatch.setattr(
            "torch.nn.attention.flex_attention._validate_device", lambda *tensors: None
        )


@pytest.mark.crossed
@each_case
@each_asking
@pytest.mark.parametrize("visible", KINDS)
def test_fused_is_the_definition_in_fp64(case, asking, visible):
    """With every gradient, those of learned groups too."""
    visibility, features = VISIBILITIES[visible](TOKENS), case.draw(2, TOKENS)
    x = tensors()
    if features is not None and features.is_floating_point():
        x["drawn"] = features

    def run(impl):
        def function(y):
            groups = case.make(y.get("drawn", features), TOKENS, visibility)
            return attend(y, groups, impl, asking=asking, window=5, visibility=visibility)

        return function

    assert_equal_in_fp64(run("fused"), run("reference"), x, 1e-12)


@pytest.mark.device
@pytest.mark.parametrize(
    ("case", "asking"),
    usually(itertools.product(CASES, (False, True)), CASES[:2], (False,)),
    ids=str,
)
def test_fused_errs_at_most_twice_as_much_as_the_definition(case, asking):
    features = case.draw(2, 300)
    groups = case.make(features, 300, None)

    def run(impl):
        return lambda x: attend(x, groups, impl, asking=asking, window=40)

    x = tensors(300, dim=16)  # fewer, a GPU's FlexAttention does not take
    against_oracle(run("fused"), run("reference"), x, torch.float32, f"{case}")


@each_case
@each_asking
@pytest.mark.parametrize("queries", [1, 9])
def test_the_newest_queries_and_a_query_s_own_token_alone(case, asking, queries):
    features, x = case.draw(2, TOKENS), tensors(TOKENS, TOKENS if asking else queries)
    groups = case.make(features, TOKENS, None)
    for options in ({"window": 4}, {"window": 4, "local": False}):
        actual, expected = (
            attend(x, groups, impl, asking=asking, **options) for impl in ("fused", "reference")
        )
        torch.testing.assert_close(actual, expected, **EXACT)


@each_case
def test_cross_attention_and_groups_of_a_target_that_ask(case):
    padding = VISIBILITIES["ragged, both ways"](TOKENS).padding
    source = Visibility(causal=False, padding=padding)
    groups, own = case.make(case.draw(2, TOKENS), TOKENS, source), fixed_groups(3, 11)
    real = torch.arange(11)[None] < 9
    visibility = replace(source, queries=Queries(padding=real))
    x = tensors(TOKENS, 11)
    sums = summarise(x["k"], x["v"], groups)
    for q, target in ((None, None), (summarise(x["q"], x["q"], own).k, own)):
        actual, expected = (
            grouped_attention(
                x["q"], x["k"], x["v"], groups=groups, summaries=sums._replace(q=q),
                query_groups=target, visibility=visibility, impl=impl,
            )
            for impl in ("fused", "reference")
        )  # fmt: skip
        torch.testing.assert_close(actual, expected, **EXACT)
        assert not bool(actual[:, :, 9:].any())


@each_case
@each_asking
def test_a_later_token_changes_no_earlier_output(case, asking):
    """In whole blocks of rows, with summaries made anew."""
    x, features = tensors(200), case.draw(2, 200)

    def run(y):
        return attend(y, case.make(features, 200, None), "fused", asking=asking, window=3)

    before = run(x)
    for t in (5, 127, 128, 199):
        changed = {name: y.clone() for name, y in x.items()}
        for name in ("q", "k", "v", "logits"):
            changed[name][:, :, t] += 1
        after = run(changed)
        torch.testing.assert_close(after[:, :, :t], before[:, :, :t], **EXACT)
        assert (after[:, :, t] - before[:, :, t]).abs().max() > 1e-3


@pytest.mark.parametrize("window", [1, 40, 500])
@pytest.mark.parametrize("visible", KINDS)
def test_every_column_that_a_row_reaches_is_in_its_blocks(visible, window):
    """And a block is left out where none of its rows reaches any of its columns."""
    visibility = VISIBILITIES[visible](400)
    groups = sliding_groups(6, 2, 400, visibility=visibility)
    reach = neighbourhood_of(groups, visibility, 400, 400, window)
    bounds, count = reach.stacked(), groups.count
    number, order = (x[:, 0] for x in _blocks(bounds, count, 400))
    column = torch.arange(count + 400)
    first, near, after, last, start, stop, _ = (x[..., None] for x in bounds.unbind(1))
    reached = ((column >= first) & (column < near)) | ((column >= after) & (column < last))
    reached = reached & (column < count)
    reached = reached | ((column - count >= start) & (column - count < stop))
    for row in range(len(bounds)):
        for block in range(4):
            part = reached[row, 128 * block : 128 * (block + 1)].any(0)
            needed = {c // 128 for c in part.nonzero().flatten().tolist()}
            listed = order[row, block, : number[row, block]].tolist()
            assert needed <= set(listed) and len(set(listed)) == len(listed)
            # Runs of one row may end in a block of which another row's begins: at most so many.
            assert len(listed) <= len(needed) + 2
    if window == 1 and visible == "causal":
        assert int(number.sum()) < number.numel() * order.shape[2] * 0.7


def test_what_it_does_not_serve():
    q, bias = torch.randn(1, 2, 40, 4), torch.zeros(1, 1, 40, 40)
    message = "impl='fused' does not support this grouped.*a position bias is one number per token"
    with pytest.raises(ValueError, match=message):
        grouped_attention(q, q, q, groups=fixed_groups(4, 40), impl="fused", bias=bias)
