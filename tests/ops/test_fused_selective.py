"""Fused selective attention keeps the laws, under Triton's interpreter.

The interpreter's time goes by operations, whatever their size: few heads, few blocks.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.ops import Visibility
from heedful.ops.common.terms import Terms
from heedful.ops.selective.fused import plan as launches
from heedful.ops.selective.fused.flash import (
    _fused,
    _fused_backward,
    selective_attention_fused,
    weight_limit,
    weightless,
)
from heedful.ops.selective.reference import selection, selective_attention_reference
from heedful.testing import assert_causal, assert_matches_oracle
from helpers.crosses import exhausting
from helpers.mechanisms import VISIBILITIES, ragged
from helpers.oracle import against_oracle, cast, with_grads

SCALE = 0.3
SMALL = (32, 16, 16)  # several tiles in few tokens, and steps that are half a tile

pytestmark = [pytest.mark.usefixtures("bfloat16"), pytest.mark.device]


def draw(
    queries: int, keys: int, *, batch: int = 1, heads: int = 2, key_heads: int = 1, dim: int = 16,
    value_dim: int = 16, selectors: int = 0, selector_dim: int = 5, state: bool = False,
) -> dict[str, Tensor]:  # fmt: skip
    """Without selectors head 0 selects."""

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64)

    tensors = {
        "q": normal(batch, heads, queries, dim),
        "k": normal(batch, key_heads, keys, dim),
        "v": normal(batch, key_heads, keys, value_dim),
    }
    if selectors:
        tensors["selector_q"] = normal(batch, selectors, queries, selector_dim)
        tensors["selector_k"] = normal(batch, selectors, keys, selector_dim)
    if state:
        tensors["state"] = 2 * torch.rand(batch, selectors or 1, keys, dtype=torch.float64)
    return tensors


def run(function, x: dict[str, Tensor], visibility=None, tau=None, protect_first=True, **more):
    x = dict(x)
    q, k, v, state = x.pop("q"), x.pop("k"), x.pop("v"), x.pop("state", None)
    selector_q, selector_k = x.pop("selector_q", q[:, :1]), x.pop("selector_k", k[:, :1])
    results = function(
        q, k, v, selector_q, selector_k, state, Terms(visibility or Visibility(), SCALE), tau=tau,
        protect_first=protect_first, **more,
    )  # fmt: skip
    return dict(zip(("output", "last", "memory"), results, strict=True))


def fused(**options):
    return lambda x: run(selective_attention_fused, x, **options)


def reference(**options):
    return lambda x: run(selective_attention_reference, x, **options)


def hold(tensors: dict[str, Tensor], dtype: torch.dtype, tile=SMALL, **options) -> dict:
    """Law 2 for one case; the fused results."""
    return against_oracle(fused(tile=tile, **options), reference(**options), tensors, dtype)


DTYPES = {"head 0": torch.float32, "own": torch.bfloat16, "one per head": torch.float16}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("selector", "dtype"),
    [
        (selector, dtype) if dtype == DTYPES[selector] else exhausting(selector, dtype)
        for selector in DTYPES
        for dtype in DTYPES.values()
    ],
    ids=str,
)
def test_it_errs_at_most_twice_as_much_as_the_definition(selector, dtype):
    if selector == "head 0":
        hold(draw(40, 40), dtype)
    else:
        selectors = 1 if selector == "own" else 2
        hold(draw(40, 40, selectors=selectors, state=True), dtype, tau=0.7)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counts", [(4, 4), (4, 2), (3, 1), exhausting((10, 2))], ids=str)
def test_heads_that_share_a_program(counts, monkeypatch):
    """Key heads of their own, in groups, one for all, in groups of five; in several launches."""
    heads, key_heads = counts
    x = draw(20, 20, heads=heads, key_heads=key_heads)
    at_once = hold(x, torch.float16, tau=0.5)
    monkeypatch.setattr("heedful.ops.selective.fused.flash.PROGRAMS", 1)
    options = {"tau": 0.5, "tile": SMALL}
    in_turn = with_grads(fused(**options), cast(x, torch.float16))
    for name, results in in_turn.items():
        assert torch.equal(results, at_once[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("state", [False, True], ids=["no state", "state"])
def test_queries_in_pieces(state, monkeypatch):
    """Long rows are computed some queries at a time; no bit of the outputs depends on it."""
    x = draw(90, 100, batch=2, selectors=1, state=state)
    options = {"tau": 0.7, "visibility": ragged(100)[0]}
    whole = hold(x, torch.float32, **options)
    monkeypatch.setattr("heedful.ops.selective.fused.flash.PIECE", 32)
    pieces = hold(x, torch.float32, **options)
    for name in ("output", "last", "memory"):
        assert torch.equal(pieces[name], whole[name]), name


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.size = max(self.size, out.numel())
        return out


@pytest.mark.slow
def test_nothing_of_the_size_of_a_map_is_allocated(monkeypatch):
    """The largest tensors grow as T does, in the operators themselves."""
    monkeypatch.setattr("heedful.ops.selective.fused.flash.PIECE", 32)
    narrow = {"dim": 2, "value_dim": 2, "selector_dim": 2}  # beside which a map would be large
    forward, backward = [], []
    for tokens in (64, 128):
        x = cast(draw(tokens, tokens, heads=1, selectors=1, **narrow), torch.float32)
        inputs = (*(x[n] for n in ("q", "k", "v", "selector_q", "selector_k")), None, None, None)
        options = (None, 0.5, SCALE, True, list(SMALL))
        with Largest() as allocations:
            out, last, memory, *_ = _fused._init_fn(*inputs, *options, False)
        forward.append(allocations.size)
        *_, remainder, lse, states = _fused._init_fn(*inputs, *options, True)
        with Largest() as allocations:
            _fused_backward._init_fn(
                out, last, memory, out, remainder, lse, states, *inputs, *options
            )
        backward.append(allocations.size)
    assert forward[1] <= 2 * forward[0] and backward[1] <= 2 * backward[0], (forward, backward)


SERVED = ("window 2", "window 40", "ragged documents", "one row of documents for all")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("visible", "queries"),
    [
        ("window 40", 100),
        ("padding in between", 70),
        ("documents in a window", 70),
        ("all padding", 70),
        ("ragged documents", 1),
        exhausting("ragged documents", 100),
        *(exhausting(visible, 70) for visible in SERVED),
    ],
)
def test_visibilities_and_cross_lengths(visible, queries):
    tensors = draw(queries, 100, batch=2, heads=1, selectors=1, state=True)
    visibility = VISIBILITIES[visible](100)
    results = hold(tensors, torch.float32, tile=(64, 64, 32), visibility=visibility, tau=0.7)
    if visibility.padding is not None:
        padded = ~visibility.padding.expand(2, -1)[:, 100 - queries :]
        for name in ("output", "grad q"):
            assert bool((results[name].transpose(1, 2)[padded] == 0).all())


@pytest.mark.parametrize("tokens", [1, 17, 65, *map(exhausting, (2, 3, 63, 64, 111))])
def test_odd_lengths(tokens):
    hold(draw(tokens, tokens, heads=1), torch.float16, tile=())


@pytest.mark.parametrize("dims", [(96, 40, 5), (24, 256, 80)], ids=str)
def test_head_dims(dims):
    dim, value_dim, selector_dim = dims
    tensors = draw(
        40, 40, heads=1, dim=dim, value_dim=value_dim, selectors=1, selector_dim=selector_dim
    )
    hold(tensors, torch.float16, tile=())


def test_first_tokens_that_may_be_hidden():
    hold(draw(40, 40), torch.float32, protect_first=False)


def test_segments_with_state_are_the_whole():
    tensors = draw(40, 40, selectors=2, state=True)

    def in_pieces(q, k, v, selector_q, selector_k, state, terms, **options):
        start, results = 0, []
        for stop in (23, 24, 40):
            queries = slice(start, stop)
            state = torch.cat([state[:, :, :start], whole_state[:, :, queries]], 2)
            results.append(
                selective_attention_fused(
                    q[:, :, queries], k[:, :, :stop], v[:, :, :stop], selector_q[:, :, queries],
                    selector_k[:, :, :stop], state, terms, tile=SMALL, **options,
                )
            )  # fmt: skip
            state, start = results[-1][1], stop
        outputs, _, memories = zip(*results, strict=True)
        return torch.cat(outputs, 2), state, torch.cat(memories, 1)

    x = cast(tensors, torch.float32)
    whole_state = x["state"]
    grads = {"tau": 0.6}
    actual = with_grads(lambda t: run(in_pieces, t, **grads), x)
    plain = with_grads(reference(**grads), x)
    exact = {name: t.double() for name, t in x.items()}
    oracle = with_grads(reference(**grads), exact)
    for name, results in actual.items():
        if name != "grad state":  # handed to the pieces from outside
            assert_matches_oracle(name, results, plain[name], oracle[name], 40)


@pytest.mark.parametrize("dtype", [torch.float32, exhausting(torch.float16)], ids=str)
def test_no_token_changes_an_earlier_output_by_a_bit(dtype):
    tensors = cast(draw(19, 19, key_heads=2), dtype)

    def function(tokens: Tensor) -> Tensor:
        x = dict(zip("qkv", tokens.unflatten(2, (3, 2, 16)).unbind(2), strict=True))
        x = {name: t.transpose(1, 2) for name, t in x.items()}
        return run(selective_attention_fused, x, tile=(16, 16, 16))["output"].transpose(1, 2)

    joined = torch.stack([tensors[name].transpose(1, 2) for name in "qkv"], dim=2)
    assert_causal(function, joined.flatten(2), dim=1)


def strong(queries: int, keys: int, state: bool) -> dict[str, Tensor]:
    """A selector that hides everything within a few tokens; memory and state take part."""
    tensors = draw(queries, keys, selectors=1, state=state)
    for name in ("selector_q", "selector_k"):
        tensors[name] = 6 * tensors[name].abs()
    return cast(tensors, torch.float32)


@pytest.mark.parametrize(("queries", "state"), [(80, False), exhausting(70, True)])
def test_tiles_without_weight_are_left_out_and_no_bit_changes(queries, state):
    x = strong(queries, 80, state)
    options = {"tile": SMALL, "tau": 200.0}
    skipped = with_grads(fused(**options), x)
    whole = with_grads(fused(**options, skip=False), x)
    for name, results in whole.items():
        assert torch.equal(results, skipped[name]), name

    rows, columns, _ = SMALL
    s = selection(x["selector_q"], x["selector_k"], True, Visibility(), SCALE)
    f = (s.cumsum(2) - s)[:, :, ::rows]
    f = f + x["state"][:, :, None] if state else f
    limit = weight_limit(x["q"], x["k"], x.get("state"), 1, SCALE)
    hidden = weightless(limit, f, rows, columns)
    assert hidden[..., -1, 1:3].all(), "the last queries must not need these keys"

    # What is not read cannot spoil anything.
    x["v"][:, :, columns : 3 * columns] = float("nan")
    last = slice((queries - 1) // rows * rows, queries)
    full = run(selective_attention_fused, x, **options, skip=False)["output"][:, :, last]
    skipping = run(selective_attention_fused, x, **options)["output"][:, :, last]
    assert full.isnan().all() and skipping.isfinite().all()


@pytest.mark.parametrize(("hidden", "own", "reach"), [(150, 0, 100), (500, 1000, 3)])
def test_no_tile_with_weight_is_left_out(hidden, own, reach):
    """Logits at their bounds +-U, or a state on the queries' own keys: what is hidden wins."""
    x = draw(16, 32, heads=1, selectors=1, state=True)
    x["q"], x["k"] = torch.zeros_like(x["q"]), torch.zeros_like(x["k"])
    x["q"][..., 0], x["k"][:, :, :16, 0], x["k"][:, :, 16:, 0] = 1, reach / SCALE, -reach / SCALE
    x["q"][:, :, ::2] /= 100  # a block is as far from its bound as its farthest query
    x["selector_q"] *= 0
    x["state"][:, :, :16], x["state"][:, :, 16:] = hidden, own
    results = hold(x, torch.float32, tile=(16, 16, 16), protect_first=False)
    far = results["output"][:, :, 1::2].double()
    expected = x["v"][:, :, :16].mean(2, keepdim=True).expand_as(far)
    torch.testing.assert_close(far, expected, rtol=0, atol=1e-6)


