"""Flash attention with wide heads keeps the laws, under Triton's interpreter.

The interpreter's time goes by operations, whatever their size: few heads, few blocks.
"""

import pytest
import torch
from mechanisms import VISIBILITIES, ragged
from oracle import against_oracle, fixed, with_grads
from torch import Tensor

from crosses import exhausting
from heedful.ops import Visibility
from heedful.ops.differential.fused import differential_attention_fused
from heedful.ops.differential.reference import differential_attention_reference
from heedful.ops.mta.fused import flash, plan
from heedful.ops.mta.fused.flash import multi_token_attention_fused
from heedful.ops.mta.fused.flash_call import flash_call
from heedful.ops.mta.reference import multi_token_attention_reference

SCALE = 0.3
pytestmark = pytest.mark.device


def draw(
    kernel: tuple[int, int] | None, queries: int, keys: int, *, batch: int = 1, heads: int = 2,
    key_heads: int = 1, dim: int = 16, value_dim: int = 16,
) -> dict[str, Tensor]:  # fmt: skip
    def normal(*size: int) -> Tensor:
        return torch.randn(*size, dtype=torch.float64)

    tensors = {
        "q": normal(batch, heads, queries, dim),
        "k": normal(batch, key_heads, keys, dim),
        "v": normal(batch, key_heads, keys, value_dim),
    }
    if kernel is not None:
        tensors["conv"] = normal(heads, *kernel) / kernel[1] ** 0.5
    return tensors


def with_steps(function):
    """The function as one of tensors and visibility, without the steps that are not fused."""

    def run(x: dict[str, Tensor], visibility: Visibility) -> Tensor:
        rest = dict.fromkeys(("conv", "post_conv", "mix", "post_mix")) | x
        q, k, v = (rest.pop(name) for name in "qkv")
        return function(q, k, v, **rest, visibility=visibility, scale=SCALE)

    return run


mta, mta_reference = map(with_steps, (multi_token_attention_fused, multi_token_attention_reference))


def hold(
    tensors: dict[str, Tensor], dtype: torch.dtype, visibility: Visibility,
    function=mta, reference=mta_reference,
) -> None:  # fmt: skip
    """Law 2 for one case."""
    against_oracle(
        lambda x: function(x, visibility), lambda x: reference(x, visibility), tensors, dtype
    )


