"""`impl="composed"`, what a GPU gets, run on a CPU: the same laws, and few launches."""

import functools
import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.counted import SHAPES, Counter, calls
from heedful.ops import Visibility, selective_attention
from heedful.ops.common import precision, tiles
from heedful.ops.mta.convolution import _conv2d, _kernel_gradient_in_patches, kernel_gradient
from heedful.ops.selective.sums import above, below
from helpers.mechanisms import LOW_RANK, MECHANISMS, TWO_SIDED, VISIBILITIES, Shape, run_by
from helpers.oracle import against_oracle, with_grads

BY_NAME = {str(mechanism): mechanism for mechanism in MECHANISMS}
every = pytest.mark.parametrize("mechanism", [*MECHANISMS, *LOW_RANK, *TWO_SIDED], ids=str)


@pytest.fixture(autouse=True)
def device_blocks(small_blocks, monkeypatch):
    """Small ones; bf16 products have fp32 results there."""
    monkeypatch.setattr(precision, "bf16_on_cpu", lambda: True)
    widen = precision.widen
    monkeypatch.setattr(precision, "_product", lambda a, b: widen(a) @ widen(b))


@every
def test_they_err_at_most_twice_as_much_as_the_definition(mechanism):
    functions = (run_by(mechanism, impl) for impl in ("composed", "reference"))
    against_oracle(*functions, mechanism.draw(Shape().long(111)), torch.bfloat16, str(mechanism))


@pytest.mark.parametrize("term", ["bias", "bias of all heads", "softcap", "sinks", "dropout"])
@pytest.mark.parametrize("selectors", [1, 4])
def test_what_else_selective_attention_takes_there(term, selectors):
    """A bias is one with -F; the others change the map, whose tiles are then made here."""
    shape, draw = Shape(queries=40, keys=50), functools.partial(torch.randn, dtype=torch.float64)
    tensors = BY_NAME["selective-own" if selectors == 1 else "selective-per-head"].draw(shape)
    terms = {
        "bias": {"bias": draw(1, 4, 40, 50)},
        "bias of all heads": {"bias": draw(2, 1, 40, 50)},
        "sinks": {"sinks": draw(4)},
    }
    options = {"softcap": {"softcap": 1.5}, "dropout": {"dropout_p": 0.3, "seed": 5}}
    tensors |= terms.get(term, {}) | {"state": draw(2, selectors, 50).abs()}
    visibility = VISIBILITIES["ragged documents"](50)

    def call(impl):
        return lambda x: selective_attention(
            **x, **options.get(term, {}), tau=0.7, visibility=visibility, impl=impl
        )

    actual, expected = (with_grads(call(impl), tensors) for impl in ("composed", "reference"))
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["mta-pre-conv", "mta-post-conv", "mta-full"])
def test_what_else_multi_token_attention_takes_there(name):
    """Sinks and a soft cap beside the softmax's backward, a bias; some rows see nothing."""
    draw = functools.partial(torch.randn, dtype=torch.float64)
    tensors = BY_NAME[name].draw(Shape(queries=40, keys=50))
    for extra in ({"sinks": draw(4)}, {"bias": draw(1, 4, 40, 50), "sinks": draw(4)}):
        for options in ({}, {"softcap": 1.5}):
            runs = (
                run_by(BY_NAME[name], impl, VISIBILITIES["ragged documents"](50), **options)
                for impl in ("composed", "reference")
            )
            actual, expected = (with_grads(run, tensors | extra) for run in runs)
            for part, x in actual.items():
                torch.testing.assert_close(x, expected[part], rtol=0, atol=1e-12, msg=part)


@pytest.mark.parametrize("name", ["mta-pre-conv", "mta-full"])
def test_documents_in_bf16(name):
    """The convolution is in fp32 where it must not cross their borders."""
    visibility = VISIBILITIES["ragged documents"](90)
    functions = (run_by(BY_NAME[name], impl, visibility) for impl in ("composed", "reference"))
    against_oracle(*functions, BY_NAME[name].draw(Shape().long(90)), torch.bfloat16, name)


