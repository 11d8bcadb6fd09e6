"""Differential attention against its definition by explicit loops (arXiv 2410.05258, eq. 1)."""

import pytest
import torch
from torch import Tensor

from heedful.ops import differential_attention
from helpers.loops import capped, cases, dot, grid, sight, softmax, weighted
from helpers.oracle import draw


def by_loops(q, k, v, lam: list[float], visibility, softcap=None, sinks=None) -> Tensor:
    """Query heads 2p and 2p + 1 are pair p; key heads likewise, fewer of them under GQA."""
    batch, heads, queries, dim = q.shape
    pairs, keys, group = heads // 2, k.shape[2], heads // k.shape[1]
    sees = sight(visibility, queries, keys)
    ql, kl = q.tolist(), k.tolist()
    weights = grid(batch, pairs, queries, keys)
    for b in range(batch):
        for p in range(pairs):
            for i in range(queries):
                maps = [
                    softmax(
                        [
                            capped(
                                dot(ql[b][2 * p + side][i], kl[b][2 * (p // group) + side][j])
                                / dim**0.5,
                                softcap,
                            )
                            if sees(b, i, j)
                            else None
                            for j in range(keys)
                        ],
                        None if sinks is None else sinks[2 * p + side].item(),
                    )
                    for side in (0, 1)
                ]
                weights[b][p][i] = [x - lam[p] * y for x, y in zip(maps[0], maps[1], strict=True)]
    return weighted(weights, v.tolist(), group)


@pytest.mark.crossed
@pytest.mark.parametrize("kind", cases(9))
@pytest.mark.parametrize("queries", [9, 4, 1])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_loops(kind, queries, softcap):
    q, k, v = draw(2, 8, queries, 3), draw(2, 4, 9, 3), draw(2, 2, 9, 6)
    lam = torch.tensor([0.3, -0.2, 0.9, 1.5], dtype=torch.float64)
    visibility, sinks = cases(9)[kind], None if softcap is None else draw(8)
    expected = by_loops(q, k, v, lam.tolist(), visibility, softcap, sinks)
    options = {"visibility": visibility, "softcap": softcap, "sinks": sinks}
    for impl in ("reference", "tiled", "composed"):
        actual = differential_attention(q, k, v, lam=lam, **options, impl=impl)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "tiled", "composed"])
def test_one_lambda_serves_all_pairs(impl):
    q, k, v = draw(1, 4, 5, 3), draw(1, 2, 5, 3), draw(1, 1, 5, 6)
    lam = torch.tensor(0.6, dtype=torch.float64)
    expected = by_loops(q, k, v, [0.6, 0.6], None)
    actual = differential_attention(q, k, v, lam=lam, impl=impl)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("impl", ["reference", "tiled", "composed"])
def test_equal_maps_cancel(impl):
    """With both maps of a pair equal and lambda one, nothing is left, in bfloat16 too.

    Equal rows of a product may differ in their last bit where they lie at another place in memory,
    so what is left is bounded by n terms rounded in fp32, far below one rounding to bfloat16.
    """
    q, k = (draw(1, 2, 30, 8).repeat_interleave(2, dim=1).bfloat16() for _ in range(2))
    v = draw(1, 2, 30, 16).bfloat16()
    out = differential_attention(q, k, v, lam=torch.tensor(1.0), impl=impl)
    tolerance = 30 * torch.finfo(torch.float32).eps * v.abs().max()
    assert bool((out.abs() <= tolerance).all())
