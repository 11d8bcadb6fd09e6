"""Grouped attention against its definition by explicit loops; its identities; leaks on purpose."""

import math
from dataclasses import replace

import pytest
import torch
from grouped_cases import BY_NAME, CASES, LONGEST, Case, documents_of, shares_by_hand
from loops import dot, sight, softmax
from mechanisms import VISIBILITIES
from oracle import against_oracle, with_grads
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from heedful.ops import Groups, Queries, Summaries, Visibility, grouped_attention, summarise
from heedful.ops.grouped import (
    cif_groups,
    fixed_groups,
    member_attention,
    sentence_groups,
    sliding_groups,
    slot_groups,
)
from heedful.ops.grouped import tiled as tiled_form
from heedful.ops.grouped.groups import NEVER
from heedful.ops.grouped.reach import score_pairs
from heedful.ops.grouped.reference import memberships
from heedful.testing import assert_matches_oracle

EXACT = {"rtol": 0, "atol": 1e-12}
TOKENS = 37
SEEN = [
    "causal", "window 9", "ragged documents", "all padding", "padding in between", "both ways",
    "ragged, both ways", "documents in a window", "both ways in a window",
]  # fmt: skip
VISIBILITIES = VISIBILITIES | {
    "both ways in a window": lambda keys: Visibility(causal=False, window=11)
}
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_impl = pytest.mark.parametrize("impl", ["reference", "tiled"])


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tensors(tokens: int = TOKENS, queries: int | None = None) -> dict[str, Tensor]:
    """q, k, v of two rows, weights of the members, and a factor on the sizes per head."""
    return {
        "q": draw(2, 4, queries or tokens, 6),
        "k": draw(2, 2, tokens, 6),
        "v": draw(2, 2, tokens, 6),
        "logits": draw(2, 2, tokens),
        "beta": torch.rand(4, dtype=torch.float64) + 0.5,
    }


def attend(x, groups: Groups, impl: str, *, asking: bool = False, **options) -> Tensor:
    """The operator with summaries made of `x`; groups ask by the means of the last queries."""
    queries = None
    if asking:
        queries = summarise(x["q"], x["q"], groups).k
    sums = summarise(x["k"], x["v"], groups, logits=x.get("logits"))._replace(q=queries)
    return grouped_attention(
        x["q"], x["k"], x["v"], groups=groups, summaries=sums, beta=x.get("beta", 1.0), impl=impl,
        **options,
    )  # fmt: skip


@each_case
@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "mutual" not in name])
def test_memberships_by_hand(case: Case, visible):
    visibility = VISIBILITIES[visible](TOKENS)
    drawn = case.draw(2, TOKENS)
    groups = case.make(drawn, TOKENS, visibility)
    a = memberships(groups)
    a = a.expand(2, -1, -1) if len(a) == 1 else a
    for row in range(2):
        expected = shares_by_hand(case, drawn, row, TOKENS, visibility)
        there = groups.there[row % len(groups.there)]
        assert int(there.sum()) == len(expected) and bool(there[: len(expected)].all())
        for j, shares in enumerate(expected):
            column = torch.zeros(TOKENS, dtype=torch.float64)
            column[list(shares)] = torch.tensor(list(shares.values()), dtype=torch.float64)
            torch.testing.assert_close(a[row, :, j].double(), column, **EXACT)
            start, end = (x[row % len(x), j].item() for x in (groups.start, groups.end))
            if case.name != "slots":
                assert (start, end) == (min(shares), max(shares))
            size = groups.mass[row % len(groups.mass), j].item()
            assert size == pytest.approx(sum(shares.values()), abs=1e-12)
            assert end - start < groups.longest
        assert bool((groups.end[row % len(groups.end)].diff() >= 0).all())


