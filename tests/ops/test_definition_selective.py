"""Selective attention against its definition by explicit loops (arXiv 2410.02703, section 3)."""

import pytest
import torch
from torch import Tensor

from heedful.ops import Visibility, selective_attention
from heedful.ops.selective.sums import RunningTotal
from heedful.testing import assert_matches_oracle
from helpers.loops import capped, cases, dot, grid, sight, softmax, weighted
from helpers.oracle import EXACT, draw

each_impl = pytest.mark.parametrize("impl", ["reference", "tiled", "composed"])
TAU = 0.4


def first_tokens(visibility: Visibility | None, row: int, keys: int) -> set[int]:
    """The first real token of the row and of each of its documents."""
    firsts, numbers = set(), set()
    for token in range(keys):
        document = 0
        if visibility is None:
            return {0}
        if visibility.padding is not None and not visibility.padding[row, token]:
            continue
        if visibility.documents is not None:
            document = int(visibility.documents[row, token])
        if document not in numbers:
            numbers.add(document)
            firsts.add(token)
    return firsts


def by_loops(
    q,
    k,
    v,
    *,
    selector_q,
    selector_k,
    protect_first,
    visibility,
    state=None,
    softcap=None,
    sinks=None,
):
    """Outputs, state after the last query, and memory, from F[i, j] = sum of S[p, j], j < p < i."""
    batch, heads, queries, dim = q.shape
    keys, group, selectors = k.shape[2], heads // k.shape[1], selector_q.shape[1]
    sees, offset = sight(visibility, queries, keys), keys - queries
    ql, kl, sq, sk = (x.tolist() for x in (q, k, selector_q, selector_k))
    f = grid(batch, selectors, queries + 1, keys)
    for b in range(batch):
        protected = first_tokens(visibility, b, keys) if protect_first else set()
        for s in range(selectors):
            for i in range(queries + 1):
                for j in range(keys):
                    total = 0.0 if state is None else state[b, s, j].item()
                    for p in range(i):
                        if sees(b, p, j) and j < p + offset and j not in protected:
                            total += max(0.0, dot(sq[b][s][p], sk[b][s][j]) / dim**0.5)
                    f[b][s][i][j] = total
    weights = grid(batch, heads, queries, keys)
    memory = torch.zeros(batch, queries, dtype=torch.float64)
    for b in range(batch):
        for i in range(queries):
            for h in range(heads):
                hidden = f[b][h if selectors > 1 else 0][i]
                weights[b][h][i] = softmax(
                    [
                        capped(dot(ql[b][h][i], kl[b][h // group][j]) / dim**0.5, softcap)
                        - hidden[j]
                        if sees(b, i, j)
                        else None
                        for j in range(keys)
                    ],
                    None if sinks is None else sinks[h].item(),
                )
            for s in range(selectors):
                clipped = [min(f[b][s][i][j], TAU) for j in range(keys) if sees(b, i, j)]
                memory[b, i] += sum(clipped) / selectors
    f = torch.tensor(f, dtype=torch.float64)
    return weighted(weights, v.tolist(), group), f[:, :, -1], memory


@pytest.mark.crossed
@pytest.mark.parametrize("kind", cases(10))
@pytest.mark.parametrize("queries", [10, 4, 1])
@pytest.mark.parametrize("selector", ["head 0", "own", "per head"])
@pytest.mark.parametrize("protect_first", [True, False])
def test_loops(kind, queries, selector, protect_first):
    q, k, v = draw(2, 4, queries, 3), draw(2, 2, 10, 3), draw(2, 2, 10, 5)
    softcap = 0.7 if queries == 4 else None
    count = {"head 0": 1, "own": 1, "per head": 4}[selector]
    own = {"selector_q": draw(2, count, queries, 2), "selector_k": draw(2, count, 10, 2)}
    state = draw(2, count, 10).abs() if queries < 10 else None
    options = {"visibility": cases(10)[kind], "protect_first": protect_first, "state": state}
    options |= {"softcap": softcap, "sinks": draw(4) if queries == 4 else None}
    inputs = {} if selector == "head 0" else own
    selectors = {"selector_q": q[:, :1], "selector_k": k[:, :1]} if selector == "head 0" else own
    expected = by_loops(q, k, v, **selectors, **options)
    for impl in ("reference", "tiled"):
        actual = selective_attention(q, k, v, **inputs, **options, tau=TAU, impl=impl)
        for x, y in zip(actual, expected, strict=True):
            torch.testing.assert_close(x, y, **EXACT)


def hidden_after_each_query(impl: str, q: Tensor, k: Tensor, **options) -> Tensor:
    """F[i, j] for i = 0 ... T: the state handed on from token to token."""
    tokens, state = q.shape[2], None
    f = torch.zeros(tokens + 1, tokens, dtype=q.dtype)
    for i in range(tokens):
        keys = k[:, :, : i + 1]
        actual = selective_attention(
            q[:, :, i : i + 1], keys, keys, state=state, impl=impl, **options
        )
        state = actual.state
        f[i + 1, : i + 1] = state[0, 0]
    return f


@each_impl
def test_f_never_falls_and_spares_the_token_itself_its_neighbour_and_the_first(impl):
    q, k = draw(1, 1, 12, 4), draw(1, 1, 12, 4)
    f = hidden_after_each_query(impl, q, k)
    assert bool((f[1:] >= f[:-1]).all())
    assert bool((f.diagonal() == 0).all()), "no token hides a key from itself"
    assert bool((f.diagonal(-1) == 0).all()), "a token cannot hide itself from the next"
    assert bool((f[:, 0] == 0).all()), "the first token is protected"
    assert f[3, 1].item() == pytest.approx(
        max(0.0, (q[0, 0, 2] @ k[0, 0, 1]).item() / 2), abs=1e-12
    )
    bare = hidden_after_each_query(impl, q, k, protect_first=False)
    assert bare[-1, 0] > 0
    torch.testing.assert_close(bare[:, 1:], f[:, 1:], **EXACT)


@each_impl
def test_the_usual_mistakes_would_show(impl):
    """A running sum over keys instead of queries, no shift, and no protection are all different."""
    q, k, v = draw(1, 2, 12, 4), draw(1, 2, 12, 4), draw(1, 2, 12, 4)
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    logits = (q @ k.mT / 2).masked_fill(~visible, float("-inf"))
    s = logits[:, :1].clamp(min=0).tril(-1)
    s_protected = s.clone()
    s_protected[..., 0] = 0

    def output(f: Tensor) -> Tensor:
        return (logits - f).softmax(-1) @ v

    actual = selective_attention(q, k, v, impl=impl).output
    torch.testing.assert_close(actual, output(s_protected.cumsum(2) - s_protected), **EXACT)
    for wrong in (s_protected.cumsum(3) - s_protected, s_protected.cumsum(2), s.cumsum(2) - s):
        assert (actual - output(wrong)).abs().max() > 1e-3


@each_impl
def test_a_selector_that_starts_at_zero_hides_nothing_and_can_learn(impl):
    q, k, v = draw(1, 2, 9, 4), draw(1, 2, 9, 4), draw(1, 2, 9, 4)
    selector_q = draw(1, 1, 9, 3)
    selector_k = torch.zeros(1, 1, 9, 3, dtype=torch.float64, requires_grad=True)
    weights = draw(1, 2, 9, 4)
    out = selective_attention(
        q, k, v, selector_q=selector_q, selector_k=selector_k, impl=impl
    ).output
    (grad,) = torch.autograd.grad((out * weights).sum(), selector_k)

    # At zero the ReLU counts with slope one: the gradient is that of the bare logits.
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    s = (selector_q @ selector_k.mT / 2).tril(-1) * (torch.arange(9) > 0)
    logits = (q @ k.mT / 2 - (s.cumsum(2) - s)).masked_fill(~visible, float("-inf"))
    (expected,) = torch.autograd.grad(((logits.softmax(-1) @ v) * weights).sum(), selector_k)
    assert expected.abs().max() > 1e-2
    torch.testing.assert_close(grad, expected, **EXACT)


@each_impl
def test_f_is_summed_in_fp32_for_half_precision(impl):
    """Each of 2047 queries adds one; a total in bfloat16 would stop at 256."""
    tokens = 2048
    ones = torch.ones(1, 1, tokens, 1, dtype=torch.bfloat16)
    actual = selective_attention(ones, ones, ones, tau=1.0, impl=impl)
    assert actual.state.dtype == torch.float32
    expected = torch.arange(tokens - 1, -1, -1).float()
    expected[0] = 0
    assert torch.equal(actual.state[0, 0], expected)
    # Query i has i - 2 keys hidden by at least one: all but the first, the last and itself.
    hidden = (torch.arange(tokens) - 2).clamp(min=0).float()
    assert torch.equal(actual.memory[0], hidden)


def test_a_total_is_taken_apart_again():
    """Before each block the backward finds what the forward had, to the rounding of a logit."""
    parts = torch.rand(300, 1, 1, 50) * torch.logspace(-6, 4, 300)[:, None, None, None]
    total, before = RunningTotal(torch.zeros(2, 1, 1, 50)), []
    for part in parts:
        before.append(total.rounded())
        total.add(part, slice(0, 50))
    unit = torch.finfo(torch.float32).eps
    exact = parts.double().sum(0)
    torch.testing.assert_close(total.rounded().double(), exact, rtol=unit, atol=0)
    for part, expected in zip(parts.flip(0), reversed(before), strict=True):
        total.add(-part, slice(0, 50))
        torch.testing.assert_close(total.rounded(), expected, rtol=unit, atol=unit)


def test_gradients_after_much_has_been_hidden():
    """Totals of some thousands, next to which an early F is small."""
    tokens = 400
    tensors = {"q": 3 * draw(1, 2, tokens, 8), "k": 3 * draw(1, 2, tokens, 8)}
    tensors["v"], direction = draw(1, 2, tokens, 8), draw(1, 2, tokens, 8)

    def grads(impl: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(torch.float32).to(dtype).requires_grad_() for x in tensors.values()]
        out = selective_attention(*leaves, impl=impl)
        assert out.state.max() > 1000
        return torch.autograd.grad((out.output * direction).sum(), leaves)

    tiled, plain = grads("tiled", torch.float32), grads("reference", torch.float32)
    for name, *x in zip(tensors, tiled, plain, grads("reference", torch.float64), strict=True):
        assert_matches_oracle(f"grad {name}", *x, terms=tokens)


@each_impl
def test_an_infinite_state_hides_a_key_for_good(impl):
    q, k, v = (draw(1, 2, 9, 4).requires_grad_() for _ in range(3))
    state = torch.zeros(1, 1, 9, dtype=torch.float64)
    state[..., 3] = float("inf")
    out = selective_attention(q[:, :, 5:], k, v, state=state, impl=impl)
    assert out.state[0, 0, 3] == float("inf")
    grads = torch.autograd.grad(out.output.square().sum(), (q, k, v))
    assert bool(out.output.isfinite().all()) and all(bool(g.isfinite().all()) for g in grads)
    assert bool((grads[2][:, :, 3] == 0).all())