@pytest.mark.parametrize("name", ["mta-pre-conv", "mta-post-conv", "talking-heads", "mta-full"])
def test_with_identity_parameters_bf16_errs_as_torch_does(name):
    """The rms error of output and gradients, against torch's flash kernel for the same inputs.

    One tile more is rounded where heads are mixed behind the softmax. A rounding as large as all of
    torch's would be a factor of the root of two.
    """
    torch.manual_seed(0)
    tensors = BY_NAME[name].draw(Shape(batch=1, key_heads=4, dim=64).long(300))
    tensors = {part: x.bfloat16() for part, x in BY_NAME[name].identity(tensors).items()}
    upstream = torch.randn(tensors["q"].shape).bfloat16()

    def results(function, dtype=torch.bfloat16):
        x = {part: tensor.to(dtype).requires_grad_() for part, tensor in tensors.items()}
        out = function(x)
        grads = torch.autograd.grad(out, [x[part] for part in "qkv"], upstream.to(dtype))
        return [part.double() for part in (out.detach(), *grads)]

    def attention(x):
        q, k, v = (x[part] for part in "qkv")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    exact = results(attention, torch.float64)
    actual = results(lambda x: run_by(BY_NAME[name], "composed")(x)[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash = results(attention)
    for part, *x in zip(("output", *"qkv"), exact, actual, flash, strict=True):
        own, torchs = ((y - x[0]).norm() / x[0].norm() for y in x[1:])
        assert own <= 2**0.5 * torchs, (part, own, torchs)


def test_logits_of_bf16_are_not_rounded_before_the_softmax(monkeypatch):
    """Of products that round them the error is a hundred times as large."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 200, 64).to(torch.bfloat16)
    errors = []
    for multiply in (precision._product, lambda a, b: precision.widen(a @ b)):
        monkeypatch.setattr(precision, "_product", multiply)
        logits = precision.scores(q, k, 0.125)
        exact = q.double() @ k.double().mT * 0.125
        errors.append((logits - exact).pow(2).mean().sqrt().item())
    assert errors[0] < errors[1] / 100


def test_products_there_are_launched_with_fp32_results(monkeypatch):
    """As the meta device has them: no bf16 tensor between the operands and the result."""
    monkeypatch.undo()
    a, b = (
        torch.empty(2, 3, n, m, dtype=torch.bfloat16, device="meta") for n, m in ((4, 5), (5, 6))
    )
    with Counter() as counter:
        out = precision.product(a, b)
    assert out.dtype == torch.float32 and out.shape == (2, 3, 4, 6) and counter.launches == 1
    assert precision.scores(a, b.mT, 0.5).dtype == torch.float32


def test_products_are_added_in_place(monkeypatch):
    """To a part of a sum, without a tensor between them; the count takes the sum as read, too."""
    draw = functools.partial(torch.randn, dtype=torch.float64)
    sums, a, b = draw(2, 3, 5, 9), draw(2, 3, 5, 4), draw(2, 3, 4, 6)
    expected = sums.clone()
    expected[..., 2:8] += a @ b
    precision.add_product_(sums[..., 2:8], a, b)
    torch.testing.assert_close(sums, expected)
    monkeypatch.undo()
    a, b = (x.to("meta", torch.bfloat16) for x in (a, b))
    sums = sums.to("meta", torch.float32)
    with Counter() as counter:
        precision.add_product_(sums, a, torch.cat([b, b[..., :3]], -1))
    product = 2 * a.numel() + 2 * 6 * 4 * 9 + 2 * 4 * sums.numel()
    assert counter.launches == 2 and counter.nbytes == product + 2 * (2 * 9 * 6 * 4)


@pytest.mark.parametrize("size", [(1, 1), (6, 11), (4, 3), (8, 15)], ids=str)
def test_the_gradient_of_a_kernel_in_patches(size):
    """Whatever part of them lies outside the tile, above it, below it, or on both sides."""
    rows, columns = size
    sides = itertools.product((0, rows - 1), repeat=2)
    for tile, (top, bottom) in itertools.product(((1, 1), (7, 22), (9, 60), (29, 111)), sides):
        outputs = tile[0] + top + bottom - rows + 1
        if outputs < 1:
            continue
        x = torch.randn(2, 3, *tile, dtype=torch.float64)
        grad, kernel = x.new_ones(2, 3, outputs, tile[1]).normal_(), x.new_empty(3, rows, columns)
        patches = _kernel_gradient_in_patches(grad, x, kernel, top, torch.float64)
        expected = kernel_gradient(grad, x, kernel, top, bottom, None, 0)
        torch.testing.assert_close(patches, expected)


GOALS = {
    "selective": (800, 23e9),  # of what its kernels do not serve
    "talking-heads": (400, 17.5e9),
    "mta-pre": (700, 16.5e9),
    "mta": (1000, 32e9),
}


@pytest.mark.parametrize("mechanism", GOALS)
def test_launches_of_a_call_are_few_and_so_are_bytes(mechanism, monkeypatch):
    """Forward and backward, at batch 4, 16 heads of 96, 2,048 tokens."""
    monkeypatch.undo()
    with Counter() as counter:
        calls(SHAPES["A"])[mechanism]()
    launches, nbytes = GOALS[mechanism]
    assert 0 < counter.launches <= launches and counter.nbytes <= nbytes


def test_a_tile_of_a_long_sequence_has_fewer_rows(monkeypatch):
    """And a mask that no other block shares is not kept until the map is whole."""
    monkeypatch.undo()
    meta = torch.device("meta")
    sight = tiles.Sight(None, False, True, 2**40)
    scopes = (tiles.Scope(sight, n, n, meta, composed=True) for n in (4096, 32768, 65536, 2**20))
    rows = [scope.rows_per_block(16) for scope in scopes]
    assert rows == [256, 256, 128, 64]
    scope = tiles.Scope(sight, 4096, 4096, meta, composed=True)
    for start in range(0, 4096, 64):
        scope.masked(range(start, start + 64), range(start + 64))
    assert len(scope._masks) <= 4


def test_convolutions_leave_the_choice_of_tf32_as_it_was():
    """Away from a CPU they switch it off, and on again, also if they fail."""
    setting, seen = torch.backends.cudnn.allow_tf32, []

    class Setting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(torch.backends.cudnn.allow_tf32)
            return func(*args, **(kwargs or {}))

    x, kernels = (torch.empty(*size, device="meta") for size in ((1, 2, 6, 8), (2, 1, 3, 3)))
    with Setting():
        assert _conv2d(x, kernels, (1, 1)).shape == x.shape
        with pytest.raises(RuntimeError):
            _conv2d(x, kernels.new_empty(2, 1, 30, 30), (0, 0))
    assert seen and not seen[0] and torch.backends.cudnn.allow_tf32 == setting


def test_the_sum_of_rows_above_and_below():
    s, later = torch.rand(2, 1, 9, 5, dtype=torch.float64), torch.rand(2, 1, 5).double()
    exact = torch.stack([s[:, :, :i].sum(2) for i in range(9)], dim=2)
    torch.testing.assert_close(above(s.clone()), exact)
    exact = torch.stack([later + s[:, :, i + 1 :].sum(2) for i in range(9)], dim=2)
    total = later + s.sum(2)
    torch.testing.assert_close(below(s.clone(), later), exact)
    torch.testing.assert_close(later, total)


def test_a_window_and_documents_keep_their_masks_apart():
    """Masks that distances decide are kept; those that documents decide are not."""
    sight, cpu = tiles.Sight(None, False, True, 9), torch.device("cpu")
    scope = tiles.Scope(sight, 60, 60, cpu, composed=True)
    first = scope.masked(range(10, 20), range(0, 20)).mask
    assert scope.masked(range(30, 40), range(20, 40)).mask is first
    assert scope.masked(range(30, 40), range(16, 40)).mask is not first
    dense = Visibility(window=9).dense(60, 60, cpu)
    assert torch.equal(~first[0, 0], dense[0, 10:20, :20])