def by_loops(x, groups, case, drawn, visibility, window, asking) -> Tensor:
    """The definition: which groups are far, what is left of each token, one softmax over both."""
    q, k, v = (x[name] for name in "qkv")
    a = memberships(groups).double()
    a = a.expand(2, -1, -1) if len(a) == 1 else a
    out = torch.zeros(2, 4, TOKENS, 6, dtype=torch.float64)
    sees = sight(visibility, TOKENS, TOKENS)
    two_sided = visibility is not None and not visibility.causal
    for b in range(2):
        shares = shares_by_hand(case, drawn, b, TOKENS, visibility)
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
                    left = 1 - sum(shares[j].get(i, 0.0) for j in away)
                    if i in number and sees(b, t, i) and left > 1e-9:
                        score = dot(q[b, h, t].tolist(), k[b, e, i].tolist()) / 6**0.5
                        logits.append(score + math.log(left))
                        values.append(v[b, e, i])
                for p, value in zip(softmax(logits), values, strict=True):
                    out[b, h, t] += p * value
    return out


@each_case
@each_impl
@pytest.mark.parametrize("visible", SEEN)
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
def test_the_definition_by_loops(case, impl, visible, asking):
    visibility, drawn, x = VISIBILITIES[visible](TOKENS), case.draw(2, TOKENS), tensors()
    groups = case.make(drawn, TOKENS, visibility)
    found = attend(x, groups, impl, asking=asking, window=5, visibility=visibility)
    expected = by_loops(x, groups, case, drawn, visibility, 5, asking)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
def test_tiled_errs_at_most_twice_as_much_as_the_definition(case, dtype, asking):
    drawn = case.draw(2, 300)
    groups = case.make(drawn, 300, None)

    def run(impl):
        return lambda x: attend(x, groups, impl, asking=asking, window=40)

    against_oracle(run("tiled"), run("reference"), tensors(300), dtype, f"{case}")


@each_case
@pytest.mark.parametrize(
    "visible", ["causal", "ragged documents", "window 70", "ragged, both ways"]
)
@pytest.mark.parametrize("queries", [300, 150, 1])
def test_tiled_is_the_definition_in_fp64(case, visible, queries):
    """With every gradient, those of the groups too; over several blocks of rows."""
    visibility, drawn = VISIBILITIES[visible](300), case.draw(2, 300)
    x = tensors(300, queries)
    learned = drawn is not None and drawn.is_floating_point()
    if learned:
        x["drawn"] = drawn

    def run(impl):
        def function(y):
            groups = case.make(y.get("drawn", drawn), 300, visibility)
            return attend(y, groups, impl, window=20, visibility=visibility)

        return function

    actual, expected = (with_grads(run(impl), x) for impl in ("tiled", "reference"))
    for name, y in actual.items():
        size = expected[name].abs().max().item()
        torch.testing.assert_close(y, expected[name], rtol=0, atol=1e-12 * (1 + size), msg=name)


@each_impl
@pytest.mark.parametrize("name", ["fixed", "sentence", "boundary"])
@pytest.mark.parametrize("zoom", [1, 3, 99])
def test_groups_that_are_looked_into(impl, name, zoom):
    """The best are seen by their tokens; all of them are standard attention (I6)."""
    case, x = BY_NAME[name], tensors(300)
    drawn = case.draw(2, 300)
    groups = case.make(drawn, 300, None)

    def run(impl):
        return lambda y: attend(y, groups, impl, window=20, zoom=zoom)

    actual, expected = (with_grads(run(form), x) for form in (impl, "reference"))
    for part, y in actual.items():
        torch.testing.assert_close(y, expected[part], rtol=0, atol=1e-11, msg=part)
    standard = scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True)
    apart = (actual["output"] - standard).abs().max()
    assert apart < 1e-12 if zoom == 99 else apart > 1e-3


