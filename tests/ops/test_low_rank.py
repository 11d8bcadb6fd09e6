"""Kernels of low rank, and pairs across key heads: what the laws of every mechanism leave out."""

import pytest
import torch
from torch import Tensor

from heedful.ops import LowRank, Visibility, multi_token_attention
from heedful.ops.mta import join
from helpers.mechanisms import VISIBILITIES, ragged
from helpers.oracle import assert_equal_in_fp64, draw

KERNELS = [(3, 5), (6, 11), (1, 1), (8, 15), (1, 5), (4, 1), (40, 21), (3, 129)]
IMPLS = ("tiled", "composed")


def tensors(
    heads: int = 4, key_heads: int = 2, tokens: int = 50, rank: int = 2, rows: int = 6,
    columns: int = 11, size: int = 2, by_head: bool = False, before: int = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """Those of a call, with pairs of heads or no mixing at all, before the softmax and after it."""
    rank = min(rank, rows, columns)
    x = {"q": draw(2, heads, tokens, 5), "k": draw(2, key_heads, tokens, 5)}
    x |= {"v": draw(2, key_heads, tokens, 5), "u": draw(heads, rank, rows)}
    x["w"] = draw(heads if by_head else key_heads, rank, columns)
    sizes = {"mix": before, "post_mix": size}
    return x | {name: draw(heads // n, n, n) for name, n in sizes.items() if n}


def call(impl: str, centred: bool = True, **options):
    """The operator as a function of these tensors."""

    def function(x: dict[str, Tensor]) -> Tensor:
        x = dict(x)
        q, k, v, u, w = (x.pop(name) for name in ("q", "k", "v", "u", "w"))
        conv = LowRank(u, w, centred)
        return multi_token_attention(q, k, v, conv=conv, **x, **options, impl=impl)

    return function


def hold(x: dict[str, Tensor], error: float = 1e-13, **options) -> None:
    for impl in IMPLS:
        assert_equal_in_fp64(call(impl, **options), call("reference", **options), x, error)


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize("centred", [True, False])
def test_kernels_of_any_size(kernel, centred):
    """Also with a band beyond all keys."""
    for tokens in (1, 2, 17, 40, 70) if max(kernel) < 20 else (2, 40):
        hold(tensors(tokens=tokens, rows=kernel[0], columns=kernel[1]), centred=centred)


@pytest.mark.parametrize("visible", [name for name in VISIBILITIES if "mutual" not in name])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("before", [0, 2])
def test_every_visibility(visible, centred, before):
    x = tensors(tokens=150, before=before)
    hold(x, 1e-12, centred=centred, visibility=VISIBILITIES[visible](150))
    x["q"] = x["q"][:, :, 141:]
    hold(x, 1e-12, centred=centred, visibility=VISIBILITIES[visible](150))


def test_the_definition_is_that_of_the_kernels():
    x = tensors()
    conv = LowRank(x["u"], x["w"])
    rest = {"post_mix": x["post_mix"], "visibility": Visibility(padding=ragged(50)[2])}
    qkv = (x["q"], x["k"], x["v"])
    actual = multi_token_attention(*qkv, conv=conv, **rest)
    whole = multi_token_attention(*qkv, conv=conv.kernel(), **rest, impl="reference")
    torch.testing.assert_close(actual, whole, rtol=0, atol=1e-12)


def test_look_back_kernels_leave_out_nothing_up_to_the_query():
    """Equation 4; equation 5 leaves out what is later than its row, of which the last has none."""
    x = tensors(size=0)
    qkv, conv = (x["q"], x["k"], x["v"]), LowRank(x["u"], x["w"], centred=False)
    assert conv.kernel().shape == (4, 6, 21)
    last = conv._replace(u=conv.u[:, :1, -1:], w=conv.w[:, :1])
    for factors, same in ((conv, False), (last, True)):
        actual = multi_token_attention(*qkv, conv=factors)
        whole = multi_token_attention(*qkv, conv=factors.kernel(), impl="reference")
        assert torch.allclose(actual, whole, rtol=0, atol=1e-12) is same


def test_a_window_hides_keys_and_not_what_their_neighbours_have_of_them():
    x = tensors(size=0)
    window = Visibility(window=8)
    for centred in (True, False):
        hold(x, centred=centred, visibility=window)
    before = call("auto", visibility=window)(x)
    x["k"][:, :, 20] += 1
    moved = (call("auto", visibility=window)(x) != before).any(-1).any(1).any(0)
    assert moved.nonzero()[:, 0].tolist() == list(range(20, 20 + 8 + 5))


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "across"),
    [
        (4, 4, 2, False), (4, 4, 2, True), (4, 2, 2, True), (8, 2, 2, True), (8, 4, 4, True),
        (4, 2, 2, False), (8, 4, 4, False), (8, 2, 8, False), (6, 2, 2, False), (9, 3, 9, False),
        (4, 1, 0, False),
    ],
)  # fmt: skip
def test_groups_of_heads_and_key_heads(heads, key_heads, size, across, by_head):
    hold(tensors(heads, key_heads, size=size, by_head=by_head), across_keys=across)
    if size and not (across and by_head and heads > key_heads):
        hold(tensors(heads, key_heads, size=0, before=size, by_head=by_head), across_keys=across)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize(("before", "size"), [(2, 4), (4, 2)])
def test_groups_before_the_softmax_and_after_it_may_differ(before, size, across):
    hold(tensors(8, 4, before=before, size=size), across_keys=across)


def test_pairs_across_key_heads_are_pairs_of_heads_put_in_that_order():
    x = tensors(8, 4)
    order = [h + part for part in (0, 4) for h in (0, 2, 1, 3)]
    conv = LowRank(x["u"], x["w"].repeat_interleave(2, dim=0))
    plain = {name: x[name].repeat_interleave(2, dim=1)[:, order] for name in ("k", "v")}
    expected = multi_token_attention(
        x["q"][:, order], **plain, conv=LowRank(conv.u[order], conv.w[order]),
        post_mix=x["post_mix"], impl="reference",
    )  # fmt: skip
    for impl in ("reference", *IMPLS):
        actual = call(impl, across_keys=True)(x)
        torch.testing.assert_close(actual[:, order], expected, rtol=0, atol=1e-12)


def test_mixing_across_key_heads_needs_no_convolution():
    x = tensors(before=2)
    rest = {name: x[name] for name in ("q", "k", "v", "mix", "post_mix")}
    assert_equal_in_fp64(
        *(lambda y, impl=impl: multi_token_attention(**y, across_keys=True, impl=impl)
          for impl in ("auto", "reference")), rest, 1e-13,
    )  # fmt: skip


@pytest.mark.parametrize("centred", [True, False])
def test_sinks(centred):
    x = tensors(before=2) | {"sinks": draw(4)}
    for visibility in (None, ragged(50)[0], Visibility(causal=False)):
        hold(x, centred=centred, visibility=visibility)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_scales_that_are_not_positive(scale):
    hold(tensors(), scale=scale)
    hold(tensors(before=2), scale=scale)


@pytest.mark.parametrize("centred", [True, False])
def test_one_key_gives_logits_no_gradient(centred):
    """Torch's kernels leave rounding there, which the laws of other mechanisms know none of."""
    x = {name: t.float().requires_grad_() for name, t in tensors(size=0).items()}
    out = call("auto", centred, visibility=Visibility(window=1))(x)
    grads = torch.autograd.grad(out.sum(), [x[name] for name in ("q", "k", "u", "w")])
    assert all(bool((g.abs() < 1e-4).all()) for g in grads)
    torch.testing.assert_close(out, x["v"].repeat_interleave(2, dim=1))


def test_a_model_of_the_identity_is_standard_attention_to_the_bit_and_learns_at_once():
    x = {name: t.float() for name, t in tensors(before=2).items()}
    x["mix"].copy_(torch.eye(2))
    x["post_mix"].copy_(torch.eye(2))
    x["u"][:, 0] = torch.eye(6)[-1]
    x["w"].zero_()[:, 0, 5] = 1
    leaves = {name: t.requires_grad_() for name, t in x.items()}
    out = call("auto")(leaves)
    standard = torch.nn.functional.scaled_dot_product_attention(
        x["q"], x["k"], x["v"], is_causal=True, enable_gqa=True
    )
    assert torch.equal(out, standard)
    with torch.no_grad():
        assert torch.equal(call("auto")(leaves), standard)
    grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
    expected = torch.autograd.grad(call("reference")(leaves).square().sum(), list(leaves.values()))
    for actual, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, reference)
    assert grads[4][:, 1].abs().sum() > 0, "the second rank has a gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("visibility", [Visibility(), Visibility(window=9)])
