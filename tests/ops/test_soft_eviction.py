"""Soft eviction against a cache that evicts, and its gradient."""

import pytest
import torch

from heedful.ops.selective.soft_eviction import cached_shares

CHUNKS, CHUNK = 6, 5
TOKENS = CHUNKS * CHUNK


def causal(rows: int = 1) -> torch.Tensor:
    """What the last token of each chunk sees."""
    ends = torch.arange(CHUNK, TOKENS + 1, CHUNK)
    return (torch.arange(TOKENS) < ends[:, None]).expand(rows, -1, -1)


def rising(rows: int) -> torch.Tensor:
    """F of tokens whose order changes while it grows."""
    draws = torch.Generator().manual_seed(0)
    steps = torch.rand(rows, CHUNKS, TOKENS, generator=draws, dtype=torch.float64) ** 4
    return steps.cumsum(1)


def hard(f: torch.Tensor, tokens: int, sinks: int, recent: int) -> torch.Tensor:
    """Which tokens a cache holds after each chunk, token by token."""
    cached, states = [], []
    for chunk in range(CHUNKS):
        cached += range(chunk * CHUNK, (chunk + 1) * CHUNK)
        while len(cached) > tokens:
            free = [j for j in cached[sinks : len(cached) - recent]]
            cached.remove(max(free, key=lambda j: (f[chunk, j].item(), -j)))
        states.append([float(j in cached) for j in range(TOKENS)])
    return torch.tensor(states, dtype=f.dtype)


@pytest.mark.parametrize("tokens", [8, 13, 22])
def test_a_narrow_sigmoid_is_the_cache(tokens, monkeypatch):
    monkeypatch.setattr("heedful.ops.selective.soft_eviction._WIDTH", 1e-4)
    monkeypatch.setattr("heedful.ops.selective.soft_eviction._LEAST_WIDTH", 1e-7)
    monkeypatch.setattr("heedful.ops.selective.soft_eviction._HALVINGS", 60)
    f = rising(3)
    shares = cached_shares(f, causal(3), tokens, sinks=1, recent=2)
    for row in range(3):
        exact = hard(f[row], tokens, 1, 2)
        there = causal()[0]
        torch.testing.assert_close(
            shares[row][there], exact[there], rtol=0, atol=1e-3, msg=f"row {row}"
        )


@pytest.mark.parametrize("tokens", [8, 13, 22])
def test_shares_add_up_to_the_cache_and_never_rise(tokens):
    shares, visible = cached_shares(rising(2), causal(2), tokens, sinks=1, recent=2), causal(2)
    counts, sums = visible.sum(-1), (shares * visible).sum(-1)
    torch.testing.assert_close(sums, counts.clamp(max=tokens).double(), rtol=0, atol=1e-3)
    assert (shares.diff(dim=1) <= 0).all() and shares.min() >= 0 and shares.max() == 1
    assert (shares[:, :, 0] == 1).all()
    assert (shares[:, torch.arange(CHUNKS), torch.arange(CHUNK, TOKENS + 1, CHUNK) - 2] == 1).all()


def test_of_equals_the_oldest_go(monkeypatch):
    monkeypatch.setattr("heedful.ops.selective.soft_eviction._LEAST_WIDTH", 1e-7)
    last = cached_shares(torch.zeros(1, CHUNKS, TOKENS), causal(), 10, sinks=0, recent=0)[0, -1]
    assert (last.diff() >= 0).all() and last[0] < 0.01 < 0.5 < last[-6]


def test_documents_are_cached_apart():
    """Of a second document as many tokens stay as of the same tokens alone."""
    f, visible = rising(1), causal().clone()
    visible[:, 3:, :15] = False
    whole = cached_shares(f, visible, 8, sinks=1, recent=2)
    alone = cached_shares(f[:, 3:, 15:], causal()[:, :3, :15], 8, sinks=1, recent=2)
    torch.testing.assert_close(whole[:, 3:, 15:], alone, rtol=0, atol=1e-4)


def test_a_token_stays_at_the_cost_of_others():
    """At the first eviction the derivative of the sum is zero, and each token's own is negative."""
    f = rising(1).requires_grad_()
    visible = causal()[:, :3]

    def after(f):
        return cached_shares(f[:, :3], visible, 10, sinks=1, recent=2)[0, -1]

    jacobian = torch.autograd.functional.jacobian(after, f.detach())[:, 0, 2, :15]
    free = slice(1, 13)
    assert jacobian[free].diagonal(offset=1).min() < 0
    torch.testing.assert_close(
        jacobian[:15].sum(0), torch.zeros(15, dtype=torch.float64), rtol=0, atol=1e-3
    )
    others = jacobian[1:13, 1:13] - torch.diag(jacobian[1:13, 1:13].diagonal())
    assert (others >= 0).all() and others.max() > 0.05