@each_case
@each_impl
def test_cross_attention_to_all_groups(case, impl):
    """No token by itself; padding of the source is in no group, padded queries get zeros (I6)."""
    padding = VISIBILITIES["ragged, both ways"](TOKENS).padding
    source = Visibility(causal=False, padding=padding)
    drawn, x = case.draw(2, TOKENS), tensors(TOKENS, 9)
    groups = case.make(drawn, TOKENS, source)
    real = torch.arange(9)[None] < 7
    visibility = replace(source, queries=Queries(padding=real))
    found = attend(x, groups, impl, visibility=visibility, window=1)
    assert not bool(found[:, :, 7:].any())
    for b in range(2):
        shares = shares_by_hand(case, drawn, b, TOKENS, source)
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
            torch.testing.assert_close(found[b, h, :7], expected, rtol=0, atol=1e-11)
    if groups.hard:
        everything = attend(x, groups, impl, visibility=visibility, window=1, zoom=groups.count)
        expected = scaled_dot_product_attention(
            x["q"], x["k"], x["v"], attn_mask=padding[:, None, None], enable_gqa=True
        )
        torch.testing.assert_close(everything[:, :, :7], expected[:, :, :7], **EXACT)


@each_impl
def test_groups_of_a_target_ask_in_cross_attention(impl):
    x = tensors(TOKENS, 11)
    groups, own = fixed_groups(4, TOKENS), fixed_groups(3, 11)
    visibility = Visibility(causal=False, queries=Queries())
    sums = summarise(x["k"], x["v"], groups)._replace(q=summarise(x["q"], x["q"], own).k)
    found = grouped_attention(
        x["q"], x["k"], x["v"], groups=groups, summaries=sums, query_groups=own,
        visibility=visibility, impl=impl,
    )  # fmt: skip
    # Tokens 0 and 1 ask for themselves, from 2 on the newest complete group of three does.
    asks = [x["q"][:, :, t] if t < 2 else sums.q[:, :, (t - 2) // 3] for t in range(11)]
    alone = grouped_attention(
        torch.stack(asks, 2), x["k"], x["v"], groups=groups, summaries=sums._replace(q=None),
        visibility=visibility, impl=impl,
    )  # fmt: skip
    torch.testing.assert_close(found, alone, **EXACT)


@each_case
@each_impl
@pytest.mark.parametrize("visible", ["causal", "ragged documents", "both ways"])
def test_nothing_to_choose_by_gives_the_mean_of_all_that_is_seen(case, impl, visible):
    """Every token counts once, whatever the groups are (I3); without their sizes it does not."""
    visibility, x = VISIBILITIES[visible](TOKENS), tensors()
    del x["logits"], x["beta"]
    x["q"] = torch.zeros_like(x["q"])
    groups = case.make(case.draw(2, TOKENS), TOKENS, visibility)
    seen = visibility.dense(TOKENS, TOKENS, torch.device("cpu"))[:, None].double()
    expected = seen @ x["v"].repeat_interleave(2, dim=1) / seen.sum(-1, keepdim=True).clamp(min=1)
    found = attend(x, groups, impl, window=3, visibility=visibility)
    torch.testing.assert_close(found, expected.expand_as(found), **EXACT)
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
    found = attend(x, groups, impl, window=3)
    expected = scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found, expected, **EXACT)


@each_impl
@pytest.mark.parametrize("visible", ["causal", "both ways", "ragged, both ways"])
@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
def test_groups_of_one_token_are_standard_attention(impl, visible, asking):
    """I1, in encoders too: by counting, by weights of one, by slots of one."""
    visibility, x = VISIBILITIES[visible](TOKENS), tensors()
    del x["beta"]
    alone = [
        fixed_groups(1, TOKENS, visibility=visibility),
        sliding_groups(1, 1, TOKENS, visibility=visibility),
        cif_groups(torch.ones(2, TOKENS, dtype=torch.float64), visibility=visibility),
        slot_groups(draw(2, TOKENS, 3), block=1, slots=1, visibility=visibility),
    ]
    seen = visibility.dense(TOKENS, TOKENS, torch.device("cpu"))[:, None]
    expected = scaled_dot_product_attention(
        x["q"], x["k"], x["v"], attn_mask=seen | ~seen.any(-1, keepdim=True), enable_gqa=True
    ).masked_fill(~seen.any(-1, keepdim=True), 0)
    for groups in alone:
        for window in (1, 6):
            found = attend(x, groups, impl, window=window, visibility=visibility, asking=asking)
            torch.testing.assert_close(found, expected, **EXACT)


@each_case
@each_impl
@pytest.mark.parametrize("visible", ["both ways", "ragged, both ways"])
def test_a_window_over_the_whole_row_is_standard_attention_in_encoders(case, impl, visible):
    """I2; for decoders the layers' tests have it."""
    visibility, x = VISIBILITIES[visible](TOKENS), tensors()
    groups = case.make(case.draw(2, TOKENS), TOKENS, visibility)
    seen = visibility.dense(TOKENS, TOKENS, torch.device("cpu"))[:, None]
    blind = ~seen.any(-1, keepdim=True)
    expected = scaled_dot_product_attention(
        x["q"], x["k"], x["v"], attn_mask=seen | blind, enable_gqa=True
    ).masked_fill(blind, 0)
    found = attend(x, groups, impl, window=TOKENS, visibility=visibility)
    torch.testing.assert_close(found, expected, **EXACT)


@each_case
def test_heads_of_a_key_head_may_stand_in_any_order(case):
    x = tensors()
    groups = case.make(case.draw(2, TOKENS), TOKENS, None)
    order = torch.tensor([1, 0, 3, 2])
    moved = x | {"q": x["q"][:, order], "beta": x["beta"][order]}
    found, expected = (attend(y, groups, "tiled", window=3) for y in (moved, x))
    torch.testing.assert_close(found, expected[:, order], **EXACT)


# Leaks on purpose: each of them is one slip away, and the perturbation law must see it.


def earlier_change(function) -> float:
    """The most that another token t changes an output before t."""
    x = tensors(24)
    before, worst = function(x), 0.0
    for t in range(24):
        changed = {name: y.clone() for name, y in x.items()}
        for name in ("q", "k", "v"):
            changed[name][:, :, t] += 1
        after = function(changed)
        assert (after[:, :, t] - before[:, :, t]).abs().max() > 1e-6
        if t:
            worst = max(worst, (after[:, :, :t] - before[:, :, :t]).abs().max().item())
    return worst


def test_a_leak_through_the_query_s_own_group():
    """A group that is out before its last token is."""

    def leaky(x):
        groups = fixed_groups(4, 24)
        early = replace(groups, end=(groups.start + 1).clamp(max=23))
        sums = summarise(x["k"], x["v"], groups)
        return grouped_attention(
            x["q"], x["k"], x["v"], groups=early, summaries=sums, window=1, impl="reference"
        )

    assert earlier_change(leaky) > 1e-3
    sound = fixed_groups(4, 24)
    assert earlier_change(lambda x: attend(x, sound, "reference", window=1)) < 1e-12


def test_a_leak_through_a_rule_that_counts_groups_instead_of_tokens():
    """Query t of group j may see summaries up to j: that of its own group, not yet complete."""

    def leaky(x):
        sums = summarise(x["k"], x["v"], fixed_groups(4, 24))
        number = torch.arange(24) // 4
        seen = torch.arange(6) <= number[:, None]
        logits = x["q"] @ sums.k.repeat_interleave(2, 1).mT
        return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ sums.v.repeat_interleave(2, 1)

    assert earlier_change(leaky) > 1e-3


def test_a_leak_through_groups_that_are_chosen_before_they_are_masked():
    """The best three of all groups, later ones among them, and only then what may be seen."""

    def run(masked_first: bool):
        def function(x):
            sums = summarise(x["k"], x["v"], fixed_groups(4, 24))
            seen = torch.arange(6) * 4 + 3 <= torch.arange(24)[:, None] - 1
            logits = x["q"] @ sums.k.repeat_interleave(2, 1).mT
            if masked_first:
                logits = logits.masked_fill(~seen, -torch.inf)
            best = logits.topk(3, dim=-1).indices
            chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True) & seen
            own = (x["q"] * x["k"].repeat_interleave(2, 1)).sum(-1, keepdim=True)
            p = torch.cat([logits.masked_fill(~chosen, -torch.inf), own], -1).softmax(-1)
            values = sums.v.repeat_interleave(2, 1)
            return p[..., :-1] @ values + p[..., -1:] * x["v"].repeat_interleave(2, 1)

        return function

    assert earlier_change(run(masked_first=False)) > 1e-3
    assert earlier_change(run(masked_first=True)) < 1e-12