def test_the_calls_on_a_gpu_fit_torchs_kernels(dtype, visibility):
    """The meta device stands for it; shapes and dtypes are all that it knows."""
    x = {name: t.to("meta", dtype).requires_grad_() for name, t in tensors().items()}
    x |= {name: x[name].detach().float().requires_grad_() for name in ("u", "w", "post_mix")}
    out = call("composed", visibility=visibility, across_keys=True)(x)
    assert out.shape == (2, 4, 50, 5) and out.dtype == dtype
    grads = torch.autograd.grad(out.sum(), list(x.values()))
    assert [g.shape for g in grads] == [t.shape for t in x.values()]
    kernel = join._kernel(x["q"], None if visibility.plain else x["q"])
    plain = visibility.plain and dtype == torch.bfloat16
    assert kernel is (join._Flash if plain else join._Efficient)


def test_what_it_does_not_serve():
    x = tensors()
    some = {"bias": draw(1, 1, 50, 50), "softcap": 3.0, "dropout_p": 0.1}
    some |= {"post_conv": draw(4, 3, 5)}
    some["visibility"] = Visibility(mutual=torch.zeros(1, 50, dtype=torch.int64))
    for name, value in some.items():
        with pytest.raises(
            ValueError, match=rf"impl='tiled' does not support .* {name}.*; use conv"
        ):
            call("auto", **{name: value})(x)
    shared = tensors(by_head=True, before=2)
    with pytest.raises(ValueError, match=r"conv.w must be of the 2 key heads .* across_keys=False"):
        call("auto", across_keys=True)(shared)
    with pytest.raises(ValueError, match=r"impl='fused' does not support .* of low rank"):
        call("fused")(x)
    with pytest.raises(ValueError, match="across_keys does not go with a conv of full rank"):
        multi_token_attention(x["q"], x["k"], x["v"], conv=draw(4, 6, 11), across_keys=True)