def test_a_running_sum_keeps_its_precision_in_bfloat16():
    """Many equal terms: bfloat16 would stop growing at 256 of them."""
    ones = torch.ones(1, 1, 300, 16, dtype=torch.bfloat16)
    x = {"q": ones, "k": ones, "v": ones, "selector_q": 0.37 * ones, "selector_k": ones}
    results = run(selective_attention_fused, x, tau=1e9, tile=(64, 64, 32))
    exact = run(
        selective_attention_reference, {n: t.double() for n, t in x.items()}, tau=1e9
    )  # fmt: skip
    for name, bits in (("last", 22), ("memory", 15)):
        torch.testing.assert_close(results[name].double(), exact[name], rtol=2.0**-bits, atol=0)


@pytest.mark.slow
def test_the_operators_are_well_formed():
    """opcheck, forward and backward, with every optional tensor and with none."""
    tensors = cast(draw(9, 11, batch=2, heads=2, selectors=1, state=True), torch.float32)
    x = {
        name: t.transpose(1, 2).contiguous().transpose(1, 2) if t.ndim == 4 else t
        for name, t in tensors.items()
    }
    x = {name: t.requires_grad_() for name, t in x.items()}
    inputs = [x[name] for name in ("q", "k", "v", "selector_q", "selector_k")]
    visibility = ragged(11)[0]
    segments, first = visibility.segments(), visibility.first_tokens(11, inputs[0].device)
    for arguments in (
        (*inputs, x["state"], segments, first, 7, 0.3, 0.5, True, list(SMALL), True),
        (*inputs, None, None, None, None, None, 0.5, True, [], True),
    ):
        torch.library.opcheck(_fused, arguments)
        fixed = [t.detach() if isinstance(t, Tensor) else t for t in arguments]
        out, last, memory, *states = _fused(*fixed)
        grads = [torch.randn_like(t) for t in (out, last, memory)]
        torch.library.opcheck(_fused_backward, (*grads, out, *states, *fixed[:-1]))