def test_a_leak_through_a_refined_copy_that_two_groups_share():
    """One copy per token, made of all its groups, goes into the earlier summary too."""
    groups = sliding_groups(6, 2, 24)
    into = draw(12, 18)

    def run(shared: bool):
        def function(x):
            rows = x["k"].transpose(1, 2).flatten(2)
            taken = member_attention(*(rows @ into).split(6, dim=-1), groups)
            at, share = groups.members
            if shared:
                per_token = torch.zeros(2, 24, 6, dtype=torch.float64)
                for m in range(groups.count):
                    for i in range(6):
                        per_token[:, at[0, m, i]] += taken[:, m, i] * share[0, m, i]
                taken = per_token[:, at[0].flatten()].unflatten(1, at.shape[1:])
            weight = share / share.sum(-1, keepdim=True)
            more = (taken * weight[..., None]).sum(2)[:, None].expand(-1, 2, -1, -1)
            sums = summarise(x["k"], x["v"], groups)
            sums = Summaries(sums.k + more, sums.v + more)
            return grouped_attention(
                x["q"], x["k"], x["v"], groups=groups, summaries=sums, window=1, impl="reference"
            )

        return function

    assert earlier_change(run(shared=True)) > 1e-3
    assert earlier_change(run(shared=False)) < 1e-12