@pytest.mark.crossed
@pytest.mark.parametrize(
    "kernel", [(3, 5), (6, 11), (1, 1), (8, 15), (1, 5), (4, 1), None], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("bfloat16")
def test_it_errs_at_most_twice_as_much_as_the_definition(kernel, dtype):
    hold(draw(kernel, 40, 40), dtype, Visibility())


SERVED = (
    "window 1", "window 9", "window 70", "ragged documents", "documents in a window",
    "one row of documents for all", "all padding", "both ways", "ragged, both ways",
)  # fmt: skip


@pytest.mark.crossed
@pytest.mark.parametrize("visible", SERVED)
@pytest.mark.parametrize("queries", [1, 70, 150])
def test_visibilities_and_cross_lengths(visible, queries):
    tensors = draw((3, 5), queries, 150, batch=2, heads=1)
    hold(tensors, torch.float16, VISIBILITIES[visible](150))


@pytest.mark.parametrize("tokens", [1, *(exhausting(x) for x in (2, 3, 17, 63, 64, 257)), 65])
def test_odd_lengths(tokens):
    dtype = torch.float16 if tokens > 64 else torch.float32
    hold(draw((3, 5), tokens, tokens, batch=2 if tokens < 4 else 1), dtype, Visibility())


@pytest.mark.parametrize("dims", [(64, 64), (96, 40), (24, 80), (256, 256)], ids=str)
def test_head_dims(dims):
    tensors = draw((2, 3), 40, 40, heads=1, dim=dims[0], value_dim=dims[1])
    hold(tensors, torch.float16, Visibility())


@pytest.fixture
def small(monkeypatch) -> None:
    """Small tiles and little room: every loop turns, queries stay, heads and rows go in pieces."""
    forward, backward = (
        plan.ForwardLaunch(32, 16, 16, True, 4, 2),
        plan.BackwardLaunch(*[16] * 6, 4, 1),
    )
    monkeypatch.setattr(plan, "forward_launch", lambda *_: forward)
    monkeypatch.setattr(plan, "backward_launch", lambda *_: backward)
    monkeypatch.setattr(plan, "SCRATCH", 8 * 2**10)


@pytest.mark.parametrize("visible", [exhausting("window 9"), "ragged documents"])
def test_many_pieces(small, visible):
    tensors = draw((3, 5), 40, 48, batch=2, heads=2)
    hold(tensors, torch.float32, VISIBILITIES[visible](48))


def test_a_launch_takes_no_more_heads_than_a_grid(monkeypatch):
    monkeypatch.setattr("heedful.ops.mta.fused.flash_call.MOST_PROGRAMS", 4)
    x = flash_call(*[torch.empty(3, 2, 4, 8)] * 3, None, None, True, None, 1.0)
    assert list(x.chunks(4)) == [(0, 4), (4, 2)]


@pytest.mark.parametrize(
    "visible", [exhausting("causal"), exhausting("window 9"), "ragged documents"]
)
def test_no_token_changes_an_earlier_output_by_a_bit(visible):
    visibility = VISIBILITIES[visible](70)
    tensors = {name: x.float() for name, x in draw((3, 5), 70, 70, batch=2, heads=1).items()}
    before = mta(tensors, visibility)
    for token in (1, 30, 32, 33, 69):
        changed = {name: x.clone() for name, x in tensors.items()}
        for name in ("q", "k", "v"):
            changed[name][:, :, token:] += 100
        after = mta(changed, visibility)
        assert torch.equal(after[:, :, :token], before[:, :, :token]), token
        assert not torch.equal(after[:, :, token:], before[:, :, token:])


def test_padding_gives_zero_and_no_gradient():
    padding = ragged(70)[2]
    tensors = {name: x.half() for name, x in draw((3, 5), 70, 70, batch=2).items()}
    found = with_grads(lambda x: mta(x, Visibility(padding=padding)), tensors)
    for name in ("output", "grad q", "grad k", "grad v"):
        assert bool((found[name].transpose(1, 2)[~padding] == 0).all()), name


def test_gradients_of_a_row_do_not_depend_on_the_batch(small, monkeypatch):
    """Gradients of keys are added up over pieces of the map, whose size must not see the batch."""
    monkeypatch.setattr(plan, "SCRATCH", 14 * 2**10)  # two blocks of one row, or one of two rows
    tensors = {name: x.float() for name, x in draw((1, 3), 40, 40, batch=2, heads=1).items()}
    whole = with_grads(lambda x: mta(x, Visibility()), tensors)
    weights = fixed(whole["output"])
    for row in range(2):
        alone = {n: x if n == "conv" else x[row : row + 1] for n, x in tensors.items()}
        leaves = {n: x.clone().requires_grad_() for n, x in alone.items()}
        (mta(leaves, Visibility()).double() * weights[row : row + 1]).sum().backward()
        for name in "qkv":
            assert torch.equal(leaves[name].grad[0], whole[f"grad {name}"][row]), name


@pytest.mark.slow
def test_registered_operators():
    tensors = {name: x.float() for name, x in draw((2, 3), 9, 11).items()}
    q, k, v = (
        tensors[name].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for name in "qkv"
    )
    segments = ragged(11)[0].segments()[:1]
    for options in (
        (tensors["conv"].requires_grad_(), segments, True, 7, SCALE, False),
        (None, None, False, None, SCALE, True),
    ):
        torch.library.opcheck(flash._fused, (q, k, v, *options))
        fixed = [x.detach() if isinstance(x, Tensor) else x for x in (q, k, v, *options)]
        out, lse = flash._fused(*fixed)
        backward = (torch.randn_like(out), out, lse, *fixed[:-1])
        torch.library.opcheck(flash._fused_backward, backward)


@pytest.mark.parametrize("name", ["post_conv", "mix", "post_mix"])
def test_what_it_does_not_take_is_refused(name):
    tensors = draw((3, 5), 4, 4)
    with pytest.raises(ValueError, match="takes no post_conv, mix or post_mix"):
        mta(tensors | {name: torch.eye(2)[None]}, Visibility())


def test_the_message_names_the_limit():
    def ask(*kernels, dtype=torch.float16, dims=(64, 64)):
        q, v = (torch.empty(1, 2, 1, dim, dtype=dtype) for dim in dims)
        return plan.multi_token_attention_limit(q, v, *(torch.empty(2, *size) for size in kernels))

    assert ask((8, 15), (6, 11)) is None
    assert ask(dtype=torch.float64) == "torch.float64 is not float32, float16 or bfloat16"
    assert ask(dims=(300, 64)) == "q has head dim 300, above 256"
    assert ask(dims=(64, 300)) == "v has head dim 300, above 256"
    assert ask((9, 5)) == "c_q 9 is above 8"
    assert ask((2, 3), (2, 17)) == "c_k 17 is above 15"
    many = torch.empty(40_000, 2, 1, 64, dtype=torch.float16, device="meta")
    mix = torch.empty(1, 2, 2, device="meta")
    expected = "batch times heads is 80000, above 65535; split the batch"
    assert plan.multi_token_attention_limit(many, many, mix=mix) == expected
    assert plan.multi_token_attention_limit(many, many) is None  # some heads at a time


def differential(function):
    def run(x: dict[str, Tensor], visibility: Visibility) -> Tensor:
        return function(x["q"], x["k"], x["v"], x["lam"], visibility=visibility, scale=SCALE)

    return run


@pytest.mark.parametrize(
    ("queries", "visible", "dtype"),
    [
        (70, "causal", torch.float16),
        exhausting(70, "ragged documents", torch.float32),
        (33, "window 9", torch.float16),
        exhausting(70, "both ways", torch.float16),
        exhausting(1, "causal", torch.float32),
    ],
)
def test_differential_attention(queries, visible, dtype):
    visibility = VISIBILITIES[visible](70)
    tensors = draw(None, queries, 70, batch=2, heads=8, key_heads=4, value_dim=32)
    tensors["v"], tensors["lam"] = tensors["v"][:, :2], torch.rand(4, dtype=torch.float64)
    hold(
        tensors, dtype, visibility, differential(differential_attention_fused),
        differential(differential_attention_reference),
    )  # fmt: skip
