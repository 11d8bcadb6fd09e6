"""Grouped attention against its definition by explicit loops, and its identities."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Queries, Visibility, grouped_attention, summarise
from heedful.ops.grouped import cif_groups, fixed_groups, member_attention, sliding_groups
from heedful.ops.grouped.reference import memberships
from helpers.grouped_cases import (
    BY_NAME,
    TOKENS,
    VISIBILITIES,
    Case,
    attend,
    documents_of,
    each_case,
    each_impl,
    shares_by_hand,
    tensors,
)
from helpers.loops import dot, sight, softmax
from helpers.oracle import EXACT, against_oracle, assert_equal_in_fp64, draw

KINDS = [
    "causal", "window 9", "ragged documents", "all padding", "padding in between", "both ways",
    "ragged, both ways", "documents in a window", "both ways in a window",
]  # fmt: skip


@each_case
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "mutual" not in name])
def test_memberships_by_hand(case: Case, visible):
    visibility = VISIBILITIES[visible](TOKENS)
    features = case.draw(2, TOKENS)
    groups = case.make(features, TOKENS, visibility)
    a = memberships(groups)
    a = a.expand(2, -1, -1) if len(a) == 1 else a
    for row in range(2):
        expected = shares_by_hand(case, features, row, TOKENS, visibility)
        there = groups.there[row % len(groups.there)]
        assert int(there.sum()) == len(expected) and bool(there[: len(expected)].all())
        for j, shares in enumerate(expected):
            column = torch.zeros(TOKENS, dtype=torch.float64)
            column[list(shares)] = torch.tensor(list(shares.values()), dtype=torch.float64)
            torch.testing.assert_close(a[row, :, j].double(), column, **EXACT)
            start, end = (x[row % len(x), j].item() for x in (groups.start, groups.end))
            assert (start, end) == (min(shares), max(shares))
            size = groups.mass[row % len(groups.mass), j].item()
            assert size == pytest.approx(sum(shares.values()), abs=1e-12)
            assert end - start < groups.longest
        assert bool((groups.end[row % len(groups.end)].diff() >= 0).all())


def by_loops(x, groups, case, features, visibility, window, asking) -> Tensor:
    """The definition: which groups are far, what is left of each token, one softmax over both."""
    q, k, v = (x[name] for name in "qkv")
    a = memberships(groups).double()
    a = a.expand(2, -1, -1) if len(a) == 1 else a
    out = torch.zeros(2, 4, TOKENS, 6, dtype=torch.float64)
    sees = sight(visibility, TOKENS, TOKENS)
    two_sided = visibility is not None and not visibility.causal
    for b in range(2):
        shares = shares_by_hand(case, features, b, TOKENS, visibility)
        runs = documents_of(visibility, b, TOKENS)
        number = {}
        for t in (t for run in runs for t in run):
            number[t] = 0
            if visibility is not None and visibility.documents is not None:
                number[t] = int(visibility.documents[b % len(visibility.documents), t])
        z = x["logits"][b].exp()
        for h in range(4):
            e = h // 2
            weights = [{i: s * z[e, i].item() for i, s in g.items()} for g in shares]
            kbar = [sum(w * k[b, e, i] for i, w in g.items()) / sum(g.values()) for g in weights]
            vbar = [sum(w * v[b, e, i] for i, w in g.items()) / sum(g.values()) for g in weights]
            qbar = [sum(s * q[b, h, i] for i, s in g.items()) / sum(g.values()) for g in shares]
            for t in range(TOKENS):
                if t not in number:
                    continue
                far, away = [], []
                for j in range(len(shares)):
                    first, last = (int(y[b % len(y), j]) for y in (groups.start, groups.end))
                    same = number[first] == number[t]
                    out_of_reach = last <= t - window or (two_sided and first >= t + window)
                    if same and out_of_reach:
                        away.append(j)
                        reach = visibility.window if visibility is not None else None
                        ends = two_sided and reach is not None and last >= t + reach
                        if reach is None or (first > t - reach and not ends):
                            far.append(j)
                ask = q[b, h, t]
                if asking:
                    if two_sided:
                        most = max(g.get(t, 0.0) for g in shares)
                        ask = qbar[next(j for j, g in enumerate(shares) if g.get(t, 0) == most)]
                    else:
                        ready = [
                            j
                            for j in range(len(shares))
                            if int(groups.end[b % len(groups.end), j]) <= t
                            and bool(groups.complete[b % len(groups.end), j])
                            and number[int(groups.start[b % len(groups.end), j])] == number[t]
                        ]
                        ask = qbar[ready[-1]] if ready else ask
                logits, values = [], []
                for j in far:
                    size = math.log(sum(shares[j].values()))
                    score = dot(ask.tolist(), kbar[j].tolist()) / 6**0.5
                    logits.append(score + x["beta"][h].item() * size)
                    values.append(vbar[j])
                for i in range(TOKENS):
                    remainder = 1 - sum(shares[j].get(i, 0.0) for j in away)
                    if i in number and sees(b, t, i) and remainder > 1e-9:
                        score = dot(q[b, h, t].tolist(), k[b, e, i].tolist()) / 6**0.5
                        logits.append(score + math.log(remainder))
                        values.append(v[b, e, i])
                for p, value in zip(softmax(logits), values, strict=True):
                    out[b, h, t] += p * value
    return out


@pytest.mark.crossed
@each_case
@pytest.mark.parametrize("visible", KINDS)
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
def test_the_definition_by_loops(case, visible, asking):
    visibility, features, x = VISIBILITIES[visible](TOKENS), case.draw(2, TOKENS), tensors()
    groups = case.make(features, TOKENS, visibility)
    expected = by_loops(x, groups, case, features, visibility, 5, asking)
    for impl in ("reference", "tiled"):
        actual = attend(x, groups, impl, asking=asking, window=5, visibility=visibility)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.crossed
@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(case, dtype, asking):
    features = case.draw(2, 300)
    groups = case.make(features, 300, None)

    def run(impl):
        return lambda x: attend(x, groups, impl, asking=asking, window=40)

    against_oracle(run("tiled"), run("reference"), tensors(300), dtype, f"{case}")


@pytest.mark.crossed
@each_case
@pytest.mark.parametrize(
    "visible", ["causal", "ragged documents", "window 70", "ragged, both ways"]
)
@pytest.mark.parametrize("queries", [300, 150, 1])
def test_tiled_is_the_definition_in_fp64(case, visible, queries):
    """With every gradient, those of the groups too; over several blocks of rows."""
    visibility, features = VISIBILITIES[visible](300), case.draw(2, 300)
    x = tensors(300, queries)
    learned = features is not None and features.is_floating_point()
    if learned:
        x["drawn"] = features

    def run(impl):
        def function(y):
            groups = case.make(y.get("drawn", features), 300, visibility)
            return attend(y, groups, impl, window=20, visibility=visibility)

        return function

    assert_equal_in_fp64(run("tiled"), run("reference"), x, 1e-12)


@each_case
@each_impl
def test_cross_attention_to_all_groups(case, impl):
    """No token by itself; padding of the source is in no group, padded queries get zeros (I6)."""
    padding = VISIBILITIES["ragged, both ways"](TOKENS).padding
    source = Visibility(causal=False, padding=padding)
    features, x = case.draw(2, TOKENS), tensors(TOKENS, 9)
    groups = case.make(features, TOKENS, source)
    real = torch.arange(9)[None] < 7
    visibility = replace(source, queries=Queries(padding=real))
    actual = attend(x, groups, impl, visibility=visibility, window=1)
    assert not bool(actual[:, :, 7:].any())
    for b in range(2):
        shares = shares_by_hand(case, features, b, TOKENS, source)
        for h in range(4):
            z = x["logits"][b, h // 2].exp()
            weights = [{i: s * z[i] for i, s in g.items()} for g in shares]
            means = []
            for name in ("k", "v"):
                y = x[name][b, h // 2]
                means.append(torch.stack(
                    [sum(w * y[i] for i, w in g.items()) / sum(g.values()) for g in weights]
                ))  # fmt: skip
            sizes = torch.tensor([sum(g.values()) for g in shares], dtype=torch.float64).log()
            logits = x["q"][b, h] @ means[0].T / 6**0.5 + x["beta"][h] * sizes
            expected = (logits.softmax(-1) @ means[1])[:7]
            torch.testing.assert_close(actual[b, h, :7], expected, rtol=0, atol=1e-11)


@each_impl
def test_groups_of_a_target_ask_in_cross_attention(impl):
    x = tensors(TOKENS, 11)
    groups, own = fixed_groups(4, TOKENS), fixed_groups(3, 11)
    visibility = Visibility(causal=False, queries=Queries())
    sums = summarise(x["k"], x["v"], groups)._replace(q=summarise(x["q"], x["q"], own).k)
    actual = grouped_attention(
        x["q"], x["k"], x["v"], groups=groups, summaries=sums, query_groups=own,
        visibility=visibility, impl=impl,
    )  # fmt: skip
    # Tokens 0 and 1 ask for themselves, from 2 on the newest complete group of three does.
    queries = [x["q"][:, :, t] if t < 2 else sums.q[:, :, (t - 2) // 3] for t in range(11)]
    alone = grouped_attention(
        torch.stack(queries, 2), x["k"], x["v"], groups=groups, summaries=sums._replace(q=None),
        visibility=visibility, impl=impl,
    )  # fmt: skip
    torch.testing.assert_close(actual, alone, **EXACT)


@pytest.mark.crossed
@each_case
@each_impl
@pytest.mark.parametrize("visible", ["causal", "ragged documents", "both ways"])
def test_nothing_to_choose_by_gives_the_mean_of_all_that_is_seen(case, impl, visible):
    """Every token counts once, whatever the groups are (I3); without their sizes it does not."""
    visibility, x = VISIBILITIES[visible](TOKENS), tensors()
    del x["logits"], x["beta"]
    x["q"] = torch.zeros_like(x["q"])
    groups = case.make(case.draw(2, TOKENS), TOKENS, visibility)
    visible_keys = visibility.dense(TOKENS, TOKENS, torch.device("cpu"))[:, None].double()
    expected = (
        visible_keys
        @ x["v"].repeat_interleave(2, dim=1)
        / visible_keys.sum(-1, keepdim=True).clamp(min=1)
    )
    actual = attend(x, groups, impl, window=3, visibility=visibility)
    torch.testing.assert_close(actual, expected.expand_as(actual), **EXACT)
    without = attend(x | {"beta": torch.zeros(4).double()}, groups, impl, window=3,
                     visibility=visibility)  # fmt: skip
    assert (without - expected).abs().max() > 0.1


@each_impl
@pytest.mark.parametrize("name", ["fixed", "sentence"])
def test_groups_of_the_same_token_over_and_over_are_standard_attention(name, impl):
    """I4: a summary of equal members stands for them exactly."""
    case = BY_NAME[name]
    groups = case.make(case.draw(1, TOKENS), TOKENS, None)
    first = groups.start[0][groups.index[0, :, 0]]
    x = tensors()
    x = x | {part: x[part][:, :, first] for part in ("k", "v")}
    del x["beta"]
    actual = attend(x, groups, impl, window=3)
    expected = scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.crossed
@each_impl
@pytest.mark.parametrize("visible", ["causal", "both ways", "ragged, both ways"])
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
def test_groups_of_one_token_are_standard_attention(impl, visible, asking):
    """I1, in encoders too: by counting and by weights of one."""
    visibility, x = VISIBILITIES[visible](TOKENS), tensors()
    del x["beta"]
    alone = [
        fixed_groups(1, TOKENS, visibility=visibility),
        sliding_groups(1, 1, TOKENS, visibility=visibility),
        cif_groups(torch.ones(2, TOKENS, dtype=torch.float64), visibility=visibility),
    ]
    visible_keys = visibility.dense(TOKENS, TOKENS, torch.device("cpu"))[:, None]
    expected = scaled_dot_product_attention(
        x["q"],
        x["k"],
        x["v"],
        attn_mask=visible_keys | ~visible_keys.any(-1, keepdim=True),
        enable_gqa=True,
    ).masked_fill(~visible_keys.any(-1, keepdim=True), 0)
    for groups in alone:
        for window in (1, 6):
            actual = attend(x, groups, impl, window=window, visibility=visibility, asking=asking)
            torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.crossed
@each_case
@each_impl
@pytest.mark.parametrize("visible", ["both ways", "ragged, both ways"])
def test_a_window_over_the_whole_row_is_standard_attention_in_encoders(case, impl, visible):
    """I2; for decoders the layers' tests have it."""
    visibility, x = VISIBILITIES[visible](TOKENS), tensors()
    groups = case.make(case.draw(2, TOKENS), TOKENS, visibility)
    visible_keys = visibility.dense(TOKENS, TOKENS, torch.device("cpu"))[:, None]
    blind = ~visible_keys.any(-1, keepdim=True)
    expected = scaled_dot_product_attention(
        x["q"], x["k"], x["v"], attn_mask=visible_keys | blind, enable_gqa=True
    ).masked_fill(blind, 0)
    actual = attend(x, groups, impl, window=TOKENS, visibility=visibility)
    torch.testing.assert_close(actual, expected, **EXACT)