def test_a_leak_through_shares_that_fall_off_but_never_end():
    """Gaussian shares: every group holds a little of every token, later ones too."""

    def function(x):
        token = torch.arange(24).double()
        share = (-((token[:, None] - (token[::4] + 1.5)) ** 2) / 8).softmax(-1)
        groups = fixed_groups(4, 24)
        kbar, vbar = (
            torch.einsum("im,bhid->bhmd", share / share.sum(0), x[name]) for name in ("k", "v")
        )
        return grouped_attention(
            x["q"], x["k"], x["v"], groups=groups, summaries=Summaries(kbar, vbar), window=1,
            impl="reference",
        )  # fmt: skip

    assert earlier_change(function) > 1e-3


# Gradients.


@pytest.mark.parametrize("asking", [False, True], ids=["tokens ask", "groups ask"])
@each_impl
def test_gradients_by_finite_differences(impl, asking):
    """Through shares that are learned, too: cif's are piecewise linear, slots' are smooth."""
    alpha = (0.3 + 0.3 * torch.rand(1, 12, dtype=torch.float64)).requires_grad_()
    z = draw(1, 12, 2).requires_grad_()
    q, k, v = (draw(1, h, 12, 3).requires_grad_() for h in (2, 1, 1))
    logits, beta = draw(1, 1, 12, 3).requires_grad_(), torch.rand(2).double().requires_grad_()
    values = (q, k, v, logits, beta)

    def run(*given, groups):
        x = dict(zip(("q", "k", "v", "logits", "beta"), given, strict=True))
        return attend(x, groups, impl, asking=asking, window=2)

    def cif(a, *given):
        return run(*given, groups=cif_groups(a, longest=6))

    def slots(z, *given):
        return run(*given, groups=slot_groups(z, block=4, slots=2))

    assert torch.autograd.gradcheck(cif, (alpha, *values), eps=1e-7)
    assert torch.autograd.gradcheck(slots, (z, *values), eps=1e-7)


def test_a_border_s_gradient_is_that_of_its_confidence():
    """The shares stay one; their slope is that of p where a group closes, of 1 - p elsewhere."""
    p = torch.tensor([[0.2, 0.9, 0.4, 0.6, 0.1]], dtype=torch.float64, requires_grad=True)
    groups = BY_NAME["boundary"].make(p, 5, None)
    assert groups.weight[0, :, 0].tolist() == [1.0] * 5
    (slope,) = torch.autograd.grad(groups.weight.sum(), p)
    assert slope[0].tolist() == [-1, 1, -1, 1, -1]