def test_factors_that_do_not_fit():
    x = tensors()
    cases = {
        r"conv must have u \[4, R, c_q\] and w \[4 or 2, R, c_k\]": {"u": draw(2, 2, 6)},
        r"conv.u must be \[H, R, c_q\], got": {"u": draw(4, 6)},
        "conv.w must be finite": {"w": x["w"] * float("nan")},
        "conv has rank 7, above that of any kernel of 6 x 11; use a rank of at most 6": {
            "u": draw(4, 7, 6),
            "w": draw(2, 7, 11),
        },
        r"conv.w must have an odd c_k .* got 10; .* centred=False": {"w": draw(2, 2, 10)},
    }
    for message, changed in cases.items():
        with pytest.raises(ValueError, match=message):
            call("auto")(x | changed)
    with pytest.raises(ValueError, match=r"conv\.centred must be True or False, got 1"):
        call("auto", centred=1)(x)
    post = LowRank(x["u"], x["w"])
    with pytest.raises(ValueError, match=r"post_conv must be kernels .* use .kernel\(\)"):
        multi_token_attention(x["q"], x["k"], x["v"], post_conv=post)
    odd = tensors(6, 3, size=0)
    with pytest.raises(ValueError, match=r"groups of 2 heads across key heads, .* the 3 key heads"):
        call("auto", across_keys=True, post_mix=draw(3, 2, 2))(odd)
