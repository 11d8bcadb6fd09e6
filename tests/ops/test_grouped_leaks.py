"""Leaks of grouped attention, made on purpose and found; its gradients."""

from dataclasses import replace

import pytest
import torch

from heedful.ops import Summaries, grouped_attention, summarise
from heedful.ops.grouped import (
    cif_groups,
    fixed_groups,
    member_attention,
    sliding_groups,
)
from helpers.grouped_cases import attend, each_impl, tensors
from helpers.oracle import draw

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
        far = torch.arange(6) <= number[:, None]
        logits = x["q"] @ sums.k.repeat_interleave(2, 1).mT
        return logits.masked_fill(~far, -torch.inf).softmax(-1) @ sums.v.repeat_interleave(2, 1)

    assert earlier_change(leaky) > 1e-3


def test_a_leak_through_groups_that_are_chosen_before_they_are_masked():
    """The best three of all groups, later ones among them, and only then what may be seen."""

    def run(masked_first: bool):
        def function(x):
            sums = summarise(x["k"], x["v"], fixed_groups(4, 24))
            far = torch.arange(6) * 4 + 3 <= torch.arange(24)[:, None] - 1
            logits = x["q"] @ sums.k.repeat_interleave(2, 1).mT
            if masked_first:
                logits = logits.masked_fill(~far, -torch.inf)
            best = logits.topk(3, dim=-1).indices
            selected = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, best, True) & far
            own = (x["q"] * x["k"].repeat_interleave(2, 1)).sum(-1, keepdim=True)
            p = torch.cat([logits.masked_fill(~selected, -torch.inf), own], -1).softmax(-1)
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
            results = member_attention(*(rows @ into).split(6, dim=-1), groups)
            at, share = groups.members
            if shared:
                per_token = torch.zeros(2, 24, 6, dtype=torch.float64)
                for m in range(groups.count):
                    for i in range(6):
                        per_token[:, at[0, m, i]] += results[:, m, i] * share[0, m, i]
                results = per_token[:, at[0].flatten()].unflatten(1, at.shape[1:])
            weight = share / share.sum(-1, keepdim=True)
            more = (results * weight[..., None]).sum(2)[:, None].expand(-1, 2, -1, -1)
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