def test_attention_inside_a_group_of_one_takes_nothing():
    """I5, to the last bit, whatever the parameters."""
    taken = member_attention(*(draw(2, 9, 5) for _ in range(3)), fixed_groups(1, 9))
    assert not bool(taken.any())


# Shapes, cost, and what cannot be.


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
        found, plain = (run(count, impl, dtype) for impl in ("tiled", "reference"))
        exact = run(count, "reference", torch.float64)
        assert_matches_oracle(f"{case}", found, plain, exact, 150)


@each_case
@each_impl
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 64, 65, 129])
def test_odd_lengths(case, impl, tokens):
    drawn, x = case.draw(2, tokens), tensors(tokens)
    found = attend(x, case.make(drawn, tokens, None), impl, window=2)
    expected = attend(x, case.make(drawn, tokens, None), "reference", window=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    if tokens < 3:  # nothing is far yet
        standard = scaled_dot_product_attention(
            x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(found, standard, **EXACT)


@each_case
def test_a_batch_is_its_rows_and_two_runs_are_one(case):
    drawn, x = case.draw(2, 150), {n: y.float() for n, y in tensors(150).items()}
    both = attend(x, case.make(drawn, 150, None), "tiled", window=9)
    assert torch.equal(both, attend(x, case.make(drawn, 150, None), "tiled", window=9))
    for b in range(2):
        row = {name: y if name == "beta" else y[b : b + 1] for name, y in x.items()}
        own = None if drawn is None else drawn[b : b + 1]
        alone = attend(row, case.make(own, 150, None), "tiled", window=9)
        torch.testing.assert_close(alone, both[b : b + 1], rtol=0, atol=2e-6)


def test_local_false_leaves_the_own_token_and_the_summaries():
    x, groups = tensors(), fixed_groups(4, TOKENS)
    for impl in ("reference", "tiled"):
        found = attend(x, groups, impl, window=1, local=False)
        sums = summarise(x["k"], x["v"], groups, logits=x["logits"])
        seen = torch.arange(groups.count) < (torch.arange(TOKENS) // 4)[:, None]
        logits = x["q"] @ sums.k.repeat_interleave(2, 1).mT / 6**0.5
        logits = logits + x["beta"][:, None, None] * groups.mass.log()
        own = (x["q"] * x["k"].repeat_interleave(2, 1)).sum(-1, keepdim=True) / 6**0.5
        p = torch.cat([logits.masked_fill(~seen, -torch.inf), own], -1).softmax(-1)
        expected = p[..., :-1] @ sums.v.repeat_interleave(2, 1)
        expected = expected + p[..., -1:] * x["v"].repeat_interleave(2, 1)
        torch.testing.assert_close(found, expected, **EXACT)


def test_local_false_leaves_what_is_looked_into():
    x, groups = tensors(), fixed_groups(4, TOKENS)
    options = {"window": 1, "local": False, "zoom": 2}
    found, expected = (attend(x, groups, impl, **options) for impl in ("tiled", "reference"))
    torch.testing.assert_close(found, expected, **EXACT)
    crossing = Visibility(causal=False, queries=Queries())
    for zoom in (0, 3):  # of a source there are no near tokens anyway, however many ask
        y = x | {"q": draw(2, 4, TOKENS + 9, 6)}
        for impl in ("tiled", "reference"):
            some, same = (
                attend(y, groups, impl, visibility=crossing, zoom=zoom, local=local)
                for local in (False, True)
            )
            torch.testing.assert_close(some, same, **EXACT)


@pytest.mark.parametrize("window", [1, 6, 30])
def test_pairs_are_counted_as_the_definition_has_them(window):
    """Full groups of four: summaries that ended far enough back, and every token after them."""
    far = near = 0
    for t in range(100):
        done = sum(4 * j + 3 <= t - window for j in range(25))
        far, near = far + done, near + t + 1 - 4 * done
    groups = fixed_groups(4, 100)
    assert score_pairs(groups, window=window) == far + near
    asks = score_pairs(groups, window=window, asking=True)
    units = {}
    for t in range(100):
        units[(t + 1) // 4, sum(4 * j + 3 <= t - window for j in range(25))] = t
    assert asks == sum(done for _, done in units) + near


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
        ({"zoom": -1}, r"zoom must be a whole number of tokens of at least 0"),
        ({"local": 1}, r"local must be True or False"),
        ({"beta": "a"}, r"beta must be a number or a tensor \[4\]"),
        ({"beta": torch.ones(3)}, r"beta must be one number or \[4\] \(per head\), got \(3,\)"),
        ({"groups": sliding_groups(4, 2, TOKENS), "zoom": 1}, r"zoom must be 0 where tokens"),
        ({"summaries": Summaries(torch.zeros(2, 2, 3, 6), torch.zeros(2, 2, 3, 6))},
         r"summaries.k must be \[2, 2, 10, 6\], got \(2, 2, 3, 6\)"),
        ({"visibility": Visibility(mutual=torch.zeros(1, TOKENS).long())}, r"visibility must be"),
        ({"visibility": Visibility(causal=True, queries=Queries(positions=torch.zeros(1, TOKENS)
          .long()))}, r"visibility with queries of their own must be Visibility\(causal=False"),
        ({"groups": replace(fixed_groups(4, TOKENS), longest=3)}, r"groups have one of 4 tokens"),
        ({"visibility": VISIBILITIES["ragged documents"](TOKENS)}, r"groups hold padding or cross"),
        ({"visibility": Visibility(padding=torch.arange(TOKENS)[None] < 30)}, r"groups hold padd"),
        ({"query_groups": fixed_groups(3, TOKENS)}, r"query_groups must be None but in a cross"),
        ({"summaries": Summaries(draw(2, 2, 10, 6), draw(2, 2, 10, 6),
          draw(2, 4, 9, 6))}, r"summaries.q must have one query for each of the 10 groups"),
        ({"bias": torch.zeros(1, 1, TOKENS, TOKENS), "zoom": 1}, r"bias must be None where"),
        ({"bias": torch.zeros(TOKENS, TOKENS)}, r"bias must be \[1 or 2, 1 or 4, 37, 37\]"),
        ({"impl": "fused"}, r"impl='fused' cannot serve this grouped_attention call: there are no"),
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
        (lambda: cif_groups(torch.full((1, 9), 0.01)), r"alpha must be from 1/longest"),
        (lambda: slot_groups(torch.zeros(1, 9, 2), block=2, slots=3), r"slots must be at most"),
        (lambda: slot_groups(torch.zeros(1, 9)), r"z must be a floating-point tensor \[B, T, C\]"),
        (lambda: fixed_groups(4, 9, visibility=Visibility(padding=torch.ones(1, 8).bool())),
         r"visibility must be of the same 9 tokens, got 8"),
        (lambda: fixed_groups(4, 9, visibility=Visibility(mutual=torch.zeros(1, 9).long())),
         r"visibility.mutual \(images\) is not defined beside groups"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@each_case
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (1, 1)])
@pytest.mark.parametrize("visible", ["causal", "ragged, both ways"])
def test_a_bias_and_its_gradient(case, shape, visible):
    """A summary's is the mean of its members', by their shares."""
    visibility, drawn = VISIBILITIES[visible](300), case.draw(2, 300)
    groups = case.make(drawn, 300, visibility)
    x = tensors(300) | {"bias": draw(*shape, 300, 300)}

    def run(impl):
        return lambda y: attend(y, groups, impl, window=20, visibility=visibility, bias=y["bias"])

    actual, expected = (with_grads(run(impl), x) for impl in ("tiled", "reference"))
    for name, y in actual.items():
        size = expected[name].abs().max().item()
        torch.testing.assert_close(y, expected[name], rtol=0, atol=1e-12 * (1 + size), msg=name)


def test_a_bias_is_added_to_the_logits_of_tokens_and_to_the_means_of_summaries():
    x, groups, bias = tensors(), fixed_groups(4, TOKENS), draw(1, 4, TOKENS, TOKENS)
    found = attend(x, groups, "tiled", window=1, bias=bias)
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
    torch.testing.assert_close(found, torch.cat(logits, -1).softmax(-1) @ values, **EXACT)