def test_the_message_names_the_limit():
    def ask(dtype=torch.float16, dims=(64, 64, 64), scale=0.1):
        x = [torch.empty(1, 1, 1, dim, dtype=dtype) for dim in dims]
        return launches.selective_attention_limit(*x, Terms(Visibility(), scale))

    assert ask() is None
    assert ask(dtype=torch.float64) == "torch.float64 is not float32, float16 or bfloat16"
    assert ask(dims=(300, 64, 64)) == "q has head dim 300, above 256"
    assert ask(dims=(64, 64, 300)) == "selector_q has head dim 300, above 256"
    assert ask(scale=-0.1) == "scale -0.1 is negative"
    many = [torch.empty(70_000, 1, 1, 16, device="meta")] * 3
    expected = "batch is 70000, above 65535; split the batch"
    assert launches.selective_attention_limit(*many, Terms(Visibility(), 1.0)) == expected


@pytest.mark.parametrize(
    ("counts", "limits", "expected"),
    [
        ((8, 8, 1), (4, 2), 2),  # key heads of their own
        ((8, 2, 1), (4, 2), 4),  # all of one group
        ((14, 2, 1), (4, 2), 1),  # groups of seven
        ((15, 5, 1), (4, 2), 3),
        ((8, 4, 1), (4, 4), 4),  # two groups of two
        ((8, 8, 8), (4, 2), 1),  # a selector each
    ],
)
def test_heads_of_a_program(counts, limits, expected):
    assert launches.shared_heads(*counts, *limits) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [16, 64, 96, 128, 256])
def test_tiles_of_a_plan_fit_together(dtype, dim):
    x = torch.empty(1, 4, 1, dim, dtype=dtype)
    attend, by_query, by_key, selector = launches.plan(x, x, x, x[:, :1], [])
    assert attend.rows == by_query.rows == selector.rows
    assert selector.rows % by_key.rows == 0