@each_case
def test_heads_of_a_key_head_may_stand_in_any_order(case):
    x = tensors()
    groups = case.make(case.draw(2, TOKENS), TOKENS, None)
    order = torch.tensor([1, 0, 3, 2])
    moved = x | {"q": x["q"][:, order], "beta": x["beta"][order]}
    actual, expected = (attend(y, groups, "tiled", window=3) for y in (moved, x))
    torch.testing.assert_close(actual, expected[:, order], **EXACT)


@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
@each_impl
def test_gradients_by_finite_differences(impl, asking):
    """Through shares that are learned, too, which are piecewise linear (cif)."""
    alpha = (0.3 + 0.3 * torch.rand(1, 9, dtype=torch.float64)).requires_grad_()
    q, k, v = (draw(1, h, 9, 3).requires_grad_() for h in (2, 1, 1))
    logits, beta = draw(1, 1, 9).requires_grad_(), torch.rand(2).double().requires_grad_()
    values = (q, k, v, logits, beta)

    def run(*inputs, groups):
        x = dict(zip(("q", "k", "v", "logits", "beta"), inputs, strict=True))
        return attend(x, groups, impl, asking=asking, window=2)

    def cif(a, *inputs):
        return run(*inputs, groups=cif_groups(a, longest=6))

    assert torch.autograd.gradcheck(cif, (alpha, *values), eps=1e-7, fast_mode=True)


def test_attention_inside_a_group_of_one_takes_nothing():
    """I5, to the last bit, whatever the parameters."""
    result = member_attention(*(draw(2, 9, 5) for _ in range(3)), fixed_groups(1, 9))
    assert not bool(result.any())
